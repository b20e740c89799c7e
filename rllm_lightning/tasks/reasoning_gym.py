"""Tasks of the package `reasoning_gym`: about a hundred procedural data sets, each with its own scorer.

    task.dataset=spell_backward task.params.min_word_len=3 task.params.max_word_len=5 task.train_size=1000

The package runs in a process of its own, see `reasoning_gym_worker.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.reasoning_gym_worker import WorkerError, call
from rllm_lightning.tasks.scoring import Extract, extract_answer, present_answer
from rllm_lightning.tasks.task import TaskSet
from rllm_lightning.types import RewardOutput

logger = logging.getLogger(__name__)

# Data sets whose entries have many right answers, and where in the metadata one of them stands.
EXAMPLE_ANSWERS = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


@register_task("reasoning_gym")
def reasoning_gym(
    seed: int,
    *,
    dataset: str = "spell_backward",
    params: dict[str, Any] | None = None,
    train_size: int = 1000,
    val_size: int = 100,
    extract: Extract = "response",
    instruction: str = "",
    partial_credit: bool = True,
) -> TaskSet:
    """One data set of `reasoning_gym`. All questions are distinct, within and between training and validation.

    The reward is the scorer's score, mostly in [0, 1] with partial credit; an answer is correct from a score of 1 on. An
    answer that the scorer fails on, or is not done with after `SCORE_LIMIT_S`, scores 0 and says so in the trajectory's
    `info["scorer_error"]`. `answer` and `solution` are one right answer, where the data set knows one (`boxnet` and `rush_hour`
    never do: `answer` is None, and there is no `solution` to teach).

    Args:
        seed: of the entries. Two seeds share no entries beyond chance; one seed gives the same validation questions for
            every `train_size` with most data sets.
        dataset: name of the data set.
        params: parameters of the data set (its config class), such as `max_word_len`.
        train_size, val_size: number of tasks.
        extract: where in a response the answer stands, see `scoring.extract_answer`.
        instruction: text put on a line of its own after each question.
        partial_credit: the reward is the score; false: 1 for a correct answer, else 0. Some scorers give nearly full credit to
            answers that are not correct (`spell_backward` to a right word with letters behind it), and a policy finds them.

    Raises:
        ValueError: an unknown data set or parameter (with the closest match), a value the data set does not take, or fewer
            distinct questions than tasks.
    """
    params = params or {}
    if train_size < 1 or val_size < 0:
        raise ValueError(f"task.train_size must be at least 1 and task.val_size at least 0, got {train_size} and {val_size}")
    start = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") // 2
    entries = call("draw", dataset, params, start, train_size + val_size)
    ids = [f"{dataset}:val:{i}" for i in range(val_size)] + [f"{dataset}:train:{i}" for i in range(train_size)]
    reward = ReasoningGymReward(dataset, params, dict(zip(ids, entries, strict=True)), extract, partial_credit)
    tasks = [_task(task_id, entry, reward, instruction) for task_id, entry in reward.entries.items()]
    return TaskSet(tasks[val_size:], tasks[:val_size], reward)


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
    """The scorer of a data set. `entries` holds what it needs to know of each task, by the task's id."""

    dataset: str
    params: dict[str, Any]
    entries: dict[str, dict[str, Any]]
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
            value = call("score", self.dataset, self.params, self.entries[task["id"]], answer)
        except WorkerError as error:
            logger.warning("%s: scoring %.80r failed (%s); it counts as wrong", task["id"], answer, error)
            return RewardOutput(0.0, is_correct=False, metadata={"scorer_error": str(error)})
        is_correct = value >= 1.0
        return RewardOutput(value if self.partial_credit else float(is_correct), is_correct=is_correct)
