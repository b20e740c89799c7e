"""Cards as one self-contained page: the tables of `card_sections`, bars of advantages, and curves of implied weights. No scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rllm_lightning.lab import drawing
from rllm_lightning.lab.card import Card, label
from rllm_lightning.lab.card_sections import Section, sections, weights_title
from rllm_lightning.lab.card_warnings import warnings_of
from rllm_lightning.lab.exact import PASS_RATES
from rllm_lightning.lab.probes import CANONICAL
from rllm_lightning.tracking.chart import escape, line_chart

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; margin: .5em 0 2em; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #8884; vertical-align: top; }
tbody th { font-weight: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(24em, 1fr)); gap: 1em; }
.wide { overflow-x: auto; }
"""


def cards_page(cards: Sequence[Card]) -> str:
    """The page as text."""
    title = "Estimators: " + ", ".join(label(card) for card in cards)
    body = [f"<h1>{escape(title)}</h1>"]
    for card in cards:
        warnings = "".join(f"<li>{escape(text)}</li>" for text in warnings_of(card) or ["nothing to warn of"])
        body.append(f"<h2>{escape(label(card))}</h2><p><code>{escape(card.formula)}</code> {escape(card.source)}</p><ul>{warnings}</ul>")
    body.append(f"<h2>{escape(weights_title())}</h2>{_charts(cards)}")
    body.append(f"<h2>Advantages, drawn</h2>{_bars(cards)}")
    body += [f"<h2>{escape(section.title)}</h2>{_table(section, cards)}" for section in sections()]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}{drawing.STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _charts(cards: Sequence[Card]) -> str:
    """One chart a card with a curve a size, over the pass rate in percent: the scales of two cards may be far apart."""
    charts = []
    for card in cards:
        curves = {
            f"n={c.n}" + (f" (± {c.error:.1g})" if c.error else ""): [
                (100 * p, _drawable(w)) for p, w in zip(PASS_RATES, c.weights, strict=True)
            ]
            for c in card.weights
        }
        charts.append(line_chart(f"{label(card)}: weight by percent solved", curves, "percent solved"))
    return f'<div class="charts">{"".join(charts)}</div>'


def _drawable(weight: float | None) -> float:
    return math.nan if weight is None else weight


def _bars(cards: Sequence[Card]) -> str:
    rows = []
    for name in CANONICAL:
        cells = []
        for card in cards:
            group = card.behaviour(name)
            means = [sum(row) / len(row) for row in group.advantages or []]
            cells.append(f"<td>{drawing.bars(means) if means else escape((group.problem or 'dropped').partition(':')[0])}</td>")
        rewards = ", ".join(f"{r:g}" for r in cards[0].behaviour(name).rewards)
        rows.append(f'<tr><th scope="row" title="{escape(rewards)}">{escape(name)}</th>{"".join(cells)}</tr>')
    return _framed(cards, rows)


def _table(section: Section, cards: Sequence[Card]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell(card))}</td>" for card in cards)}</tr>'
        for name, cell in section.rows
    ]
    return _framed(cards, rows)


def _framed(cards: Sequence[Card], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(label(card))}</th>' for card in cards)
    return f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
