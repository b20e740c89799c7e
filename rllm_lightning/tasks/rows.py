"""From the rows of a file to tasks: what `jsonl`, `parquet` and `huggingface` have in common.

    rows  --columns-->  question, answer, ...  --checked, each with its scorer-->  split  -->  TaskSet

A row has `question` and `answer`, under these names or others (`task.columns`). It may also bring `id` (unique in its file),
`solution` (a whole response that a warm start teaches; without it the answer alone is taught), `messages` (a chat to ask instead
of the question) and `data_source`; further columns stay in the task.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rllm_lightning.tasks.scorers import make_reward
from rllm_lightning.tasks.scoring import Extract, answer_text, present_answer
from rllm_lightning.tasks.task import TaskSet
from rllm_lightning.workflows.reward import RewardFunction, raised

logger = logging.getLogger(__name__)

KINDS: dict[str, Any] = {
    "question": str,
    "answer": str | int | float,
    "id": str | int,
    "solution": str,
    "messages": list,
    "data_source": str,
}
SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class RowFile:
    """The rows of one file or split: (number, row) each; a row that could not be read is the `ValueError` that says why."""

    key: str  # the config key that names it, below `task`
    name: str
    rows: Iterable[tuple[int, Any]]
    unit: str = "row"  # what the numbers count

    def at(self, number: int) -> str:
        return f"task.{self.key}: {self.name}:{number}" if self.unit == "line" else f"task.{self.key}: {self.name}: {self.unit} {number}"


@dataclass(frozen=True)
class Answering:
    """How rows are asked and scored: the keys that all sources of rows have.

    Attributes:
        columns: our name -> the column of the file.
        answer_pattern: a regular expression that finds the answer in the answer column (its first group, else all of it); "": the
            column is the answer.
        scorer, scorer_args: see `scorers.py`.
        extract: where in a response the answer stands, see `scoring.extract_answer`.
        instruction: text put on a line of its own after each question.
    """

    columns: dict[str, str] | None
    answer_pattern: str
    scorer: str
    scorer_args: dict[str, Any] | None
    extract: Extract
    instruction: str

    def __post_init__(self) -> None:
        if unknown := [key for key in self.columns or {} if key not in KINDS]:
            raise ValueError(f"task.columns.{unknown[0]}: a task has no such part; there are {', '.join(KINDS)}")
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(f"task.answer_pattern: {self.answer_pattern!r} is no regular expression: {error}") from error


def make_task_set(train: RowFile, val: RowFile | None, val_fraction: float, seed: int, answering: Answering, source: str) -> TaskSet:
    """Tasks of rows. Rows with equal questions and different answers stay different tasks; no question is in both training and
    validation: a training row whose question is asked in `val` is left out, with a warning.

    Args:
        val_fraction: share of the distinct questions of `train`, in (0, 1), to validate on where there is no `val`; at least one
            question, rounded to the nearest number (0: none).
        seed: of the draw for it.
        source: `data_source` of rows that bring none.

    Raises:
        ValueError: there are no rows, some are malformed (each is named by file and row), or nothing is left to train on.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"task.val_fraction: must be in [0, 1), got {val_fraction}")
    reward = make_reward(answering.scorer, answering.scorer_args, answering.extract)
    train_rows = _read(train, answering, reward)
    if val is not None:
        val_rows = _read(val, answering, reward)
        train_rows = _without_questions_of(val_rows, train_rows, train)
    else:
        train_rows, val_rows = _split(train_rows, val_fraction, seed)
    if not train_rows:
        raise ValueError(f"task.{train.key}: {train.name}: no row is left to train on")
    return TaskSet(
        [_task(row, source, "train", answering) for row in train_rows],
        [_task(row, source, "val", answering) for row in val_rows],
        reward,
    )


@dataclass(frozen=True)
class _Row:
    number: int
    data: dict[str, Any]

    @property
    def asked(self) -> str:
        """What identifies the question: its words."""
        return " ".join(self.data["question"].split())


def _task(row: _Row, source: str, part: str, answering: Answering) -> dict[str, Any]:
    task = {"data_source": source} | row.data
    task["id"] = f"{task['data_source']}:{part}:{task.get('id', row.number)}"
    if answering.instruction:
        task["question"] += f"\n{answering.instruction}"
    return task


# ----------------------------------------------------------------------------------------------------------------- reading


