"""From trajectory groups to advantages on their steps, and the four estimators that rLLM's users know.

    groups --rewards, role by role--> estimator of the role --> step.advantage of every step, and metrics

The other estimators stand in `presets.py` (GRPO's family), `group_estimators.py`, `batch_estimators.py` and `step_estimators.py`;
`estimator.py` says how to add one.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms import batch_estimators, group_estimators, step_estimators  # noqa: F401 (they register estimators)
from rllm_lightning.algorithms.assign import check_estimator_kwargs, has_advantage, run_estimator, use_precomputed
from rllm_lightning.algorithms.estimator import RLLM_ADV_ESTIMATOR_REGISTRY, get_rllm_adv_estimator, register_rllm_adv_estimator
from rllm_lightning.algorithms.metrics import advantage_metrics, difficulty_metrics, reward_metrics
from rllm_lightning.algorithms.needs import rewards_of
from rllm_lightning.algorithms.presets import Pair, as_pair, group_normalised
from rllm_lightning.algorithms.ragged import Array, Ragged, divide
from rllm_lightning.algorithms.rl_algo import KNOBS, normalise
from rllm_lightning.config import AlgorithmConfig, rLLMAdvantageEstimator
from rllm_lightning.types import TrajectoryGroup

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
    preset={},
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
    r, unit_G = groups.in_units(common=True)
    single_G = groups.sizes_G == 1
    centred_N = r.flat_N - r.expand(np.where(single_G, 0.0, r.mean_G))
    centred_N[r.expand(~(r.differs_G | single_G))] = 0.0
    (batch_std,) = r.like(centred_N).pooled().std_G()
    return as_pair(groups, divide(centred_N, r.expand((batch_std or 1 / unit_G) + epsilon / unit_G)))


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
    groups: Sequence[TrajectoryGroup],
    algorithm_config: AlgorithmConfig,
    collect_advantage: bool = True,
    *,
    estimator_state: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Write an advantage to every step of every trajectory, and return the metrics of rewards and advantages.

    All groups of one role go through the role's estimator in one call: hand over the groups of the whole batch, from all ranks.
    An advantage of a trajectory is written, as a Python float, to each of its steps; see `assign.py` for those of steps and
    tokens. Under `use_precomputed_advantage`, a group of which any step has an advantage already keeps its own ones
    (`assign.use_precomputed`); otherwise they are overwritten, with a warning.

    Args:
        estimator_state: what stateful estimators (`rae`) remember, plain data by role; they change it in place. Pass the same
            dict to every training batch and keep it in the checkpoint.

    Returns:
        `reward/{role}/mean|std|max|min`; unless `collect_advantage` is False also `advantage/{role}/mean|std|max|min|fraction_zero`
        and the difficulty of the role's groups, `batch/{role}/...` (`metrics.difficulty_metrics`). Nothing for no trajectories.

    Raises:
        ValueError: a reward is None, NaN or infinite; a precomputed advantage is no number and no list; an estimator is not
            registered, lacks what it needs, has no keyword that `estimator_kwargs` gives it, or returns something misshapen.
    """
    if collect_advantage:
        check_estimator_kwargs(algorithm_config)
    by_role: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        if group.trajectories:
            by_role.setdefault(group.group_role, []).append(group)

    metrics: dict[str, float] = {}
    noted: Counter[str] = Counter()
    for role, members in by_role.items():
        rewards = [rewards_of(group) for group in members]
        metrics |= reward_metrics(role, rewards)
        if collect_advantage:
            assigned = _assign(role, members, rewards, algorithm_config, estimator_state, noted)
            metrics |= advantage_metrics(role, np.array(assigned)) | difficulty_metrics(role, rewards)
    if noted["overwritten"]:
        logger.warning("%d groups had advantages already; they are overwritten (use_precomputed_advantage is off)", noted["overwritten"])
    if noted["missing"]:
        logger.warning("%d steps of groups with precomputed advantages have none; they count as 0", noted["missing"])
    return metrics


def _assign(
    role: str,
    groups: list[TrajectoryGroup],
    rewards: list[Array],
    config: AlgorithmConfig,
    estimator_state: dict[str, Any] | None,
    noted: Counter[str],
) -> list[float]:
    """Write the advantages of one role; returns all numbers that were assigned."""
    keeps_own = [has_advantage(group) for group in groups]
    if not config.use_precomputed_advantage:
        noted["overwritten"] += sum(keeps_own)
        keeps_own = [False] * len(groups)
    assigned = [value for group in itertools.compress(groups, keeps_own) for value in use_precomputed(group, noted)]
    others = [index for index, own in enumerate(keeps_own) if not own]
    if others:
        assigned += run_estimator(role, [groups[i] for i in others], [rewards[i] for i in others], config, estimator_state)
    return assigned
