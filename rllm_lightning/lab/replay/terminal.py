"""A replay in a terminal: first what it comes to and what to beware of; then the tables, and some of the trajectories behind them."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from rllm_lightning.lab.replay.results import Replay
from rllm_lightning.lab.replay.sentences import caveats, headline, other_conclusions, pair_conclusions
from rllm_lightning.lab.replay.tables import extremes_table, methods, tables_of
from rllm_lightning.lab.replay.words import visible
from rllm_lightning.lab.text_table import TextTable, plain, print_table

MAX_PAIRS = 5  # in words; the page and the data hold the rest
MAX_SENTENCE = 1000
MAX_TEXT = 40  # characters of a prompt or a response
MAX_EXTREMES = 3  # of the most different pair


def print_replay(replay: Replay, console: Console) -> None:
    """Print all of it."""
    console.print(plain(headline(replay), "bold"))
    pairs = pair_conclusions(replay)
    num_more = len(pairs) - MAX_PAIRS
    more = [f"and {num_more} more pair{'s' * (num_more > 1)} in the table below"] if num_more > 0 else []
    for sentence in [*pairs[:MAX_PAIRS], *more, *other_conclusions(replay)]:
        console.print(Text(f"  - {visible(sentence, MAX_SENTENCE)}"))
    for sentence in caveats(replay):
        console.print(Text.assemble(("! ", "bold yellow"), visible(sentence, MAX_SENTENCE)))
    console.print()
    for table in tables_of(replay):
        print_table(table, console)
    apart = [pair for pair in replay.pairs if pair.extremes.largest()]
    if apart:
        most = min(apart, key=lambda pair: (math.isnan(value := pair.mean("pearson").value), value))
        table = extremes_table(most, lambda text: visible(text, MAX_TEXT))
        print_table(TextTable(table.title, table.head, table.rows[:MAX_EXTREMES]), console)
    for sentence in methods(replay):
        console.print(Text(sentence, style="dim"))
