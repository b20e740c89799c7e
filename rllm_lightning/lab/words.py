"""Lists and text as the lab's sentences and tables write them."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SHOWN = 6  # keys, values, names or steps in one sentence
NOTHING = "–"


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """The items, or the first of them and how many more there are."""
    items = list(items)
    more = [f"and {len(items) - MAX_SHOWN} more"] if len(items) > MAX_SHOWN else []
    return separator.join([*items[:MAX_SHOWN], *more])
