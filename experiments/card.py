"""Property cards of advantage estimators, side by side.

    python experiments/card.py NAME [NAME ...] [keyword=value ...] [plugins=[my_pkg.my_mod]] [--json] [--html FILE] [--batches N]

A keyword (such as `k=4`, `ddof=1`, `norm_adv_by_std_in_grpo=false`) goes to every named estimator that has it. `--json` prints a
list with one object a card; `--html FILE` writes a page with drawings; `--batches` lists, or draws, more batches than usual.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rllm_lightning.lab.card import Card, make_card
from rllm_lightning.lab.exact import MAX_BATCHES
from rllm_lightning.registry import ESTIMATORS, load_plugins
from rllm_lightning.tracking.terminal import say
from rllm_lightning.values import guess, parse_yaml

PIPED_WIDTH = 170  # characters, where the output is not a terminal


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code: 0 done, 2 bad command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME|keyword=value", help="estimators, and keywords for them")
    parser.add_argument("--plugins", default="", metavar="MODULE[,MODULE]", help="modules that register your own estimators")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with drawings")
    parser.add_argument(
        "--batches", type=int, default=MAX_BATCHES, metavar="N", help="most batches to list before drawing so many (%(default)s)"
    )
    options = parser.parse_intermixed_args(argv)
    try:
        cards = make_cards(options)
    except ValueError as error:
        say(error)
        return 2
    if options.html:
        from rllm_lightning.lab.card_html import cards_page

        options.html.write_text(cards_page(cards), encoding="utf-8")
    if options.json:
        from rllm_lightning.lab.card_json import card_json

        print(json.dumps([card_json(card) for card in cards], indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from rllm_lightning.lab.card_text import print_cards

        print_cards(cards, Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH))
    return 0


def make_cards(options: argparse.Namespace) -> list[Card]:
    """The cards that a command line asks for.

    Raises:
        ValueError: nothing is named, or a plugin, estimator or keyword is not known.
    """
    keywords = dict(word.split("=", 1) for word in options.words if "=" in word)
    names = [word for word in options.words if "=" not in word]
    load_plugins(_modules(keywords.pop("plugins", "")) + _modules(options.plugins))
    if not names:
        raise ValueError(f"name at least one estimator: {', '.join(ESTIMATORS.names())}")
    given: dict[str, Any] = {key: guess(value) for key, value in keywords.items()}
    known = {name: {*ESTIMATORS.get(name).kwargs, "norm_adv_by_std_in_grpo"} for name in names}
    if unknown := sorted(set(given) - set().union(*known.values())):
        raise ValueError(f"{unknown[0]}: no keyword of {', '.join(names)}; they have: {', '.join(sorted(set().union(*known.values())))}")
    return [make_card(name, {key: given[key] for key in given if key in known[name]}, options.batches) for name in names]


def _modules(text: str) -> list[str]:
    """`a`, `a,b` or `[a, b]` -> module names."""
    parsed = parse_yaml(text) if text.startswith("[") else text.split(",")
    return [str(name).strip() for name in parsed if str(name).strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
