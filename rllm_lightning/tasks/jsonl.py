"""Tasks from JSON Lines files: one object a line. What a row may hold stands in `rows.py`.

{"question": "What is 7 times 6?", "answer": "42"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.rows import Answering, RowFile, make_task_set
from rllm_lightning.tasks.scoring import Extract
from rllm_lightning.tasks.task import TaskSet


@register_task("jsonl")
def jsonl(
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
    """Tasks of your own, from JSON Lines files.

    Args:
        seed, val_fraction: see `rows.make_task_set`.
        train_file, val_file: paths of files (UTF-8). Blank lines are skipped.
        columns, answer_pattern, scorer, scorer_args, extract, instruction: see `rows.Answering`.

    Raises:
        ValueError: a file is missing, empty or has malformed rows (each named by file and line), or nothing is left to train on.
    """
    if val_file and val_fraction:
        raise ValueError("task.val_file, task.val_fraction: give one of them")
    answering = Answering(columns, answer_pattern, scorer, scorer_args, extract, instruction)
    val = _lines("val_file", val_file) if val_file else None
    return make_task_set(_lines("train_file", train_file), val, val_fraction, seed, answering, Path(train_file).stem)


def _lines(key: str, file: str) -> RowFile:
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.{key}: cannot read {file}: {error}") from error
    return RowFile(key, file, _parsed(lines), unit="line")


def _parsed(lines: list[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line, parse_constant=_refuse_constant)
            except ValueError as error:
                yield number, error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
