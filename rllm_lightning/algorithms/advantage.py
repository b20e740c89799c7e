"""From trajectory groups to advantages on their steps, and the four estimators that rLLM's users know.

    groups --rewards, role by role--> estimator of the role --> step.advantage of every step, and metrics

The other estimators stand in `estimators.py` (one number a trajectory) and `step_estimators.py` (one a step or token);
`estimator.py` says how to add one.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import (
    RLLM_ADV_ESTIMATOR_REGISTRY,
    Estimator,
    get_rllm_adv_estimator,
    register_rllm_adv_estimator,
)
from rllm_lightning.algorithms.estimators import Pair, as_pair, group_normalised
from rllm_lightning.algorithms.metrics import advantage_metrics, difficulty_metrics, reward_metrics
from rllm_lightning.algorithms.ragged import Array, Ragged, unit_of
from rllm_lightning.algorithms.rl_algo import KNOBS, centred, normalise, std
from rllm_lightning.config import AlgorithmConfig, rLLMAdvantageEstimator
from rllm_lightning.types import Step, TrajectoryGroup

__all__ = [
    "RLLM_ADV_ESTIMATOR_REGISTRY",
    "calculate_grpo_advantages",
    "calculate_reinforce_advantages",
    "calculate_reinforce_plus_plus_baseline_advantages",
    "calculate_rloo_advantages",
    "collect_reward_and_advantage_from_trajectory_groups",
    "get_rllm_adv_estimator",
    "register_rllm_adv_estimator",
]

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------- estimators


@register_rllm_adv_estimator(
    rLLMAdvantageEstimator.GRPO,
    formula="(r - mean) / (std + epsilon) in the group",
    scope="group",
    source="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    kwargs=("epsilon", *KNOBS),
)
def calculate_grpo_advantages(rewards: Sequence[Any], norm_adv_by_std_in_grpo: bool = True, episilon: float = 1e-6, **kwargs: Any) -> Pair:
    """GRPO: (r - mean) / (std + epsilon), over each group.

    Args:
        rewards: one 1-D array a group.
        norm_adv_by_std_in_grpo: False leaves the std out.
        episilon: `epsilon`, in rLLM's spelling; both are understood.
        kwargs: `epsilon` and the other knobs of `rl_algo.normalise`. What every estimator may be handed is ignored.

    Returns:
        Advantages and returns (the same arrays), aligned with `rewards`. A group of one: mean 0, std 1. Equal rewards: exactly 0
        (rLLM leaves float residue). No groups: two empty lists.
    """
    return group_normalised(rewards, {"epsilon": episilon}, norm_adv_by_std_in_grpo, kwargs)


@register_rllm_adv_estimator(rLLMAdvantageEstimator.REINFORCE, formula="r", scope="trajectory", source="Williams 1992, Machine Learning 8")
def calculate_reinforce_advantages(rewards: Sequence[Any], **kwargs: Any) -> Pair:
    """REINFORCE without a baseline: the reward itself, in fresh float64 arrays. Further keywords are ignored, as in rLLM."""
    groups = Ragged.of(rewards)
    return as_pair(groups, groups.flat_N)


@register_rllm_adv_estimator(
    rLLMAdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
    formula="(r - group mean) / (std over the role-batch + epsilon)",
    scope="role-batch",
    source="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
)
def calculate_reinforce_plus_plus_baseline_advantages(rewards: Sequence[Any], epsilon: float = 1e-6, **kwargs: Any) -> Pair:
    """REINFORCE++ with baseline: rewards centred in each group, divided by their one std over the role-batch, plus epsilon.

    Args:
        rewards: one 1-D array a group; all groups of the role, from all ranks.
        epsilon: added to the std. Further keywords are ignored, as in rLLM.

    Returns:
        Advantages and returns (the same arrays). A group of one has baseline 0 (in rLLM it has no advantage ever). Equal rewards
        in a group: exactly 0. Where the centred rewards of the batch do not differ, their std counts as 1.
    """
    groups = Ragged.of(rewards)
    unit = unit_of(np.abs(groups.flat_N).max(initial=0.0))
    centred_N = centred(groups, groups.flat_N / unit)
    (batch_std,) = std(pool := groups.pooled(), centred_N)
    scale = batch_std + epsilon / unit if pool.has_spread(centred_N) else (1 + epsilon) / unit
    return as_pair(groups, centred_N / scale)


@register_rllm_adv_estimator(
    rLLMAdvantageEstimator.RLOO,
    formula="r - mean of the others = n/(n-1) * (r - mean)",
    scope="group",
    source="Kool et al. 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free; Ahmadian et al. 2024, arXiv:2402.14740",
)
def calculate_rloo_advantages(rewards: Sequence[Any], **kwargs: Any) -> Pair:
    """RLOO: r minus the mean reward of the others in its group.

    Returns:
        Advantages and returns (the same arrays). A group of one: the reward itself. Equal rewards: exactly 0. Further keywords
        are ignored, as in rLLM.
    """
    groups = Ragged.of(rewards)
    return as_pair(groups, normalise(groups, baseline="loo", scale="none"))


# ---------------------------------------------------------------------------------------------- trajectory groups


def collect_reward_and_advantage_from_trajectory_groups(
    groups: Sequence[TrajectoryGroup], algorithm_config: AlgorithmConfig, collect_advantage: bool = True
) -> dict[str, float]:
    """Write an advantage to every step of every trajectory, and return the metrics of rewards and advantages.

    All groups of one role go through the role's estimator in one call: hand over the groups of the whole batch, from all ranks.
    A trajectory's advantage is written, as a Python float, to each of its steps. Under `use_precomputed_advantage`, a group of
    which any step has an advantage already keeps its steps' own ones instead (see `_use_precomputed`).

    Returns:
        `reward/{role}/mean|std|max|min`; unless `collect_advantage` is False also `advantage/{role}/mean|std|max|min|fraction_zero`
        and the difficulty of the role's groups, `batch/{role}/...` (see `metrics.difficulty_metrics`). Nothing for no trajectories.

    Raises:
        ValueError: a reward is None, NaN or infinite; a precomputed advantage is no number and no list; an estimator is not
            registered, lacks what it needs, has no keyword that `estimator_kwargs` gives it, or returns something misshapen.
    """
    by_role: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        if group.trajectories:
            by_role.setdefault(group.group_role, []).append(group)

    if collect_advantage:
        _check_estimator_kwargs(algorithm_config)
    metrics: dict[str, float] = {}
    noted: Counter[str] = Counter()
    for role, members in by_role.items():
        rewards = [_rewards_of(group) for group in members]
        metrics |= reward_metrics(role, rewards)
        if collect_advantage:
            advantages = _assign(role, members, rewards, algorithm_config, noted)
            metrics |= advantage_metrics(role, advantages) | difficulty_metrics(role, rewards)
    if noted["overwritten"]:
        logger.warning("%d steps had an advantage already; it is overwritten (use_precomputed_advantage is off)", noted["overwritten"])
    if noted["missing"]:
        logger.warning("%d steps of groups with precomputed advantages have none; they count as 0", noted["missing"])
    return metrics


def _check_estimator_kwargs(config: AlgorithmConfig) -> None:
    """Every key of `estimator_kwargs` must be a keyword of some estimator in use: a misspelt one must not vanish."""
    names = sorted({config.estimator_of(role) for role in ("", *config.estimator_map)})
    known = {key for name in names for key in RLLM_ADV_ESTIMATOR_REGISTRY.get(name).kwargs}
    if unknown := sorted(set(config.estimator_kwargs) - known):
        raise ValueError(
            f"rllm.algorithm.estimator_kwargs: {', '.join(names)} take no {', '.join(map(repr, unknown))}; "
            f"known: {', '.join(sorted(known)) or 'none'}"
        )


def _rewards_of(group: TrajectoryGroup) -> Array:
    rewards = np.array([math.nan if t.reward is None else t.reward for t in group.trajectories], dtype=np.float64)
    if not np.isfinite(rewards).all():
        trajectory = group.trajectories[int(np.flatnonzero(~np.isfinite(rewards))[0])]
        raise ValueError(
            f"group {group.group_id!r}, trajectory {trajectory.uid} (role {group.group_role!r}): its reward is {trajectory.reward}; "
            "the reward function must give a finite number"
        )
    return rewards


def _assign(role: str, groups: list[TrajectoryGroup], rewards: list[Array], config: AlgorithmConfig, noted: Counter[str]) -> Array:
    """Write the advantages of one role to its steps; returns all numbers that were assigned, [any]."""
    has_own = [any(step.advantage is not None for t in group.trajectories for step in t.steps) for group in groups]
    assigned: list[float] = []
    if config.use_precomputed_advantage:
        for group in itertools.compress(groups, has_own):
            assigned += _use_precomputed(group, noted)
        rewards = [r for r, own in zip(rewards, has_own, strict=True) if not own]
        groups = [group for group, own in zip(groups, has_own, strict=True) if not own]
    else:
        steps = (step for group in itertools.compress(groups, has_own) for t in group.trajectories for step in t.steps)
        noted["overwritten"] += sum(step.advantage is not None for step in steps)
    if groups:
        assigned += _estimate(role, groups, rewards, config)
    return np.array(assigned)


def _use_precomputed(group: TrajectoryGroup, noted: Counter[str]) -> list[float]:
    """Make every step's own advantage a list of one float a response token.

    A number stands for all tokens; None is 0 and a list of another length than the tokens is 0 too, with a warning.
    """
    assigned = []
    for trajectory in group.trajectories:
        for index, step in enumerate(trajectory.steps):
            step.advantage = _per_token(step, f"group {group.group_id!r}, trajectory {trajectory.uid}, step {index}", noted)
            assigned += step.advantage
    return assigned


def _per_token(step: Step, where: str, noted: Counter[str]) -> list[float]:
    own: Any = step.advantage
    num_tokens = len(step.response_ids)
    if own is None:
        noted["missing"] += 1
        return [0.0] * num_tokens
    is_list = isinstance(own, list | tuple | np.ndarray)
    for value in own if is_list else [own]:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
            raise ValueError(f"{where}: a precomputed advantage must be a finite number or a list of them, got {value!r}")
    if not is_list:
        return [float(own)] * num_tokens
    if len(own) != num_tokens:
        logger.warning("%s: %d precomputed advantages for %d response tokens; they count as 0", where, len(own), num_tokens)
        return [0.0] * num_tokens
    return [float(value) for value in own]


def _estimate(role: str, groups: list[TrajectoryGroup], rewards: list[Array], config: AlgorithmConfig) -> list[float]:
    """Run the estimator of a role and write what it returns to the steps."""
    name = config.estimator_of(role)
    estimator: Estimator = RLLM_ADV_ESTIMATOR_REGISTRY.get(name)
    offered = {"norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo, "algorithm_config": config, "traj_groups": groups}
    offered |= {key: value for key, value in config.estimator_kwargs.items() if key in estimator.kwargs}
    advantages, _ = estimator(rewards, **estimator.accepted(offered))
    if len(advantages) != len(groups):
        raise ValueError(f"estimator {name!r}, role {role!r}: returned advantages of {len(advantages)} groups for {len(groups)}")
    assigned: list[float] = []
    for group, of_group in zip(groups, advantages, strict=True):
        where = f"estimator {name!r}, group {group.group_id!r}"
        if of_group is None:  # not trained on
            for step in (step for t in group.trajectories for step in t.steps):
                step.advantage = None
            continue
        of_group = _floats(of_group, len(group.trajectories), where)
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True):
            for step in trajectory.steps:
                step.advantage = advantage
        assigned += of_group
    return assigned


def _floats(values: Any, expected: int, where: str) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (expected,):
        raise ValueError(f"{where}: returned advantages of shape {array.shape}, expected ({expected},)")
    if not np.isfinite(array).all():
        raise ValueError(f"{where}: returned advantages that are not finite: {array}")
    return array.tolist()
