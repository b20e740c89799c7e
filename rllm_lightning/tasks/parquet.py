"""Tasks from Parquet files (package pyarrow). What a row may hold stands in `rows.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.rows import Answering, RowFile, make_task_set
from rllm_lightning.tasks.scoring import Extract
from rllm_lightning.tasks.task import TaskSet


@register_task("parquet")
def parquet(
    seed: int,
    *,
    train_file: str,
    val_file: str | None = None,
    val_fraction: float = 0.0,
    columns: dict[str, str] | None = None,
    answer_pattern: str = "",
    scorer: str = "exact",
    scorer_args: dict[str, Any] | None = None,
    extract: Extract = "response",
    instruction: str = "",
) -> TaskSet:
    """Tasks of your own, from Parquet files.

    Args:
        seed, val_fraction: see `rows.make_task_set`.
        train_file, val_file: paths of files.
        columns, answer_pattern, scorer, scorer_args, extract, instruction: see `rows.Answering`.

    Raises:
        ValueError: pyarrow is not installed, a file is missing, empty or has malformed rows (each named by file and row, from 0), or
            nothing is left to train on.
    """
    if val_file and val_fraction:
        raise ValueError("task.val_file, task.val_fraction: give one of them")
    answering = Answering(columns, answer_pattern, scorer, scorer_args, extract, instruction)
    val = _rows("val_file", val_file) if val_file else None
    return make_task_set(_rows("train_file", train_file), val, val_fraction, seed, answering, Path(train_file).stem)


def _rows(key: str, file: str) -> RowFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("task.name: parquet needs the package pyarrow: pip install 'rllm-lightning[datasets]'") from error
    try:
        table = pyarrow.parquet.ParquetFile(file).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"task.{key}: cannot read {file}: {error}") from error
    return RowFile(key, file, enumerate(table.to_pylist()))
