"""Advantages onto steps: those that an estimator returns, and those that a workflow put there itself.

    groups of a role -> what the estimator needs -> estimator -> checked -> step.advantage

`step.advantage` becomes one Python float, or a list of one float a response token where the estimator (or the workflow) gives one
a token; None where the estimator drops a group, which is then not trained on.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import RLLM_ADV_ESTIMATOR_REGISTRY, Estimator, needs_values
from rllm_lightning.algorithms.needs import as_float, gather
from rllm_lightning.algorithms.ragged import Array
from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


def check_estimator_kwargs(config: AlgorithmConfig) -> None:
    """Every key of `estimator_kwargs` must be a keyword of some estimator in use: a misspelt one must not vanish."""
    names = sorted({config.estimator_of(role) for role in ("", *config.estimator_map)})
    known = {key for name in names for key in RLLM_ADV_ESTIMATOR_REGISTRY.get(name).kwargs}
    if unknown := sorted(set(config.estimator_kwargs) - known):
        raise ValueError(
            f"rllm.algorithm.estimator_kwargs: no keyword {', '.join(map(repr, unknown))} of {', '.join(names)}; "
            f"known: {', '.join(sorted(known)) or 'none'}"
        )


# ------------------------------------------------------------------------------------------------- from an estimator


def run_estimator(
    role: str, groups: list[TrajectoryGroup], rewards: list[Array], config: AlgorithmConfig, estimator_state: dict[str, Any] | None
) -> list[float]:
    """Run the estimator of a role and write what it returns to the steps.

    Returns:
        All numbers that were assigned.

    Raises:
        ValueError: a need or a required keyword is missing, or the estimator returned something misshapen or not finite.
    """
    name = config.estimator_of(role)
    estimator: Estimator = RLLM_ADV_ESTIMATOR_REGISTRY.get(name)
    keywords: dict[str, Any] = {
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "algorithm_config": config,
        "traj_groups": groups,
        **{need: gather(need, groups, role, name, estimator_state) for need in estimator.needs},
        **{key: value for key, value in config.estimator_kwargs.items() if key in estimator.kwargs},
    }
    if lacking := [key for key in estimator.required if key not in keywords]:
        raise ValueError(f"estimator {name!r} {needs_values(lacking)}")
    where = f"estimator {name!r}, role {role!r}"
    try:
        result = estimator(rewards, **estimator.accepted(keywords))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{where}: returned {type(result).__name__}, expected a pair (advantages, returns)")
    advantages, _ = result
    _same_length(advantages, groups, f"{where}: advantages", "groups")
    assigned: list[float] = []
    for group, of_group in zip(groups, advantages, strict=True):
        assigned += _write(group, of_group, estimator.per, f"{where}, group {group.group_id!r}")
    return assigned


def _write(group: TrajectoryGroup, advantages: Any, per: str, where: str) -> list[float]:
    if advantages is None:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                step.advantage = None
        return []
    if per == "trajectory":
        values = _floats(advantages, len(group.trajectories), where, "trajectories")
        for trajectory, value in zip(group.trajectories, values, strict=True):
            for step in trajectory.steps:
                step.advantage = value
        return values
    _same_length(advantages, group.trajectories, where, "trajectories")
    assigned: list[float] = []
    for trajectory, of_trajectory in zip(group.trajectories, advantages, strict=True):
        write = _write_per_step if per == "step" else _write_per_token
        assigned += write(trajectory, of_trajectory, f"{where}, trajectory {trajectory.uid}")
    return assigned


def _write_per_step(trajectory: Trajectory, advantages: Any, where: str) -> list[float]:
    values = _floats(advantages, len(trajectory.steps), where, "steps")
    for step, value in zip(trajectory.steps, values, strict=True):
        step.advantage = value
    return values


def _write_per_token(trajectory: Trajectory, advantages: Any, where: str) -> list[float]:
    _same_length(advantages, trajectory.steps, where, "steps")
    assigned: list[float] = []
    for step, of_step in zip(trajectory.steps, advantages, strict=True):
        values = _floats(of_step, len(step.response_ids), where, "response tokens")
        step.advantage = values
        assigned += values
    return assigned


def _floats(values: Any, expected: int, where: str, what: str) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (expected,):
        raise ValueError(f"{where}: got advantages of shape {array.shape} for {expected} {what}")
    if not np.isfinite(array).all():
        raise ValueError(f"{where}: got advantages that are not finite, {array}")
    return array.tolist()


def _same_length(values: Sequence[Any], expected: Sequence[Any], where: str, what: str) -> None:
    if len(values) != len(expected):
        raise ValueError(f"{where}: got {len(values)} for {len(expected)} {what}")


# -------------------------------------------------------------------------------------------------- from the workflow


def has_advantage(group: TrajectoryGroup) -> bool:
    return any(step.advantage is not None for trajectory in group.trajectories for step in trajectory.steps)


def use_precomputed(group: TrajectoryGroup, noted: Counter[str]) -> list[float]:
    """Make every step's own advantage a list of one float a response token.

    A number stands for all tokens of its step; None is 0 (counted in `noted["missing"]`); a list that has not one number a token
    is 0 too, with a warning.

    Returns:
        All numbers that were assigned.

    Raises:
        ValueError: an advantage is neither a finite number nor a list of them.
    """
    assigned: list[float] = []
    for trajectory in group.trajectories:
        for index, step in enumerate(trajectory.steps):
            values = _precomputed(step, f"group {group.group_id!r}, trajectory {trajectory.uid}, step {index}", noted)
            step.advantage = values
            assigned += values
    return assigned


def _precomputed(step: Step, where: str, noted: Counter[str]) -> list[float]:
    own: Any = step.advantage
    num_tokens = len(step.response_ids)
    if own is None:
        noted["missing"] += 1
        return [0.0] * num_tokens
    is_list = isinstance(own, list | tuple) or (isinstance(own, np.ndarray) and own.ndim == 1)
    for value in own if is_list else [own]:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(as_float(value)):
            raise ValueError(f"{where}: a precomputed advantage must be a finite number or a list of them, got {value!r:.80}")
    if not is_list:
        return [float(own)] * num_tokens
    if len(own) != num_tokens:
        logger.warning("%s: %d precomputed advantages for %d response tokens; they count as 0", where, len(own), num_tokens)
        return [0.0] * num_tokens
    return [float(value) for value in own]
