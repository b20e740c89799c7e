"""Tasks of several sources at once, by weight.

    task:
      name: mixture
      train_size: 3000
      mixture:
        - {name: reasoning_gym, dataset: spell_backward, weight: 2}
        - {name: jsonl, train_file: sums.jsonl, val_file: held_out.jsonl, scorer: numeric}

Each entry is a `task` section of its own, with a `weight`. Its tasks keep their `data_source`, after which validation metrics are named.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_lightning import schema
from rllm_lightning.registry import TASKS, register_task
from rllm_lightning.tasks.task import AdaptiveTasks, TaskSet
from rllm_lightning.workflows.reward import RewardFunction

logger = logging.getLogger(__name__)

SIZES = ("train_size", "val_size")


@register_task("mixture")
def mixture(seed: int, *, mixture: list[dict[str, Any]], train_size: int = 1000, val_size: int = 100) -> TaskSet:
    """Tasks of several sources, by weight.

    Each source has its share of the training tasks, exact up to rounding, and of the validation tasks, at least one. A source with a
    fixed number of tasks, such as a file, gives a random choice of them. A training task that asks what a validation task of another
    source asks is left out, with a warning.

    Args:
        seed: of each source, the choice and the order.
        mixture: a section of `task` for each source, with `weight` (1 where it is left out) and maybe `data_source`, a name for its
            metrics in place of its own (to tell apart two sources with one).
        train_size, val_size: number of tasks, of all sources together.

    Raises:
        ValueError: what a source refuses, named by its place in the list; a source with too few tasks for its share, or a share of none.
    """
    if not mixture:
        raise ValueError("task.mixture: give one source or more, such as {name: reasoning_gym, dataset: chain_sum, weight: 1}")
    sources = [_Source.of(given, index) for index, given in enumerate(mixture)]
    weights = [source.weight for source in sources]
    num_train, num_val = shares(train_size, weights), shares(val_size, weights)
    if val_size:
        num_val = _at_least_one(num_val)
    if 0 in num_train or (val_size and 0 in num_val):
        raise ValueError(f"task.train_size, task.val_size: {train_size} and {val_size} leave a source of task.mixture without a task")
    task_sets = [source.draw(seed, *sizes) for source, *sizes in zip(sources, num_train, num_val, strict=True)]
    val = [task for _, tasks, _ in task_sets for task in tasks]
    train = _without_questions_of(val, [task for tasks, _, _ in task_sets for task in tasks])
    random.Random(seed).shuffle(train)
    return TaskSet(train, val, MixtureReward(tuple(reward for _, _, reward in task_sets)))


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, each within one of its exact share: what rounding down leaves goes to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _at_least_one(counts: list[int]) -> list[int]:
    """The counts with every 0 raised to 1 at the cost of the largest, as far as there is enough."""
    counts = list(counts)
    while 0 in counts and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] = 1
    return counts


@dataclass(frozen=True)
class MixtureReward:
    """The reward of the source that a task is from, which its id begins with."""

    rewards: tuple[RewardFunction, ...]

    @property
    def provides(self) -> frozenset[str]:
        """What the rewards of all sources provide."""
        return frozenset.intersection(*(frozenset(getattr(reward, "provides", ())) for reward in self.rewards))

    def __call__(self, task: dict[str, Any], response: str) -> Any:
        index, _, own_id = task["id"].partition("/")
        return self.rewards[int(index)](task | {"id": own_id}, response)


@dataclass(frozen=True)
class _Source:
    index: int
    name: str
    weight: float
    data_source: str | None
    args: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], index: int) -> _Source:
        at = f"task.mixture.{index}"
        own: dict[str, Any] = {"name": "reasoning_gym", "weight": 1.0, "data_source": None, **given}
        name, weight, data_source = (own.pop(key) for key in ("name", "weight", "data_source"))
        if name not in TASKS:
            raise ValueError(TASKS.unknown(name, f"{at}.name"))
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"{at}.weight: must be a number above 0, got {weight!r}")
        if set_here := [key for key in SIZES if key in own]:
            raise ValueError(f"{at}.{set_here[0]}: it follows from the weight; set task.{set_here[0]}, of all sources together")
        return cls(index, name, float(weight), data_source, schema.typed_keywords(TASKS.get(name), own, at, f"task {name!r}"))

    def draw(self, seed: int, num_train: int, num_val: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], RewardFunction]:
        """Training tasks, validation tasks and reward function, with ids that are unique over all sources."""
        maker, at = TASKS.get(self.name), f"task.mixture.{self.index}"
        takes = schema.parameters_of(maker)
        sizes = {key: size for key, size in zip(SIZES, (num_train, num_val), strict=True) if key in takes}
        try:
            tasks = maker(seed, **self.args, **sizes)
        except ValueError as error:
            raise ValueError("\n".join(f"{at}: {line}" for line in str(error).split("\n"))) from error
        if isinstance(tasks.train, AdaptiveTasks):
            raise ValueError(f"{at}: a source whose training tasks change (a curriculum) cannot be mixed")
        return self._some(tasks.train, num_train, seed, "train"), self._some(tasks.val, num_val, seed, "val"), tasks.reward_function

    def _some(self, tasks: Sequence[dict[str, Any]], count: int, seed: int, part: str) -> list[dict[str, Any]]:
        if len(tasks) < count:
            raise ValueError(f"task.mixture.{self.index}: it has {len(tasks)} {part} tasks, its share of task.{part}_size is {count}")
        chosen = sorted(random.Random(f"{seed}:{self.index}:{part}").sample(range(len(tasks)), count))
        named = {} if self.data_source is None else {"data_source": self.data_source}
        return [tasks[index] | named | {"id": f"{self.index}/{tasks[index]['id']}"} for index in chosen]


def _without_questions_of(val: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = {_asked(task) for task in val}
    kept = [task for task in train if _asked(task) not in asked]
    if len(kept) < len(train):
        logger.warning("task.mixture: %d training tasks ask what validation tasks ask, and are left out", len(train) - len(kept))
    return kept


def _asked(task: dict[str, Any]) -> str:
    return " ".join(str(task.get("question") or task.get("messages")).split())
