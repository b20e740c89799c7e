"""Cards as one table of text, for the trackers of a run: the rows of the terminal's tables, under their titles, and the warnings."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_lightning.lab.card import Card, label
from rllm_lightning.lab.card_sections import sections
from rllm_lightning.lab.card_warnings import warnings_of
from rllm_lightning.tracking.table import Table


def card_table(cards: Sequence[Card]) -> Table:
    """One column a card, behind the columns `section` and `property`."""
    identity = [("name", [card.name for card in cards]), ("formula", [card.formula for card in cards])]
    rows = [["What it is", name, *cells] for name, cells in identity]
    rows += [[section.title, name, *(cell(card) for card in cards)] for section in sections() for name, cell in section.rows]
    warnings = [warnings_of(card) for card in cards]
    for number in range(max(map(len, warnings), default=0)):
        rows.append(["Warnings", str(number + 1), *(texts[number] if number < len(texts) else "" for texts in warnings)])
    return Table(["section", "property", *map(label, cards)], rows)
