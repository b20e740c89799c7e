"""One self-contained HTML page: its frame, lists and tables. No scripts, no requests; every text is escaped.

body parts (`items`, `table`, or HTML of the caller's own) --page--> the whole page
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rllm_lightning.lab.text_table import TextTable
from rllm_lightning.tracking.chart import escape

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
figure { margin: 0; }
figure img { width: 100%; background: #fff; }
figcaption, .methods { font-size: 13px; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Sequence[str]) -> str:
    """A page with its headline; `body` is HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    content = "\n".join([f"<h1>{escape(title)}</h1>", *body])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{content}\n</body></html>\n'


def items(sentences: Iterable[str], kind: str = "") -> str:
    """A list of sentences; `kind` is its class."""
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def table(content: TextTable) -> str:
    """A table under its title."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in content.rows)
    title = f"<h2>{escape(content.title)}</h2>"
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
