"""A comparison as one self-contained page: conclusions and caveats, figures, tables, the runs behind it."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from rllm_lightning.lab.compare.figures import Picture, figures_of
from rllm_lightning.lab.compare.results import Comparison
from rllm_lightning.lab.compare.tables import headline, methods, tables_of
from rllm_lightning.lab.compare.words import number
from rllm_lightning.lab.page import items, page, table
from rllm_lightning.lab.text_table import TextTable
from rllm_lightning.tracking.chart import escape


def comparison_page(comparison: Comparison, figures: Sequence[Picture] | None = None) -> str:
    """The page as text; `figures`: those of the comparison, where they are drawn already."""
    pictures = figures_of(comparison) if figures is None else figures
    body = [
        f"<h2>What may be concluded</h2>{items(comparison.conclusions)}",
        f"<h2>What to beware of</h2>{items(comparison.caveats or ['nothing was found'], 'caveats')}",
        *map(table, tables_of(comparison)),
        f'<h2>Figures</h2><div class="charts">{"".join(map(_figure, pictures))}</div>',
        f"<h2>How the numbers were made</h2>{items(methods(comparison), 'methods')}",
        table(runs_table(comparison)),
    ]
    return page(headline(comparison), body)


def runs_table(comparison: Comparison) -> TextTable:
    """Where the numbers come from."""
    rows = [
        [result.label, str(m.run.seed), m.run.status, str(m.run.last_step), number(m.curve.final), m.run.loss or "unknown", str(m.run.path)]
        for result in comparison.groups
        for m in result.group.members
    ]
    return TextTable("Runs", ["group", "seed", "status", "last step", "final", "loss", "folder"], rows)


def _figure(picture: Picture) -> str:
    # an image of its own: nothing in it can reach the page, and its ids cannot clash with those of another
    data = base64.b64encode(picture.svg.encode("utf-8")).decode("ascii")
    title = escape(picture.title)
    return f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}"><figcaption>{title}</figcaption></figure>'
