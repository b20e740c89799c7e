"""Tasks from JSON Lines files: one object with `question` and `answer` a line.

    {"question": "What is 7 times 6?", "answer": "42"}

A row may also bring `id` (unique in its file), `solution` (a whole response that a warm start teaches; without it the answer
alone is taught), `messages` (a chat to ask instead of the question) and `data_source`; further keys stay in the task.
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.scoring import Extract, exact_match, extract_answer, last_number, numeric_match, present_answer
from rllm_lightning.tasks.task import TaskSet

logger = logging.getLogger(__name__)

Scoring = Literal["exact", "numeric"]
SHOWN_PROBLEMS = 5


@register_task("jsonl")
def jsonl(
    seed: int,
    *,
    train_file: str,
    val_file: str | None = None,
    val_fraction: float = 0.0,
    scoring: Scoring = "exact",
    tolerance: float = 1e-6,
    extract: Extract = "response",
    instruction: str = "",
) -> TaskSet:
    """Tasks of your own.

    Rewards are 1.0 and 0.0. No question is in both training and validation: a training row whose question stands in the
    validation file is left out, with a warning; `val_fraction` draws whole questions. Rows with equal questions and different
    answers stay different tasks.

    Args:
        seed: of the draw for `val_fraction`.
        train_file, val_file: paths of JSON Lines files (UTF-8).
        val_fraction: share of the training file's distinct questions, in (0, 1), to validate on when there is no `val_file`;
            at least one question, rounded to the nearest number (0: none).
        scoring: `exact` compares texts but for case and whitespace, `numeric` the last numbers in response and answer.
        tolerance: of `numeric`, see `scoring.numeric_match`.
        extract: where in a response the answer stands, see `scoring.extract_answer`.
        instruction: text put on a line of its own after each question.

    Raises:
        ValueError: a file is missing, empty or has malformed rows (each named by file and line), or nothing is left to train on.
    """
    if val_file and val_fraction:
        raise ValueError("task.val_file, task.val_fraction: give one of them")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"task.val_fraction: must be in [0, 1), got {val_fraction}")
    if tolerance < 0:
        raise ValueError(f"task.tolerance: must not be negative, got {tolerance}")
    source, reward = Path(train_file).stem, AnswerReward(scoring, tolerance, extract)
    train = _read("train_file", train_file, reward)
    if val_file:
        val = _read("val_file", val_file, reward)
        train = _without_questions_of(val, train, train_file)
    else:
        train, val = _split(train, val_fraction, seed)
    if not train:
        raise ValueError(f"task.train_file: {train_file}: no row is left to train on")
    return TaskSet(
        [_task(row, source, "train", extract, instruction) for row in train],
        [_task(row, source, "val", extract, instruction) for row in val],
        reward,
    )


@dataclass(frozen=True)
class _Row:
    line: int
    data: dict[str, Any]

    @property
    def asked(self) -> str:
        """What identifies the question: its words."""
        return " ".join(self.data["question"].split())


@dataclass(frozen=True)
class AnswerReward:
    """1.0 where the answer in the response is the task's, else 0.0."""

    scoring: Scoring
    tolerance: float
    extract: Extract

    def __call__(self, task: dict[str, Any], response: str) -> float:
        given = extract_answer(response, self.extract)
        return float(given is not None and self.matches(given, _text(task["answer"])))

    def matches(self, given: str, answer: str) -> bool:
        return numeric_match(given, answer, self.tolerance) if self.scoring == "numeric" else exact_match(given, answer)


def _task(row: _Row, source: str, part: str, extract: Extract, instruction: str) -> dict[str, Any]:
    task = {"data_source": source, "solution": present_answer(_text(row.data["answer"]), extract)} | row.data
    task["id"] = f"{task['data_source']}:{part}:{task.get('id', row.line)}"
    if instruction:
        task["question"] += f"\n{instruction}"
    return task


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


# ----------------------------------------------------------------------------------------------------------------- reading


def _read(key: str, file: str, reward: AnswerReward) -> list[_Row]:
    """The rows of a file. Blank lines are skipped."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.{key}: cannot read {file}: {error}") from error
    rows: list[_Row] = []
    problems: list[str] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
            _check(row, reward)
            if "id" in row and (first := first_line.setdefault(str(row["id"]), number)) != number:
                raise ValueError(f"the id {row['id']!r} stands in line {first} already")
        except ValueError as error:
            problems.append(f"task.{key}: {file}:{number}: {error}")
            continue
        rows.append(_Row(number, row))
    if problems:
        more = [f"... and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise ValueError("\n".join(problems[:SHOWN_PROBLEMS] + more))
    if not rows:
        raise ValueError(f"task.{key}: {file} has no rows")
    return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check(row: Any, reward: AnswerReward) -> None:
    """Raise a `ValueError` where a row is not a task, or where its own solution would not be rewarded."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with `question` and `answer`, got {row!r:.60}")
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise ValueError(f"`question` must be text, got {row.get('question')!r:.60}")
    if not isinstance(row.get("answer"), str | int | float) or row["answer"] == "":
        raise ValueError(f"`answer` must be text or a number, got {row.get('answer')!r:.60}")
    if reward.scoring == "numeric" and last_number(_text(row["answer"])) is None:
        raise ValueError(f"task.scoring=numeric, but there is no number in the answer {row['answer']!r:.60}")
    for key, kind in (("solution", str), ("data_source", str), ("messages", list), ("id", str | int)):
        if key in row and not isinstance(row[key], kind):
            raise ValueError(f"`{key}` has the wrong type: {row[key]!r:.60}")
    if not reward(row, row.get("solution", present_answer(_text(row["answer"]), reward.extract))):
        raise ValueError("the solution does not hold the answer where task.extract and task.scoring look for it")


# --------------------------------------------------------------------------------------------------------------- splitting


def _without_questions_of(val: list[_Row], train: list[_Row], file: str) -> list[_Row]:
    seen = {row.asked for row in val}
    dropped = [row for row in train if row.asked in seen]
    if dropped:
        logger.warning(
            "%s: %d rows (the first in line %d) ask what the validation file asks, and are left out", file, len(dropped), dropped[0].line
        )
    return [row for row in train if row.asked not in seen]


def _split(rows: list[_Row], fraction: float, seed: int) -> tuple[list[_Row], list[_Row]]:
    """Training and validation rows; all rows of one question go the same way."""
    if not fraction:
        return rows, []
    questions = list(dict.fromkeys(row.asked for row in rows))
    chosen = set(random.Random(seed).sample(questions, max(1, round(fraction * len(questions)))))
    return [row for row in rows if row.asked not in chosen], [row for row in rows if row.asked in chosen]
