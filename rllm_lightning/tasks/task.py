"""What a task source gives: training tasks, validation tasks, and the function that rewards an answer.

    task.name=x, task.key=value  ->  x(seed, key=value)  ->  TaskSet  ->  a trainer's data sets and its workflow's reward function

To add a task source, register a function in a module of your own (or a file beside this one) and choose it with `task.name=x`:

    @register_task("x")
    def x(seed: int, *, difficulty: int = 3) -> TaskSet: ...

Its keyword-only parameters are the keys under `task`, typed by their annotations. Training tasks may depend on how the training
goes (`AdaptiveTasks`, such as `curriculum.Curriculum`); validation tasks never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rllm_lightning.workflows.reward import RewardFunction


@runtime_checkable
class AdaptiveTasks(Protocol):
    """Training tasks that follow what the policy can do. The number of tasks stays; which task stands at an index may change.

    The trainer reads a batch's tasks when the batch begins, calls `observe` when it ends, on every rank with the whole batch, and
    keeps the state in the checkpoint.
    """

    def observe(self, pass_rates: Mapping[str, float]) -> dict[str, float]:
        """Take note of a batch: task id -> share of correct rollouts, in the order of the batch. Returns metrics of it."""

    def state_dict(self) -> dict[str, Any]:
        """All that `observe` has changed, as plain containers and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""


@dataclass(frozen=True)
class TaskSet:
    """Problems and their judge.

    Attributes:
        train, val: tasks, JSON-able dicts with `id` (text, unique over both), `question` (text) or `messages` (a chat),
            `answer` (anything), `data_source` (text; validation metrics are named after it) and, where there is one,
            `solution` (text: an answer that the reward function counts as solved, which a warm start teaches).
            `val` may be empty: there is nothing to validate then.
        reward_function: `(task, response) -> float | RewardOutput`.

    Raises:
        ValueError: there are no training tasks, a task lacks a key, or an id stands twice.
    """

    train: Sequence[dict[str, Any]]
    val: Sequence[dict[str, Any]]
    reward_function: RewardFunction

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("the task has no training tasks")
        ids: set[str] = set()
        for part, tasks in (("training", self.train), ("validation", self.val)):
            for position, task in enumerate(tasks):
                if problem := _problem(task):
                    raise ValueError(f"{part} task {position}: {problem}; it is {task!r:.200}")
                if task["id"] in ids:
                    raise ValueError(
                        f"{part} task {position}: the id {task['id']!r} stands twice; different tasks would share one baseline"
                    )
                ids.add(task["id"])


def _problem(task: Any) -> str | None:
    if not isinstance(task, dict):
        return "expected a dict"
    for key in ("id", "data_source"):
        if not isinstance(task.get(key), str):
            return f"`{key}` must be text"
    if not isinstance(task.get("question"), str) and not task.get("messages"):
        return "it needs a `question` (text) or `messages` (a chat)"
    if "answer" not in task:
        return "`answer` is missing"
    return None
