"""The outcome of a comparison: a table with what was counted, printed for people or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_lightning.lab.speed.timing import Timing

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """`spec` formats the numbers ("" for text); cells of rows that lack the key stay empty."""

    key: str
    heading: str
    spec: str = ""


VARIANT = Column("variant", "variant")
DTYPE = Column("dtype", "dtype")
SECONDS = (Column("median_s", "median s", ".3g"), Column("min_s", "min s", ".3g"), Column("max_s", "max s", ".3g"))


@dataclass
class Report:
    """`counts` says of what and how much; `notes` what the columns mean; `rows` have the keys of `columns`."""

    title: str
    counts: dict[str, Any]
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        headings = {column.key: column.heading for column in self.columns}
        return {"title": self.title, "counts": self.counts, "columns": headings, "rows": self.rows, "notes": self.notes}

    def print(self, console: Any) -> None:
        """The table on a `rich` console."""
        from rich.table import Table

        console.print(f"\n[bold]{self.title}[/bold]")
        console.print(", ".join(f"{name} {value}" for name, value in self.counts.items()), style="dim", highlight=False)
        table = Table(box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column.heading, justify="right" if column.spec else "left", no_wrap=bool(column.spec))
        for row in self.rows:
            table.add_row(*(_cell(row.get(column.key), column.spec) for column in self.columns))
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim", highlight=False)


def seconds_of(timing: Timing) -> Row:
    """The cells of the columns `SECONDS`."""
    return {"median_s": timing.median_s, "min_s": min(timing.seconds), "max_s": max(timing.seconds)}


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)
