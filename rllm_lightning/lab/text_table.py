"""Tables of text, as the lab's answers show them: in a terminal and, by `page.py`, in HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class TextTable:
    title: str
    head: list[str]
    rows: list[list[str]]


def print_table(content: TextTable, console: Console) -> None:
    """On a `rich` console. Cells are text, never markup: a name may look like markup or like an emoji's."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(content.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in content.head:
        table.add_column(Text(name), overflow="fold")
    for row in content.rows:
        table.add_row(*map(Text, row))
    console.print(table)
