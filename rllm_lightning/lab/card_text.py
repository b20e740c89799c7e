"""Cards in a terminal: estimators side by side, as many columns as the terminal is wide, and the warnings in full below."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rllm_lightning.lab.card import Card, label
from rllm_lightning.lab.card_sections import number, sections, weights_title
from rllm_lightning.lab.card_warnings import warnings_of
from rllm_lightning.lab.drawing import sparkline

NAMES, COLUMN = 44, 18  # characters of the column of names, and of one of cells


def print_cards(cards: Sequence[Card], console: Console) -> None:
    """Print the cards' tables and warnings; cards that do not fit the console's width follow in tables below."""
    for card in cards:
        console.print(f"[bold]{escape(label(card))}[/bold]  {escape(card.formula)}", highlight=False)
    fitting = max(1, (console.width - NAMES) // COLUMN)
    for start in range(0, len(cards), fitting):
        shown = cards[start : start + fitting]
        for section in sections():
            table = _table(section.title, shown)
            for name, cell in section.rows:
                table.add_row(name, *(escape(cell(card)) for card in shown))
            console.print(table)
        console.print(_weights(shown))
    for card in cards:
        console.print(f"[bold]{escape(label(card))}[/bold]", highlight=False)
        for text in warnings_of(card) or ["nothing to warn of"]:
            console.print(f"  - {escape(text)}", highlight=False)


def _table(title: str, cards: Sequence[Card]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", width=NAMES - 2)
    for card in cards:
        table.add_column(escape(label(card)), width=COLUMN - 2, overflow="fold")
    return table


def _weights(cards: Sequence[Card]) -> Table:
    """One curve a size; the highest weight of a card is its full block, and stands beside it."""
    table = _table(weights_title(), cards)
    tops = [max((w for curve in card.weights for w in curve.weights if w is not None), default=0.0) for card in cards]
    for index, curve in enumerate(cards[0].weights):
        table.add_row(f"n={curve.n}", *(sparkline(card.weights[index].weights, top) for card, top in zip(cards, tops, strict=True)))
    table.add_row("a full block is", *(number(top) for top in tops))
    table.add_row("standard error, at most", *(number(max(curve.error for curve in card.weights)) for card in cards))
    return table