def _read(file: RowFile, answering: Answering, reward: RewardFunction) -> list[_Row]:
    rows: list[_Row] = []
    problems: list[str] = []
    first: dict[str, int] = {}
    for number, given in file.rows:
        try:
            data = _mapped(given, answering)
            data.setdefault("solution", present_answer(answer_text(data), getattr(reward, "extract", None) or answering.extract))
            if getattr(reward, "checks_every_task", False) or not (rows or problems):
                _check_solution(data, reward)
            if "id" in data and (earlier := first.setdefault(str(data["id"]), number)) != number:
                raise ValueError(f"the id {data['id']!r} stands in {file.unit} {earlier} already")
        except ValueError as error:
            problems.append(f"{file.at(number)}: {error}")
            continue
        rows.append(_Row(number, data))
    if problems:
        more = [f"... and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise ValueError("\n".join(problems[:SHOWN_PROBLEMS] + more))
    if not rows:
        raise ValueError(f"task.{file.key}: {file.name} has no rows")
    return _without_what_json_cannot_hold(rows, file)


def _mapped(row: Any, answering: Answering) -> dict[str, Any]:
    """The parts of a task and the row's other columns; raises a `ValueError` where it is no task."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with `question` and `answer`, got {row!r:.60}")
    columns = answering.columns or {}
    for key, column in columns.items():
        if column not in row:
            raise ValueError(f"task.columns.{key}: there is no column {column!r}; there are: {', '.join(map(str, row)) or 'none'}")
    data = {key: value for key, value in row.items() if key not in columns.values()}
    data |= {key: row[column] for key, column in columns.items()}
    data = {key: value for key, value in data.items() if value is not None or key not in KINDS}
    _check_kinds(data)
    if answering.answer_pattern:
        found = re.search(answering.answer_pattern, answer_text(data))
        if found is None:
            raise ValueError(f"task.answer_pattern: {answering.answer_pattern!r} is not found in the answer {answer_text(data)!r:.60}")
        data["answer"] = (found[1] if found.re.groups else found[0]).strip()
    return data


def _check_kinds(data: dict[str, Any]) -> None:
    known = f"; there are the columns {', '.join(data) or 'none'} (other names: task.columns)"
    for key in ("question", "answer"):
        if key not in data:
            raise ValueError(f"`{key}` is missing or null{known}")
    question, answer = data["question"], data["answer"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"`question` must be text, got {question!r:.60}")
    if not isinstance(answer, KINDS["answer"]) or answer == "" or (isinstance(answer, float) and not math.isfinite(answer)):
        raise ValueError(f"`answer` must be text or a finite number, got {answer!r:.60}")
    for key, kind in KINDS.items():
        if key in data and not isinstance(data[key], kind):
            raise ValueError(f"`{key}` has the wrong type: {data[key]!r:.60}")


def _check_solution(data: dict[str, Any], reward: RewardFunction) -> None:
    """Raise a `ValueError` where the reward function says that it could never reward a row's own solution, or fails on it."""
    if check := getattr(reward, "check", None):
        check(data, data["solution"])
    elif not (inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)):
        try:
            reward(data, data["solution"])
        except Exception as error:
            raise ValueError(f"task.scorer: it {raised(error)}") from error


def _without_what_json_cannot_hold(rows: list[_Row], file: RowFile) -> list[_Row]:
    """Tasks are written to the episode files: columns of bytes, images or dates cannot stay."""
    lost = {key for row in rows for key, value in row.data.items() if key not in KINDS and not _is_json(value)}
    if lost:
        logger.warning("%s: the columns %s hold what JSON cannot, and are left out of the tasks", file.name, ", ".join(sorted(lost)))
    return [_Row(row.number, {key: value for key, value in row.data.items() if key not in lost}) for row in rows] if lost else rows


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# --------------------------------------------------------------------------------------------------------------- splitting


def _without_questions_of(val: list[_Row], train: list[_Row], file: RowFile) -> list[_Row]:
    seen = {row.asked for row in val}
    dropped = [row for row in train if row.asked in seen]
    if dropped:
        logger.warning(
            "%s: %d rows (the first in %s %d) ask what the validation file asks, and are left out",
            file.name,
            len(dropped),
            file.unit,
            dropped[0].number,
        )
    return [row for row in train if row.asked not in seen]


def _split(rows: list[_Row], fraction: float, seed: int) -> tuple[list[_Row], list[_Row]]:
    """Training and validation rows; all rows of one question go the same way."""
    if not fraction:
        return rows, []
    questions = list(dict.fromkeys(row.asked for row in rows))
    chosen = set(random.Random(seed).sample(questions, max(1, round(fraction * len(questions)))))
    return [row for row in rows if row.asked not in chosen], [row for row in rows if row.asked in chosen]
