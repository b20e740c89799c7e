"""An estimator at work on the batches of a run, as the trainer would have called it.

    Batch -> advantages cleared -> collect_reward_and_advantage_from_trajectory_groups -> one number a trajectory

What the loss pushes a trajectory by is the mean of its tokens' advantages; that number is what estimators are compared by.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.lab.replay.agreement import Array
from rllm_lightning.lab.replay.batches import Batch
from rllm_lightning.lab.replay.subjects import Subject
from rllm_lightning.types import Step, Trajectory

StepAdvantages = list[list[float] | float | None]  # of each step of a batch, as `Step.advantage`


class Failure(Exception):
    """The estimator cannot be applied to a batch: why, in one line."""


class Weigher:
    """A subject with what it remembers. Hand it every batch, in order."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._state: dict[str, Any] = {}

    def __call__(self, batch: Batch) -> Array:
        """[N] float64: what each trajectory of the batch is pushed by; NaN where the estimator drops it. The steps hold the advantages
        afterwards.

        Raises:
            Failure: it lacks what it needs, raises, or returns something else than advantages.
        """
        clear(batch)
        try:
            with np.errstate(all="ignore"):  # what comes of it is checked
                collect_reward_and_advantage_from_trajectory_groups(batch.groups, self.subject.algorithm, estimator_state=self._state)
        except ValueError as error:
            raise Failure(_one_line(str(error))) from error
        except Exception as error:  # a user's function may raise anything: it is left out and named, the others go on
            raise Failure(_one_line(f"{type(error).__name__}: {error}")) from error
        return pushes(batch)


def steps_of(batch: Batch) -> list[Step]:
    return [step for trajectory in batch.trajectories for step in trajectory.steps]


def clear(batch: Batch) -> None:
    for step in steps_of(batch):
        step.advantage = None


def advantages_of(batch: Batch) -> StepAdvantages:
    """What stands on the steps now, to be put back by `put_advantages`."""
    return [step.advantage for step in steps_of(batch)]


def put_advantages(batch: Batch, advantages: StepAdvantages) -> None:
    for step, advantage in zip(steps_of(batch), advantages, strict=True):
        step.advantage = advantage


def pushes(batch: Batch) -> Array:
    """[N] the mean advantage of each trajectory's tokens; NaN where it has none."""
    return np.array([_push(trajectory) for trajectory in batch.trajectories], dtype=np.float64)


def _push(trajectory: Trajectory) -> float:
    total, num_tokens, plain = 0.0, 0, []
    for step in trajectory.steps:
        if step.advantage is None:
            continue
        length = len(step.response_ids)
        values = step.advantage
        total += math.fsum(values) if isinstance(values, list) else values * length
        num_tokens += length
        if not isinstance(values, list):
            plain.append(values)
    if len(set(plain)) == 1 and len(plain) == len(trajectory.steps):  # no rounding where there is nothing to average
        return plain[0]
    if num_tokens:
        return total / num_tokens
    return math.fsum(plain) / len(plain) if plain else math.nan


def _one_line(text: str) -> str:
    return " ".join(text.split())
