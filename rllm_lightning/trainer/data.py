"""Batches of tasks, the same for any number of processes, from any step on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm_lightning.config import Config, ConfigError
from rllm_lightning.trainer.protocol import TrainerState
from rllm_lightning.types import to_plain

logger = logging.getLogger(__name__)


@dataclass
class TaskBatch:
    """The tasks of one step, and where it stands in its epoch."""

    tasks: list[dict[str, Any]]
    epoch: int
    first_of_epoch: bool
    last_of_epoch: bool


def task_id_of(task: dict[str, Any]) -> str:
    """The task's `id`, else a digest of its content: equal prompts with different answers stay different tasks."""
    given = task.get("id")
    if given is not None:
        return str(given)
    content = json.dumps(to_plain(task), sort_keys=True)
    return "task_" + hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_dataset(dataset: Sequence[dict[str, Any]], name: str) -> None:
    """Refuse what cannot be trained on.

    Raises:
        ConfigError: the data set is empty, holds something else than dicts, or two tasks share an `id`.
    """
    if len(dataset) == 0:
        raise ConfigError([f"{name}: the data set is empty"])
    seen: dict[str, int] = {}
    for index in range(len(dataset)):
        if not isinstance(dataset[index], dict):
            raise ConfigError([f"{name}: task {index} is {type(dataset[index]).__name__}, not a dict"])
        identity = task_id_of(dataset[index])
        if identity in seen:
            raise ConfigError([f"{name}: tasks {seen[identity]} and {index} have the same id {identity!r}; ids must be unique"])
        seen[identity] = index


class TaskLoader:
    """All batches of a run that are left: epoch after epoch, each in an order of its own, drawn from (data seed, epoch).

    The last batch of an epoch may be shorter. Iteration begins after `state.global_step` finished batches, so a resumed run
    reads on where the former one stopped.
    """

    def __init__(self, dataset: Sequence[dict[str, Any]], config: Config, state: TrainerState):
        self.dataset = dataset
        self.seed = config.data_seed
        self.shuffle = config.data.shuffle
        self.batch_size = round(config.data.train_batch_size * config.rllm.rejection_sample.multiplier)
        self.state = state
        if self.batch_size > len(dataset):
            logger.warning(
                "data.train_batch_size: a batch of %d tasks, but there are %d; every batch holds them all", self.batch_size, len(dataset)
            )
        trainer = config.rllm.trainer
        self.total_batches = trainer.total_batches if trainer.total_batches > 0 else trainer.total_epochs * self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __len__(self) -> int:
        return self.total_batches

    def __iter__(self) -> Iterator[TaskBatch]:
        per_epoch, order, drawn = self.batches_per_epoch, np.arange(0), -1
        for number in range(self.state.global_step, self.total_batches):
            epoch, position = divmod(number, per_epoch)
            if epoch != drawn:
                order, drawn = self._order(epoch), epoch
            chosen = order[position * self.batch_size : (position + 1) * self.batch_size]
            yield TaskBatch([self.dataset[int(i)] for i in chosen], epoch, position == 0, position == per_epoch - 1)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))
