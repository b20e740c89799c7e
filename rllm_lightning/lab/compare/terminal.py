"""A comparison in a terminal: first what is compared, what may be concluded and what to beware of; then the tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rllm_lightning.lab.compare.results import Comparison
from rllm_lightning.lab.compare.tables import headline, methods, tables_of

MAX_CONCLUSIONS = 7  # the page and the data hold the rest


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print all of it."""
    console.print(f"[bold]{escape(headline(comparison))}[/bold]", highlight=False)
    shown = comparison.conclusions[:MAX_CONCLUSIONS]
    for sentence in shown:
        console.print(f"  - {escape(sentence)}", highlight=False)
    if len(comparison.conclusions) > len(shown):
        console.print(f"  - and {len(comparison.conclusions) - len(shown)} more pairs in the table below", highlight=False)
    for sentence in comparison.caveats:
        console.print(f"[bold yellow]![/bold yellow] {escape(sentence)}", highlight=False)
    console.print()
    for content in tables_of(comparison):
        table = Table(title=escape(content.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in content.head:
            table.add_column(escape(name), overflow="fold")
        for row in content.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for sentence in methods(comparison):
        console.print(f"[dim]{escape(sentence)}[/dim]", highlight=False)
