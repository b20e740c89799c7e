"""`report.html`: a run on one page, in one file that needs nothing else; the same curves as SVG files in `figures/`.

    config.yaml, metrics.csv, summary.json    ->  header, curves, distributions
    tables.json                               ->  the card of the estimator
    episodes/*.jsonl  ->  RolloutSample       ->  the trajectory browser's data, as JSON inside the page
    report_page/page.css, page.js             ->  its looks, and the browser

What a run does not have yet (no episodes, no summary) its page leaves out, so that a running or a failed run can be looked at too.
Everything that came from outside is escaped or JSON that the page's script puts into text nodes; the page's policy lets run that script
alone, by its hash, and forbids requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path

import yaml

from rllm_lightning.tracking.chart import escape
from rllm_lightning.tracking.episode_rows import shorten
from rllm_lightning.tracking.metrics_table import MetricsReader
from rllm_lightning.tracking.report_charts import curves, special_charts
from rllm_lightning.tracking.report_sections import (
    browser_section,
    card_section,
    charts_section,
    courses_of,
    folded,
    header_section,
    metrics_section,
    special_section,
)
from rllm_lightning.tracking.rollout_sample import RolloutSample, script_json
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write, safe_name
from rllm_lightning.tracking.table import read_tables

MAX_BYTES = 5_000_000  # of the page
MAX_CHARTS = 150  # curves on the page, and in `figures/`
MAX_CHARACTERS = 200_000  # of the config that are shown

_ASSETS = files("rllm_lightning.tracking") / "report_page"


def write_report(run: RunDirectory) -> Path:
    """Write the report and its figures, over those that are there.

    Raises:
        ValueError: a file of the run is not what it should be; the message names it.
    """
    return Report(run).write()


class Report:
    """The report of a run that may be written again and again while the run goes on: only what is new is read then."""

    def __init__(self, run: RunDirectory):
        self.run = run
        self.status = "unknown"
        self._config = run.config_yaml.read_text(encoding="utf-8")
        self._metrics = MetricsReader(run.metrics_csv)
        settings = yaml.safe_load(self._config)["rllm"]["episode_logging"]
        self.rollouts = RolloutSample(run.episodes_under(settings["episode_log_dir"]))

    def write(self, reload_s: float | None = None) -> Path:
        """Write the page as the run is now, and the figures; or, with `reload_s`, only a page, which loads itself anew so often.

        Raises:
            ValueError: as `write_report`.
        """
        rows, path = self._metrics.read(), self.run.summary_json
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.status = summary.get("status", "unknown")
        self.rollouts.refresh()
        charts, special, courses = curves(rows, MAX_CHARTS), special_charts(rows), courses_of(rows)
        for title, svg in [] if reload_s else [*charts.items(), *(pair for section in special.values() for pair in section.items())]:
            atomic_write(self.run.figures / f"{safe_name(title.replace('*', 'all').replace('/', '.'))}.svg", svg, durable=False)
        before = [
            header_section(self.run.path.name, summary, courses),
            charts_section(charts),
            *(special_section(name, svgs) for name, svgs in special.items()),
        ]
        after = [
            metrics_section(courses),
            *(card_section(name, table) for name, table in read_tables(self.run.tables_json).items()),
            "<h2>Configuration</h2>",
            folded("config.yaml", f"<pre>{escape(shorten(self._config, MAX_CHARACTERS))}</pre>"),
            folded("versions", f"<pre>{escape(yaml.safe_dump(summary.get('versions', {}), sort_keys=False))}</pre>"),
        ]
        atomic_write(self.run.report_html, self._page("\n".join(before), "\n".join(after), reload_s), durable=False)
        return self.run.report_html

    def _page(self, before: str, after: str, reload_s: float | None) -> str:
        script = (_ASSETS / "page.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        head = _HEAD.format(title=escape(self.run.path.name), style=(_ASSETS / "page.css").read_text(encoding="utf-8"), digest=digest)
        room = MAX_BYTES - len(f"{head}{before}{after}{script}".encode()) - 10_000  # of the frame around
        chosen = self.rollouts.choose(max(0, room))
        data = f'{{"reload":{script_json(reload_s)},"groups":[{",".join(chosen.groups)}]}}'
        return "\n".join(
            [
                f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<body>\n<main>',
                before,
                browser_section(chosen),
                after,
                f'</main>\n<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n',
            ]
        )


_HEAD = """<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; \
base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{style}</style>
</head>"""
