"""A comparison in a terminal: first what is compared, what may be concluded and what to beware of; then the tables."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rllm_lightning.lab.compare.results import Comparison
from rllm_lightning.lab.compare.tables import headline, methods, tables_of
from rllm_lightning.lab.text_table import plain, print_table

MAX_CONCLUSIONS = 7  # the page and the data hold the rest


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print all of it, as text and never as markup."""
    console.print(plain(headline(comparison), "bold"))
    shown = comparison.conclusions[:MAX_CONCLUSIONS]
    for sentence in shown:
        console.print(plain(f"  - {sentence}"))
    if len(comparison.conclusions) > len(shown):
        console.print(plain(f"  - and {len(comparison.conclusions) - len(shown)} more pairs in the table below"))
    for sentence in comparison.caveats:
        console.print(Text.assemble(("! ", "bold yellow"), plain(sentence)))
    console.print()
    for table in tables_of(comparison):
        print_table(table, console)
    for sentence in methods(comparison):
        console.print(plain(sentence, "dim"))
