"""A table that belongs to a run as a whole, such as the card of its estimator; rooms above make it, trackers show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rllm_lightning.tracking.run_directory import atomic_write


@dataclass(frozen=True)
class Table:
    """Text in rows and columns: each row has one cell a column."""

    columns: list[str]
    rows: list[list[str]]


def write_tables(path: Path, tables: Mapping[str, Table]) -> None:
    """Write tables down by their names."""
    atomic_write(path, json.dumps({name: asdict(table) for name, table in tables.items()}) + "\n")


def read_tables(path: Path) -> dict[str, Table]:
    """The tables of such a file; none where there is no file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Table(**content) for name, content in found.items()}
