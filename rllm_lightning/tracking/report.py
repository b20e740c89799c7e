"""`report.html`: a run on one page, in one file that needs nothing else; the same curves as SVG files in `figures/`.

    config.yaml, metrics.csv, summary.json, episodes/*.jsonl  ->  write_report(run)  ->  report.html, figures/*.svg

What a run does not have yet (no episodes, no summary) its page leaves out, so that a running or a failed run can be looked at too.
Everything that came from outside is escaped, and the page forbids itself scripts and requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from rllm_lightning.tracking.chart import Point, escape, line_chart
from rllm_lightning.tracking.episode_logger import read_episodes
from rllm_lightning.tracking.episode_rows import advantage_of, prompt_of, shorten
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write, safe_name
from rllm_lightning.tracking.summary import Course, is_headline
from rllm_lightning.types import Episode

MAX_EPISODES = 8  # shown of a mode, from the worst to the best
MAX_CHARACTERS = 6000  # of a prompt or a response
COMPARED_AREAS = ("val", "reward", "advantage")  # metrics `{area}/{who}/{stat}` of these share a chart, a line for each `who`


def write_report(run: RunDirectory) -> Path:
    """Write the report and its figures, over those that are there.

    Raises:
        ValueError: a file of the run is not what it should be; the message names it.
    """
    config = run.config_yaml.read_text(encoding="utf-8")
    rows = read_metrics(run.metrics_csv) if run.metrics_csv.exists() else []
    summary = json.loads(run.summary_json.read_text(encoding="utf-8")) if run.summary_json.exists() else {}
    charts = {title: line_chart(title, series) for title, series in panels(rows).items()}
    for title, svg in charts.items():
        atomic_write(run.figures / f"{safe_name(title.replace('*', 'all').replace('/', '.'))}.svg", svg)
    sections = [
        _header(run, summary),
        _charts(charts),
        _metrics_table(rows),
        *(_rollouts(*sample) for sample in sample_episodes(_episode_folder(run, config))),
        "<h2>Configuration</h2>",
        f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>",
        f"<details><summary>versions</summary><pre>{escape(yaml.safe_dump(summary.get('versions', {}), sort_keys=False))}</pre></details>",
    ]
    page = _PAGE.replace("{title}", escape(run.path.name)).replace("{style}", _STYLE).replace("{body}", "\n".join(sections))
    atomic_write(run.report_html, page)
    return run.report_html


def panels(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[Point]]]:
    """The charts of a run, headline metrics first: `{title: {name of a line: points}}`."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    charts: dict[str, dict[str, list[Point]]] = {}
    for key in sorted(keys, key=lambda key: (not is_headline(key), not key.startswith("reward/"))):
        area, _, rest = key.partition("/")
        who, _, stat = rest.rpartition("/")
        title, name = (f"{area}/*/{stat}", who) if area in COMPARED_AREAS and who else (key, key)
        charts.setdefault(title, {})[name] = [(row["step"], row[key]) for row in rows if key in row]
    return {title if len(lines) > 1 else title.replace("*", next(iter(lines))): lines for title, lines in charts.items()}


def sample_episodes(folder: Path) -> Iterator[tuple[str, int, list[Episode]]]:
    """For each mode (validation first) the last step's `(mode, step, episodes)`: a few, spread evenly from the worst to the best."""
    last: dict[str, tuple[int, Path]] = {}
    for path in folder.glob("*.jsonl"):
        if match := re.fullmatch(r"(.+)_step_(\d+)", path.stem):
            last[match[1]] = max(last.get(match[1], (-1, path)), (int(match[2]), path))
    for mode, (step, path) in sorted(last.items(), reverse=True):
        episodes = sorted(read_episodes(path), key=_reward)
        num = min(MAX_EPISODES, len(episodes))
        yield mode, step, [episodes[round(k * (len(episodes) - 1) / max(num - 1, 1))] for k in range(num)]


def _reward(episode: Episode) -> float:
    return sum(trajectory.reward or 0.0 for trajectory in episode.trajectories)


def _episode_folder(run: RunDirectory, config: str) -> Path:
    folder = yaml.safe_load(config)["rllm"]["episode_logging"]["episode_log_dir"]
    return Path(folder).expanduser() if folder else run.episodes


# ------------------------------------------------------------------------------------------------------------------ parts


