"""`metrics.csv`: every scalar, one row a step. Kept as it grows by `MetricsTable`, read back by `read_metrics`, or, while it grows, by
`MetricsReader`.

The first column is `step`; others join, at the right, when a metric first appears. Floats are written with all their digits
(`repr`), so that reading gives the very same numbers; not-a-number is `nan`, infinities `inf` and `-inf`; an empty field is
a metric that this step did not have.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_lightning.tracking.run_directory import atomic_write, writing

Number = int | float
STEP = "step"


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """Metrics as Python numbers; NumPy and tensor scalars and booleans are converted.

    Raises:
        ValueError: a value is not one number; the message names its key.
    """
    return {key: _as_number(key, value) for key, value in metrics.items()}


def _as_number(key: str, value: Any) -> Number:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float):
        raise ValueError(f"metric {key!r}: expected one number, got {type(value).__name__} {value!r}")
    return value


class MetricsTable:
    """The file, open for further rows. A row is safe from the end of the process as soon as `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        self.columns, self._last_step = [STEP], -1
        if path.exists():
            self._write(*_read_text(path))  # written anew, so that an unfinished last line is gone

    def append(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Add the row of `step`. More metrics of the last row's own step join that row.

        Raises:
            ValueError: a later step is in the table already.
        """
        if step < self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}; log steps in order")
        new = [key for key in metrics if key not in self.columns]
        row = {STEP: str(step), **{key: repr(value) for key, value in metrics.items()}}
        if new or step == self._last_step or not self.path.exists():
            self._write([*self.columns, *new], self._with(row))
        else:
            with writing(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(_line([row.get(column, "") for column in self.columns]))
        self._last_step = step

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`: those a resumed run does again."""
        if self.path.exists():
            columns, rows = _read_text(self.path)
            self._write(columns, (row for row in rows if int(row[STEP]) <= step))

    def _with(self, row: dict[str, str]) -> Iterator[dict[str, str]]:
        """The rows of the file and this one; its step's, where there is one, is the last and joins it."""
        for other in _read_text(self.path)[1] if self.path.exists() else ():
            if other[STEP] == row[STEP]:
                row = other | row
            else:
                yield other
        yield row

    def _write(self, columns: list[str], rows: Iterable[dict[str, str]]) -> None:
        """A table is read and written a row at a time: a long run's is large, and its text the smallest form of it."""
        last_step, lines = -1, [_line(columns)]
        for row in rows:
            last_step = int(row[STEP])
            lines.append(_line([row.get(column, "") for column in columns]))
        atomic_write(self.path, "".join(lines))
        self.columns, self._last_step = columns, last_step


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`: `{"step": ..., metric: value}` without the metrics that a step did not have.

    Raises:
        ValueError: the file is not a table of metrics.
    """
    return _numbers(Path(path), Path(path).read_bytes())


def _numbers(path: Path, data: bytes) -> list[dict[str, float]]:
    try:
        return [{key: float(value) for key, value in row.items() if value} for row in _parse(path, data.decode("utf-8"))[1]]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: not a table of metrics ({error})") from error


class MetricsReader:
    """Reads a `metrics.csv` again and again while another process writes it; what was read before is not read once more."""

    def __init__(self, path: Path):
        self.path = path
        self._header, self._last_line, self._end = b"", b"", 0
        self._rows: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """All rows, as `read_metrics` gives them; none where there is no file yet.

        Raises:
            ValueError: the file is not a table of metrics.
        """
        if not self.path.exists():
            self._last_line, self._end, self._rows = b"", 0, []
            return self._rows
        with self.path.open("rb") as file:
            header = file.readline()
            file.seek(max(self._end - len(self._last_line), 0))
            if not self._end or header != self._header or file.read(len(self._last_line)) != self._last_line:
                self._header, self._end, self._rows = header, 0, []  # written anew: a metric joined, or steps are done again
                file.seek(0)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if new:
            self._rows += _numbers(self.path, new if self._end == 0 else header + new)
            self._last_line = new[new[:-1].rfind(b"\n") + 1 :]
            self._end += len(new)
        return self._rows


def _read_text(path: Path) -> tuple[list[str], Iterator[dict[str, str]]]:
    return _parse(path, path.read_bytes().decode("utf-8"))


def _parse(path: Path, text: str) -> tuple[list[str], Iterator[dict[str, str]]]:
    """The columns, and the rows one by one."""
    end = text.rfind("\n") + 1  # a process that was killed may leave an unfinished last line
    lines = csv.reader(match.group() for match in re.finditer(r"[^\n]*\n", text[:end] if end < len(text) else text))
    columns = next(lines, [STEP])
    if columns[:1] != [STEP]:
        raise ValueError(f"{path}: the first column is {columns[:1]}, not {STEP!r}")
    return columns, (dict(zip(columns, row, strict=True)) for row in lines)


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
