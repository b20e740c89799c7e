"""The figures of a comparison, each one SVG text: curves, seeds, performance profile, pairs.

Groups are told apart by colour (Okabe and Ito's), by line style and by marker, so that they stay apart for the colour-blind and in print.
To add one: a function `(comparison, axes)` in `FIGURES`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rllm_lightning.lab.compare import statistics
from rllm_lightning.lab.compare.results import Comparison, GroupResult
from rllm_lightning.lab.compare.tables import NAMES
from rllm_lightning.lab.compare.words import number
from rllm_lightning.tracking.chart import LIGHT

DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
MAX_GROUPS = 12  # more could not be told apart
MAX_LABEL = 40  # characters
MAX_ROW = 60  # characters of labels side by side
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and in the reader's own letters
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "rllm-lightning",  # the same picture is the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Picture:
    title: str
    svg: str


def figures_of(comparison: Comparison) -> list[Picture]:
    """The figures that there is something to draw for."""
    if not any(result.summaries[comparison.measure].values for result in comparison.groups):
        return []
    shown = replace(comparison, groups=comparison.groups[:MAX_GROUPS])
    hint = f" (the best {MAX_GROUPS} of {len(comparison.groups)} groups)" if len(comparison.groups) > MAX_GROUPS else ""
    return [Picture(title + hint, draw(shown, paint)) for title, paint in FIGURES.items() if comparison.pairs or paint is not draw_pairs]


def draw(comparison: Comparison, paint: Callable[[Comparison, Any], None]) -> str:
    """One figure as SVG."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 4.0))
        paint(comparison, figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def draw_curves(comparison: Comparison, axes: Any) -> None:
    """A thin line a run; the mean over seeds, with its interval as a band, at the steps that all of them measured."""
    for index, result in enumerate(comparison.groups):
        colour = _colour(index)
        for member in result.group.members:
            axes.plot(member.curve.steps, member.curve.values, color=colour, linewidth=0.6, alpha=0.45)
        steps, values = common_curve(result)
        if steps.size:
            mean, low, high = statistics.mean_interval(values)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, mean, color=colour, linewidth=2, label=plain(result.label), **_style(index), markersize=4, markevery=0.1)
    axes.set(xlabel="step", ylabel=plain(comparison.metric_name))
    _legend(axes)


def common_curve(result: GroupResult) -> tuple[Any, Any]:
    """The steps [S] that all seeds of a group measured, and the values [S, n] there, a seed's runs averaged."""
    curves = {seed: [c for c in found if c.steps.size] for seed, found in result.group.curves().items()}
    curves = {seed: found for seed, found in curves.items() if found}
    shared = [set(curve.steps[np.isfinite(curve.values)].tolist()) for found in curves.values() for curve in found]
    steps = np.array(sorted(set.intersection(*shared)) if shared else [], int)
    means = [np.mean([curve.values[np.isin(curve.steps, steps)] for curve in found], axis=0) for found in curves.values()]
    return steps, np.stack(means, axis=-1) if means else np.empty((0, 0))


def draw_seeds(comparison: Comparison, axes: Any) -> None:
    """A dot a seed; beside them the mean with its interval (filled) and the interquartile mean (hollow)."""
    for index, result in enumerate(comparison.groups):
        summary, colour = result.summaries[comparison.measure], _colour(index)
        values = list(summary.values.values())
        places = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else np.zeros(len(values))
        axes.plot(index + places, values, linestyle="none", marker=_marker(index), color=colour, alpha=0.6, markersize=5)
        for offset, estimate, face in ((0.24, summary.mean, colour), (0.34, summary.interquartile_mean, "white")):
            if math.isfinite(estimate.low):
                axes.plot([index + offset] * 2, estimate[1:], color=colour, linewidth=1.5)
            axes.plot([index + offset], [estimate.value], marker="s", color=colour, markerfacecolor=face, markersize=5)
    _name_columns(axes, [result.label for result in comparison.groups])
    axes.set(ylabel=f"{NAMES[comparison.measure]} {comparison.metric_name}", xlim=(-0.5, len(comparison.groups) - 0.4))


