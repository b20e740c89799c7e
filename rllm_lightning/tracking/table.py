"""A table that belongs to a run as a whole, such as the card of its estimator; rooms above make it, trackers show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Text in rows and columns: each row has one cell a column."""

    columns: list[str]
    rows: list[list[str]]
