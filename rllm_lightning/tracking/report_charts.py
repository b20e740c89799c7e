"""Which charts a run's report has: `{section: {title: SVG}}`, made from the rows of its `metrics.csv` alone.

To add one: an entry in `special_charts`, or nothing at all: every metric that no other chart shows has one of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rllm_lightning.tracking.chart import Point, Span, line_chart, stacked_chart
from rllm_lightning.tracking.summary import is_headline

COMPARED_AREAS = ("val", "reward", "advantage")  # metrics `{area}/{who}/{stat}` of these share a chart, a line for each `who`
MAX_POINTS = 300  # of a line
MAX_POINTS_OF_ALL = 40_000
STAGES = ("generate", "process", "advantage", "update", "testing")  # of a step, in their order, without those that take no time to speak of
DIFFICULTY = {"too_hard": "none solved", "effective": "rewards differ", "too_easy": "all solved"}

Rows = Sequence[Mapping[str, float]]
T = TypeVar("T")


def curves(rows: Rows, max_charts: int) -> dict[str, str]:
    """The `panels` of a run as SVG, the first `max_charts` of them. Of a long run, only one line at a time is there with all its points."""
    shown = dict(list(panels(rows).items())[:max_charts])
    num = max(20, min(MAX_POINTS, MAX_POINTS_OF_ALL // max(1, sum(map(len, shown.values())))))
    return {
        title: line_chart(title, {name: thinned(points_of(rows, key), num) for name, key in keys.items()}) for title, keys in shown.items()
    }


def panels(rows: Rows) -> dict[str, dict[str, str]]:
    """Which curves a run has, headline metrics first: `{title: {name of a line: its metric}}`."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    charts: dict[str, dict[str, str]] = {}
    for key in sorted(keys, key=lambda key: (not is_headline(key), not key.startswith("reward/"))):
        area, _, rest = key.partition("/")
        who, _, stat = rest.rpartition("/")
        title, name = (f"{area}/*/{stat}", who) if area in COMPARED_AREAS and who else (key, key)
        charts.setdefault(title, {})[name] = key
    return {title if len(lines) > 1 else title.replace("*", next(iter(lines))): lines for title, lines in charts.items()}


def special_charts(rows: Rows) -> dict[str, dict[str, str]]:
    """What belongs together, over the steps: distributions, difficulty, time. A chart without its metrics is left out."""
    lengths = {stat: points_of(rows, f"rollout/response_length/{stat}") for stat in ("mean", "p50", "max")}
    middle = _spans(rows, "rollout/response_length/p10", "rollout/response_length/p90")
    times = {stage: points for stage in STAGES if (points := points_of(rows, f"time/{stage}"))}
    distributions = {f"reward of {role}": _reward_chart(rows, role) for role in _roles(rows, "reward/(.+)/std")}
    distributions |= {
        f"groups of {role}: mean reward": _group_chart(rows, role) for role in _roles(rows, "batch/(.+)/group_reward_mean/p50")
    }
    if any(lengths.values()):
        title = "tokens of a response"
        shown = {name: line for name, line in lengths.items() if line}
        distributions[title] = line_chart(title, _thin(shown), bands=_thin_bands({"middle 80 %": middle} if middle else {}))
    difficulty = {f"groups of {role}": _difficulty_chart(rows, role) for role in _roles(rows, "batch/(.+)/fractions/effective")}
    title = "seconds of a step, by stage"
    time = {title: stacked_chart(title, _together(times))} if times else {}
    return {name: charts for name, charts in (("Distributions", distributions), ("Difficulty", difficulty), ("Time", time)) if charts}


def points_of(rows: Rows, key: str) -> list[Point]:
    """A metric at the steps that have it."""
    return [(row["step"], row[key]) for row in rows if key in row]


def thinned(points: Sequence[Point], num: int) -> list[Point]:
    """About `num` points that look like all of them: of each of `num` / 2 stretches the lowest and the highest. What is not finite
    goes, unless nothing is thinned."""
    if len(points) <= num:
        return list(points)
    finite = [point for point in points if all(map(math.isfinite, point))]
    size = max(1, math.ceil(2 * len(finite) / num))
    stretches = [finite[start : start + size] for start in range(0, len(finite), size)]
    kept = [sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}) for part in stretches]
    return [point for pair in kept for point in pair]


def _reward_chart(rows: Rows, role: str) -> str:
    at = f"reward/{role}"
    std = [
        (row["step"], row[f"{at}/mean"] - row[f"{at}/std"], row[f"{at}/mean"] + row[f"{at}/std"])
        for row in rows
        if f"{at}/mean" in row and f"{at}/std" in row
    ]
    bands = {"lowest to highest": _spans(rows, f"{at}/min", f"{at}/max"), "mean ± std": std}
    return line_chart(f"reward of {role}", _thin({"mean": points_of(rows, f"{at}/mean")}), bands=_thin_bands(bands))


def _group_chart(rows: Rows, role: str) -> str:
    at = f"batch/{role}/group_reward_mean"
    bands = {"middle 80 %": _spans(rows, f"{at}/p10", f"{at}/p90")}
    return line_chart(f"groups of {role}: mean reward", _thin({"median": points_of(rows, f"{at}/p50")}), bands=_thin_bands(bands))


def _difficulty_chart(rows: Rows, role: str) -> str:
    layers = {name: points_of(rows, f"batch/{role}/fractions/{stat}") for stat, name in DIFFICULTY.items()}
    return stacked_chart(f"groups of {role}", _together(layers))


def _roles(rows: Rows, pattern: str) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [match[1] for key in keys if (match := re.fullmatch(pattern, key))]


def _spans(rows: Rows, low: str, high: str) -> list[Span]:
    return [(row["step"], row[low], row[high]) for row in rows if low in row and high in row]


def _together(layers: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """Layers at the same steps, at most `MAX_POINTS` of them."""
    steps = _every(sorted({x for line in layers.values() for x, _ in line}))
    return {name: [(x, values.get(x, 0.0)) for x in steps] for name, values in ((name, dict(line)) for name, line in layers.items())}


def _thin(series: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    return {name: thinned(line, MAX_POINTS) for name, line in series.items()}


def _thin_bands(bands: Mapping[str, Sequence[Span]]) -> dict[str, Sequence[Span]]:
    return {name: _every(spans) for name, spans in bands.items()}


def _every(things: Sequence[T]) -> Sequence[T]:
    """Every one, or every second, third, ...: at most `MAX_POINTS`."""
    return things[:: max(1, math.ceil(len(things) / MAX_POINTS))]