def draw_profile(comparison: Comparison, axes: Any) -> None:
    """For each score the share of a group's seeds that are better than it: a line further out is a better group, all along."""
    sign = comparison.metric.sign
    everything = [value for result in comparison.groups for value in result.summaries[comparison.measure].values.values()]
    margin = 0.05 * (max(everything) - min(everything)) or 0.5
    start, end = sorted((sign * (min(everything) - margin), sign * (max(everything) + margin)))
    for index, result in enumerate(comparison.groups):
        values = np.sort([sign * value for value in result.summaries[comparison.measure].values.values()])
        if values.size:
            x = np.concatenate([[start], values, [end]])
            y = np.concatenate([[1.0], 1 - np.arange(1, values.size + 1) / values.size, [0.0]])
            axes.step(
                sign * x, y, where="post", color=_colour(index), linewidth=1.8, label=plain(result.label), **_style(index), markersize=3
            )
    better = "above" if sign > 0 else "below"
    axes.set(xlabel=f"{NAMES[comparison.measure]} {comparison.metric_name}", ylabel=f"share of seeds {better}", ylim=(-0.03, 1.03))
    _legend(axes)


def draw_pairs(comparison: Comparison, axes: Any) -> None:
    """Row minus column, with interval and Holm's p value; colour only underlines the sign, the numbers say it all."""
    labels = [result.label for result in comparison.groups]
    pairs = [pair for pair in comparison.pairs if pair.a in labels and pair.b in labels]
    having = [label for label in labels if any(label in (pair.a, pair.b) for pair in pairs)]
    size = len(having)
    differences = np.full((size, size), np.nan)
    for pair in pairs:
        row, column = having.index(pair.a), having.index(pair.b)
        value, low, high = pair.difference
        for y, x, flip in ((row, column, 1), (column, row, -1)):
            differences[y, x] = flip * value
            bounds = "" if math.isnan(low) else "\n[{}, {}]".format(*(signed(bound) for bound in sorted((flip * low, flip * high))))
            p = "" if math.isnan(pair.p_holm) else f"\np {number(pair.p_holm)}"
            axes.text(x, y, f"{signed(flip * value)}{bounds}{p}", ha="center", va="center", fontsize=max(4.0, 10 - 0.8 * size))
    limit = 2 * np.nanmax(np.abs(differences)) or 1.0  # twice as much: pale enough for the numbers to be read
    axes.imshow(comparison.metric.sign * differences, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.grid(False)
    _name_columns(axes, [f"- {label}" for label in having])
    axes.set_yticks(range(size), [plain(label) for label in having])


def signed(value: float) -> str:
    """A difference with its sign."""
    return f"+{number(value)}" if value > 0 else number(value)


FIGURES: dict[str, Callable[[Comparison, Any], None]] = {
    "Curves: every run, and the mean with its interval": draw_curves,
    "Every seed; mean (filled) and interquartile mean (hollow) with their intervals": draw_seeds,
    "Performance profile: share of seeds that are better than a score": draw_profile,
    "Differences, row minus column": draw_pairs,
}


def plain(text: str) -> str:
    """A label that fits, and that a legend shows: one that begins with an underscore it would hide."""
    short = text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"
    return f"\u200b{short}" if short.startswith("_") else short


def _name_columns(axes: Any, labels: Sequence[str]) -> None:
    slanted = sum(len(label) for label in labels) > MAX_ROW
    axes.set_xticks(range(len(labels)), [plain(label) for label in labels])
    axes.tick_params(axis="x", rotation=25 if slanted else 0)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _colour(index: int) -> str:
    return LIGHT[index % len(LIGHT)]


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _style(index: int) -> dict[str, str]:
    return {"linestyle": DASHES[index % len(DASHES)], "marker": _marker(index)}
