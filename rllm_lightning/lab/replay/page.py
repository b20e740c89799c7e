"""A replay as one self-contained page: conclusions and caveats, tables, curves by step, and trajectories with their text. No scripts, no
requests; whatever comes from episodes is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from rllm_lightning.lab.replay.results import Replay
from rllm_lightning.lab.replay.sentences import caveats, conclusions, headline
from rllm_lightning.lab.replay.tables import TextTable, extremes_table, methods, tables_of
from rllm_lightning.tracking.chart import escape, line_chart

MAX_LINES = 8  # in one chart; more could not be told apart
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid #8884; vertical-align: top; white-space: pre-wrap; }
.wide { overflow-x: auto; }
.caveats { border-left: 4px solid #d55e00; padding: .5em 0 .5em 2em; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24em), 1fr)); gap: 1em; }
.methods { font-size: 13px; }
"""


def replay_page(replay: Replay) -> str:
    """The page as text."""
    title = headline(replay)
    extremes = [extremes_table(pair, str) for pair in replay.pairs if pair.extremes.largest()]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<h2>What comes out</h2><ul>{_items(conclusions(replay))}</ul>",
        f'<h2>What to beware of</h2><ul class="caveats">{_items(caveats(replay) or ["nothing was found"])}</ul>',
        *map(_table, tables_of(replay)),
        f'<h2>Step by step</h2><div class="charts">{"".join(charts_of(replay))}</div>',
        f'<h2>How the numbers were made</h2><ul class="methods">{_items(methods(replay))}</ul>',
        *map(_table, extremes),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def charts_of(replay: Replay) -> list[str]:
    """Each number by step, a line a pair or an estimator."""

    def by_step(values: Iterable[float]) -> list[tuple[float, float]]:
        return list(zip(map(float, replay.steps), values, strict=True))

    pairs = replay.pairs[:MAX_LINES]
    charts = {
        "Correlation of advantages": {f"{p.a} - {p.b}": by_step(batch.pearson for batch in p.batches) for p in pairs},
        "Share of trajectories whose sign flips": {f"{p.a} - {p.b}": by_step(batch.flips for batch in p.batches) for p in pairs},
        "Effective sample size, share": {r.label: by_step(r.effective) for r in replay.estimators[:MAX_LINES]},
        "Share with an advantage of 0": {r.label: by_step(r.zero) for r in replay.estimators[:MAX_LINES]},
    }
    return [line_chart(title, lines) for title, lines in charts.items() if lines]


def _items(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2>"
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
