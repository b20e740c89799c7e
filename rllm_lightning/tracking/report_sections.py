"""The parts of a run's report as HTML; everything that came from outside is escaped here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rllm_lightning.tracking.chart import escape
from rllm_lightning.tracking.episode_rows import shorten
from rllm_lightning.tracking.rollout_sample import Chosen
from rllm_lightning.tracking.summary import Course, is_headline
from rllm_lightning.tracking.table import Table

MAX_TILES = 8  # headline numbers at the top
MAX_ROWS = 400  # of the table of metrics
MAX_CELL = 600  # characters


def header_section(name: str, summary: Mapping[str, Any], courses: Mapping[str, Course]) -> str:
    """The run's name, how it stands, what it is, and its headline numbers."""
    facts = {key: summary[key] for key in ("estimator", "loss_fn", "seed", "steps") if key in summary}
    if summary:
        facts["time"] = timedelta(seconds=round(summary["wall_time_s"]))
        facts["tokens/s"] = "–" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:,.0f}"
        facts["commit"] = (summary["git_commit"] or "–")[:10]
    status = summary.get("status", "unknown")
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    headline = [(key, course) for key, course in courses.items() if _is_tile(key)][:MAX_TILES]
    tiles = "".join(_tile(key, course) for key, course in headline)
    return (
        f'<header><h1>{escape(name)} <span class="badge {escape(status)}">{escape(status)}</span></h1>\n<dl>{items}</dl></header>'
        f'\n<ul class="tiles">{tiles}</ul>'
    )


def charts_section(charts: Mapping[str, str]) -> str:
    """The headline curves; the others folded."""
    if not charts:
        return "<p>No metrics yet.</p>"
    headline = [svg for title, svg in charts.items() if _is_first(title)]
    others = [svg for title, svg in charts.items() if not _is_first(title)]
    more = folded(f"{len(others)} more curves", f'<div class="charts">{"".join(others)}</div>', "more curves") if others else ""
    return f'<h2>Curves</h2>\n<div class="charts">{"".join(headline)}</div>\n{more}'


def special_section(name: str, charts: Mapping[str, str]) -> str:
    """Charts under a headline of their own."""
    return f'<h2>{escape(name)}</h2>\n<div class="charts">{"".join(charts.values())}</div>'


def metrics_section(courses: Mapping[str, Course]) -> str:
    """First, last and highest value of every metric; those that are no headline folded."""
    courses = dict(itertools.islice(courses.items(), MAX_ROWS))
    headline = {key: course for key, course in courses.items() if is_headline(key)}
    others = {key: course for key, course in courses.items() if not is_headline(key)}
    parts = [f"<h2>Final metrics</h2>\n{_table(headline)}"] if headline else []
    if others:
        parts.append(folded(f"{len(others)} more metrics", _table(others), "more metrics"))
    return "\n".join(parts)


def card_section(name: str, table: Table) -> str:
    """A table of the run as a whole, folded; rows under their first cell where it changes."""
    head = "".join(f'<th scope="col">{escape(shorten(column, MAX_CELL))}</th>' for column in table.columns[1:])
    body = []
    for title, rows in itertools.groupby(table.rows, key=lambda row: row[0]):
        body.append(f'<tr><th scope="rowgroup" colspan="{len(table.columns)}">{escape(shorten(title, MAX_CELL))}</th></tr>')
        body += [f"<tr>{''.join(f'<td>{escape(shorten(cell, MAX_CELL))}</td>' for cell in row[1:])}</tr>" for row in rows]
    content = f'<div class="wide"><table class="card"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    title = name.replace("_", " ").capitalize()
    return f"<h2>{escape(title)}</h2>\n{folded('what it does, computed without a model', content, name)}"


def browser_section(chosen: Chosen) -> str:
    """The trajectory browser without its data, and what it shows of all there is. Nothing for a run without episodes."""
    if not chosen.num_files:
        return "<h2>Trajectories</h2>\n<p>No episodes were written.</p>\n"
    return f"<h2>Trajectories</h2>\n<p>{_notice(chosen)}</p>\n{_BROWSER}"


def folded(title: str, content: str, name: str = "") -> str:
    """HTML that opens at a click; the page remembers by `name` (the title, where none is given) that it is open."""
    return f'<details data-name="{escape(name or title)}"><summary>{escape(title)}</summary>{content}</details>'


def _notice(chosen: Chosen) -> str:
    num_shown = len(chosen.groups)
    text = f"{num_shown:,} groups of {chosen.num_tasks:,} tasks in {chosen.num_files:,} files of episodes."
    if chosen.num_shown_tasks < chosen.num_tasks or chosen.num_unread:
        text += f" This is a sample of whole groups, thinner for older steps; {chosen.num_shown_tasks:,} tasks are shown"
        text += f", and {chosen.num_unread:,} more files were not read." if chosen.num_unread else "."
    return escape(text)


def _is_first(title: str) -> bool:
    return re.fullmatch(r"val/.+/pass@\d+|reward/.+/mean", title) is not None


def _is_tile(key: str) -> bool:
    return key.endswith("/pass@1") or (is_headline(key) and not key.startswith("val/"))


def _tile(key: str, course: Course) -> str:
    best = "" if course.best is None else f" · best {course.best:.4g} at step {course.best_step}"
    return f"<li><span>{escape(key)}</span><b>{course.last:.4g}</b><small>first {course.first:.4g}{best}</small></li>"


def courses_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Course]:
    """The course of every metric over the rows of `metrics.csv`."""
    courses: dict[str, Course] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step":
                courses.setdefault(key, Course(value, value)).update(value, int(row["step"]))
    return courses


def _table(courses: Mapping[str, Course]) -> str:
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>highest</th><th>at step</th></tr>"
    return f'<div class="wide"><table>{head}{"".join(_table_row(key, courses[key]) for key in courses)}</table></div>'


def _table_row(key: str, course: Course) -> str:
    highest = ("–", "–") if course.best is None else (f"{course.best:.5g}", str(course.best_step))
    cells = (f"{course.first:.5g}", f"{course.last:.5g}", *highest)
    return f"<tr><td>{escape(key)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


_BROWSER = """<noscript><p>To look through the trajectories, the page's own script must be allowed to run.</p></noscript>
<form id="filters" autocomplete="off">
<label>set <select id="mode"></select></label>
<label>step <select id="step"></select></label>
<label>role <select id="role"></select></label>
<label>ended as <select id="end"></select></label>
<label>task <input id="task" type="search" placeholder="part of its name"></label>
<label>reward from <input id="low" type="number" step="any"></label>
<label>to <input id="high" type="number" step="any"></label>
<label>shade tokens by <select id="shade">
<option value="advantage">advantage</option>
<option value="gap">trainer − sampler log-prob</option>
<option value="none">nothing</option>
</select></label>
<button type="reset">clear</button>
</form>
<p id="count" role="status"></p>
<div id="browser">
<nav aria-label="groups"><ol id="list"></ol></nav>
<div id="panes"></div>
</div>
"""
