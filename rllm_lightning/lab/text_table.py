"""Tables of text, as the lab's answers show them: in a terminal and, by `page.py`, in HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm_lightning.tracking.terminal import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(frozen=True)
class TextTable:
    title: str
    head: list[str]
    rows: list[list[str]]


def print_table(content: TextTable, console: Console) -> None:
    """On a `rich` console."""
    from rich import box
    from rich.table import Table

    table = Table(title=plain(content.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in content.head:
        table.add_column(plain(name), overflow="fold")
    for row in content.rows:
        table.add_row(*map(plain, row))
    console.print(table)


def plain(text: str, style: str = "") -> Text:
    """Text for a `rich` console, and never markup: a name may look like markup, like an emoji's, or hold a terminal's commands."""
    from rich.text import Text

    return Text(harmless(text), style=style)
