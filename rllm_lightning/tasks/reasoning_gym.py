"""Tasks of the package `reasoning_gym`: about a hundred procedural data sets, each with its own scorer.

    task.dataset=spell_backward task.params.min_word_len=3 task.params.max_word_len=5 task.train_size=1000
    task.dataset=chain_sum task.curriculum.threshold=0.7 task.curriculum.attributes=[num_terms]

The package runs in a process of its own, see `reasoning_gym_worker.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm_lightning import schema
from rllm_lightning.registry import register_task
from rllm_lightning.tasks.curriculum import Curriculum, CurriculumConfig
from rllm_lightning.tasks.reasoning_gym_worker import WORKER
from rllm_lightning.tasks.scoring import Extract, extract_answer, present_answer
from rllm_lightning.tasks.task import TaskSet
from rllm_lightning.tasks.worker import WorkerError
from rllm_lightning.types import RewardOutput

logger = logging.getLogger(__name__)

SCORE_LIMIT_S = 5.0  # seconds of CPU time that one answer may take to score; not of a clock, which a busy machine would outrun

# Data sets whose entries have many right answers, and where in the metadata one of them stands.
EXAMPLE_ANSWERS = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}

# Data sets without an answer of their own, which can be trained on but not be taught by a warm start, and why.
WITHOUT_SOLUTION = {
    "boxnet": "a plan for several robots is scored by simulating it; the package has no planner",
    "rush_hour": "a list of moves is scored by playing it; the package has no solver",
}


@register_task("reasoning_gym")
def reasoning_gym(
    seed: int,
    *,
    dataset: str = "spell_backward",
    params: dict[str, Any] | None = None,
    curriculum: dict[str, Any] | None = None,
    train_size: int = 1000,
    val_size: int = 100,
    extract: Extract = "response",
    instruction: str = "",
    partial_credit: bool = True,
) -> TaskSet:
    """One data set of `reasoning_gym`. All questions are distinct, within and between training and validation.

    The reward is the scorer's score, mostly in [0, 1] with partial credit; an answer is correct from a score of 1 on. An
    answer that the scorer fails on, or is not done with after `SCORE_LIMIT_S`, scores 0 and says so in the trajectory's
    `info["scorer_error"]`. `answer` and `solution` are one right answer, where the data set knows one (else `answer` is None, and
    there is no `solution` to teach: `WITHOUT_SOLUTION`).

    Args:
        seed: of the entries. Two seeds share no entries beyond chance; one seed gives the same validation questions for
            every `train_size` with most data sets.
        dataset: name of the data set.
        params: parameters of the data set (its config class), such as `max_word_len`.
        curriculum: keys of `CurriculumConfig` (null: none): training begins at the easiest level and goes to the next when the
            pass rate says so. Every level has `train_size` tasks; validation covers all levels equally, from the start.
        train_size, val_size: number of tasks.
        extract: where in a response the answer stands, see `scoring.extract_answer`.
        instruction: text put on a line of its own after each question.
        partial_credit: the reward is the score; false: 1 for a correct answer, else 0. Some scorers give nearly full credit to
            answers that are not correct (`spell_backward` to a right word with letters behind it), and a policy finds them.

    Raises:
        ValueError: an unknown data set or parameter (with the closest match), a value the data set does not take, or fewer
            distinct questions than tasks.
    """
    if train_size < 1 or val_size < 0:
        raise ValueError(f"task.train_size must be at least 1 and task.val_size at least 0, got {train_size} and {val_size}")
    reward = ReasoningGymReward(dataset, {}, extract, partial_credit)
    if curriculum is None:
        entries = _draw(dataset, params or {}, str(seed), train_size + val_size)
        held_back = _add("val", entries[:val_size], params or {}, reward, instruction)
        return TaskSet(_add("train", entries[val_size:], params or {}, reward, instruction), held_back, reward)

    settings = _settings(curriculum)
    levels = list(enumerate(_level_params(dataset, params or {}, settings)))
    val: list[dict[str, Any]] = []
    held_out: list[str] = []  # questions
    for level, level_params in levels:
        count = val_size // len(levels) + (level < val_size % len(levels))
        entries = _draw(dataset, level_params, f"{seed}:{level}", count, held_out)
        held_out += [entry["question"] for entry in entries]
        val += _add(f"val:{level}", entries, level_params, reward, instruction, level=level)
    train = []
    for level, level_params in levels:
        entries = _draw(dataset, level_params, f"{seed}:{level}", train_size, held_out)
        train.append(_add(f"train:{level}", entries, level_params, reward, instruction, level=level))
    return TaskSet(Curriculum(train, settings.threshold, settings.window), val, reward)


def _draw(dataset: str, params: dict[str, Any], seed: str, count: int, exclude: Sequence[str] = ()) -> list[dict[str, Any]]:
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") // 2
    return WORKER.call("draw", dataset, params, start, count, exclude)


def _settings(given: dict[str, Any]) -> CurriculumConfig:
    problems: list[str] = []
    settings = schema.build(CurriculumConfig, given, problems, "task.curriculum.")
    if problems:
        raise ValueError("\n".join(problems))
    return settings


def _level_params(dataset: str, params: dict[str, Any], settings: CurriculumConfig) -> list[dict[str, Any]]:
    """The parameters of each level: those of the user, and what the level sets."""
    levels = settings.levels or WORKER.call("level_params", dataset, settings.attributes, settings.num_levels)
    if set_twice := sorted({key for level in levels for key in level} & set(params)):
        raise ValueError(f"task.params.{set_twice[0]}: the curriculum sets it; leave it out, or choose other task.curriculum.attributes")
    return [params | level for level in levels]


def _add(
    part: str, entries: list[dict[str, Any]], params: dict[str, Any], reward: ReasoningGymReward, instruction: str, **more: Any
) -> list[dict[str, Any]]:
    """The tasks of entries, which `reward` knows from now on."""
    known = {f"{reward.dataset}:{part}:{index}": (params, entry) for index, entry in enumerate(entries)}
    reward.entries.update(known)
    return [_task(task_id, entry, reward, instruction) | more for task_id, (_, entry) in known.items()]


def _task(task_id: str, entry: dict[str, Any], reward: ReasoningGymReward, instruction: str) -> dict[str, Any]:
    question = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    task = {"id": task_id, "question": question, "answer": entry["answer"], "data_source": reward.dataset}
    if task["answer"] is not None:
        return task | {"solution": present_answer(task["answer"], reward.extract)}
    if reward.dataset in EXAMPLE_ANSWERS:
        example = entry["metadata"][EXAMPLE_ANSWERS[reward.dataset]]
        answer = example if isinstance(example, str) else json.dumps(example)
        solution = present_answer(answer, reward.extract)
        if reward(task, solution).is_correct:  # a few of propositional_logic's examples are wrong
            return task | {"answer": answer, "solution": solution}
    return task


@dataclass(frozen=True)
class ReasoningGymReward:
    """The scorer of a data set. `entries` holds parameters and entry of each task, by the task's id."""

    dataset: str
    entries: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    extract: Extract
    partial_credit: bool = True

    def __call__(self, task: dict[str, Any], response: str) -> RewardOutput:
        """The score of a response; without an answer where `extract` looks for it, 0.

        Raises:
            ValueError: the task is none of this task set.
        """
        if task["id"] not in self.entries:
            raise ValueError(f"task {task['id']!r} is none of this task set of {self.dataset!r}")
        answer = extract_answer(response, self.extract)
        if answer is None:
            return RewardOutput(0.0, is_correct=False)
        try:
            value = WORKER.call("score", self.dataset, *self.entries[task["id"]], answer, limit_s=SCORE_LIMIT_S)
        except WorkerError as error:
            logger.warning("%s: scoring %.80r failed (%s); it counts as wrong", task["id"], answer, error)
            return RewardOutput(0.0, is_correct=False, metadata={"scorer_error": str(error)})
        is_correct = value >= 1.0
        return RewardOutput(value if self.partial_credit else float(is_correct), is_correct=is_correct)
