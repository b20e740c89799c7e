"""A comparison as one self-contained page: conclusions and caveats, figures, tables, the runs behind it. No scripts, no requests."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from rllm_lightning.lab.compare.figures import Picture, figures_of
from rllm_lightning.lab.compare.results import Comparison
from rllm_lightning.lab.compare.tables import TextTable, headline, methods, tables_of
from rllm_lightning.lab.compare.words import number
from rllm_lightning.tracking.chart import escape

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid #8884; vertical-align: top; }
.wide { overflow-x: auto; }
.caveats { border-left: 4px solid #d55e00; padding: .5em 0 .5em 2em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30em), 1fr)); gap: 1em; }
figure { margin: 0; }
figure img { width: 100%; background: #fff; }
figcaption, .methods { font-size: 13px; }
"""


def comparison_page(comparison: Comparison) -> str:
    """The page as text."""
    title = headline(comparison)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<h2>What may be concluded</h2><ul>{_items(comparison.conclusions)}</ul>",
        f'<h2>What to beware of</h2><ul class="caveats">{_items(comparison.caveats or ["nothing was found"])}</ul>',
        *(_table(table) for table in tables_of(comparison)),
        f'<h2>Figures</h2><div class="figures">{"".join(map(_figure, figures_of(comparison)))}</div>',
        f'<h2>How the numbers were made</h2><ul class="methods">{_items(methods(comparison))}</ul>',
        _table(runs_table(comparison)),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def runs_table(comparison: Comparison) -> TextTable:
    """Where the numbers come from."""
    rows = [
        [result.label, str(m.run.seed), m.run.status, str(m.run.last_step), number(m.curve.final), m.run.loss or "unknown", str(m.run.path)]
        for result in comparison.groups
        for m in result.group.members
    ]
    return TextTable("Runs", ["group", "seed", "status", "last step", "final", "loss", "folder"], rows)


def _items(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)


def _figure(picture: Picture) -> str:
    # an image of its own: nothing in it can reach the page, and its ids cannot clash with those of another
    data = base64.b64encode(picture.svg.encode("utf-8")).decode("ascii")
    title = escape(picture.title)
    return f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}"><figcaption>{title}</figcaption></figure>'


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2>"
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