def _header(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    facts = {key: summary[key] for key in ("estimator", "loss_fn", "seed", "steps") if key in summary}
    if summary:
        facts["time"] = timedelta(seconds=round(summary["wall_time_s"]))
        facts["tokens/s"] = "–" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:,.0f}"
        facts["commit"] = (summary["git_commit"] or "–")[:10]
    status = summary.get("status", "unknown")
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f'<h1>{escape(run.path.name)} <span class="badge {escape(status)}">{escape(status)}</span></h1>\n<dl>{items}</dl>'


def _charts(charts: Mapping[str, str]) -> str:
    headline = [svg for title, svg in charts.items() if title.startswith(("val/", "reward/"))]
    others = [svg for title, svg in charts.items() if not title.startswith(("val/", "reward/"))]
    if not charts:
        return "<p>No metrics yet.</p>"
    return (
        f'<h2>Curves</h2>\n<div class="charts">{"".join(headline)}</div>\n'
        f'<details><summary>{len(others)} more curves</summary><div class="charts">{"".join(others)}</div></details>'
    )


def _metrics_table(rows: Sequence[Mapping[str, float]]) -> str:
    courses: dict[str, Course] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step":
                courses.setdefault(key, Course(value, value)).update(value, int(row["step"]))
    headline = {key: course for key, course in courses.items() if is_headline(key)}
    others = {key: course for key, course in courses.items() if not is_headline(key)}
    parts = [f"<h2>Final metrics</h2>\n{_table(headline)}"] if headline else []
    if others:
        parts.append(f"<details><summary>{len(others)} more metrics</summary>{_table(others)}</details>")
    return "\n".join(parts)


def _table(courses: Mapping[str, Course]) -> str:
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>highest</th><th>at step</th></tr>"
    return f"<table>{head}{''.join(_table_row(key, courses[key]) for key in courses)}</table>"


def _table_row(key: str, course: Course) -> str:
    highest = ("–", "–") if course.best is None else (f"{course.best:.5g}", str(course.best_step))
    cells = (f"{course.first:.5g}", f"{course.last:.5g}", *highest)
    return f"<tr><td>{escape(key)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _rollouts(mode: str, step: int, episodes: Iterable[Episode]) -> str:
    return f"<h2>Rollouts: {escape(mode)}, step {step}</h2>\n" + "\n".join(_episode(episode) for episode in episodes)


def _episode(episode: Episode) -> str:
    reason = episode.termination_reason.value if episode.termination_reason else "–"
    mark = "correct" if episode.is_correct else "wrong"
    lines = [f'<article><header><b>{escape(episode.id)}</b> <span class="badge {mark}">{mark}</span> {escape(reason)}</header>']
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            numbers = [("reward", trajectory.reward), ("advantage", advantage_of(step)), ("tokens", len(step.response_ids))]
            shown = " · ".join(f"{name} {value:.4g}" for name, value in numbers if value is not None)
            lines += [
                f"<p>{escape(trajectory.name)} · {shown}</p>",
                f"<pre>{escape(shorten(prompt_of(step), MAX_CHARACTERS))}</pre>",
                f'<pre class="response">{escape(shorten(step.model_response, MAX_CHARACTERS))}</pre>',
            ]
    if error := episode.info.get("error"):
        lines.append(f'<pre class="error">{escape(shorten(json.dumps(error, indent=1), MAX_CHARACTERS))}</pre>')
    return "\n".join([*lines, "</article>"])


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root {
  --ink: #222; --soft: #667; --ground: #fff; --panel: #f6f7f9; --edge: #dde; --good: #17794a; --bad: #b3261e; --accent: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8e8ea; --soft: #a0a4ad; --ground: #16181c; --panel: #1f2228; --edge: #343842;
    --good: #4cc38a; --bad: #ff8a80; --accent: #56b4e9;
  }
}
body {
  color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; }
.badge {
  font-size: .8rem; font-weight: 600; padding: .1rem .5rem; border: 1px solid currentColor; border-radius: 1rem; color: var(--soft);
}
.done, .correct { color: var(--good); }
.failed, .wrong { color: var(--bad); }
.running { color: var(--accent); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1rem; margin-top: .6rem; }
.charts svg { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
article { border: 1px solid var(--edge); border-radius: 6px; padding: .6rem .9rem; margin: .8rem 0; }
article p { color: var(--soft); margin: .4rem 0 .2rem; }
pre {
  background: var(--panel); border-radius: 6px; padding: .5rem .7rem; margin: .2rem 0; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.response { border-left: 3px solid var(--accent); }
.error { border-left: 3px solid var(--bad); }
details > summary { cursor: pointer; color: var(--soft); margin-top: .8rem; }
"""
