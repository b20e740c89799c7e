"""The catalogue of estimators that give one number a trajectory and do not stop at its group: over the role-batch, or by itself.

Each is registered with its formula and the paper that it comes from; the formulas are derived anew. Shapes as in `ragged.py`: `_N`
one entry a trajectory of the role-batch, `_G` one a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import register_rllm_adv_estimator
from rllm_lightning.algorithms.presets import Pair, as_pair
from rllm_lightning.algorithms.ragged import Array, Ragged
from rllm_lightning.algorithms.rl_algo import normalise


@register_rllm_adv_estimator(
    "reinforce_plus_plus",
    formula="(r - mean) / (std + epsilon) over the role-batch, each reward weighted by its response tokens",
    scope="role-batch",
    source="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
)
def reinforce_plus_plus(rewards: Sequence[Any], lengths: Sequence[Any], epsilon: float = 1e-6) -> Pair:
    """Rewards whitened over all tokens of the role-batch. A trajectory without tokens, and a batch of equal rewards: exactly 0.

    Args:
        lengths: response tokens of each trajectory.
    """
    groups = Ragged.of(rewards)
    return as_pair(groups, _whitened(groups.flat_N, epsilon, Ragged.of(lengths).flat_N))


@register_rllm_adv_estimator(
    "prpo",
    formula="(r - mean) / (std + epsilon) over the role-batch",
    scope="role-batch",
    source="REINFORCE with whitened rewards: Williams 1992, Machine Learning 8",
)
def prpo(rewards: Sequence[Any], epsilon: float = 1e-6) -> Pair:
    """Rewards whitened over all trajectories of the role-batch, whatever group they are in. Equal rewards: exactly 0."""
    groups = Ragged.of(rewards)
    return as_pair(groups, _whitened(groups.flat_N, epsilon))


@register_rllm_adv_estimator(
    "gpg",
    formula="(r - group mean) * B / (B - M): B groups in the role-batch, M of them without spread",
    scope="role-batch",
    source="Chu et al. 2025, Group Policy Gradient, arXiv:2504.02546",
)
def gpg(rewards: Sequence[Any]) -> Pair:
    """Centred rewards, scaled up for the groups that teach nothing, so that these do not shrink the gradient's mean.

    A group of one teaches nothing either. Equal rewards in a group: exactly 0.
    """
    groups = Ragged.of(rewards)
    num_groups = int((groups.sizes_G > 0).sum())
    num_teaching = int(groups.differs_G.sum())
    with np.errstate(over="ignore"):
        advantages_N = normalise(groups, scale="none", singleton="zero") * (num_groups / max(num_teaching, 1))
    return as_pair(groups, advantages_N)


@register_rllm_adv_estimator(
    "gdpo",
    formula="weighted sum of GRPO advantages of each reward component, whitened over the role-batch",
    scope="role-batch",
    source="Liu et al. 2026, Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242",
)
def gdpo(
    rewards: Sequence[Any],
    reward_components: Mapping[str, Sequence[Any]],
    weights: Mapping[str, float] | None = None,
    epsilon: float = 1e-6,
) -> Pair:
    """Each component is normalised in its group before they are added up, so that none drowns the others; then
    (sum - mean) / (std + epsilon) over the role-batch.

    Args:
        rewards: give the groups; their values are not used.
        reward_components: name -> rewards of that component, shaped like `rewards`.
        weights: name -> weight (None: all 1).

    Raises:
        ValueError: `weights` does not name exactly the components.
    """
    if weights is not None and set(weights) != set(reward_components):
        raise ValueError(f"gdpo: estimator_kwargs.weights names {sorted(weights)}, the reward components are {sorted(reward_components)}")
    groups = Ragged.of(rewards)
    total_N = np.zeros_like(groups.flat_N)
    for name, component in reward_components.items():
        total_N += (1.0 if weights is None else weights[name]) * normalise(Ragged.of(component), epsilon=epsilon)
    return as_pair(groups, _whitened(total_N, epsilon))


@register_rllm_adv_estimator(
    "rae",
    formula="r - b, b <- decay * b + (1 - decay) * mean r of the role-batch, afterwards",
    scope="role-batch",
    source="Liu et al. 2025, SPIRAL (role-conditioned advantage estimation), arXiv:2506.24119",
)
def rae(rewards: Sequence[Any], state: dict[str, Any], decay: float = 0.95) -> Pair:
    """r minus a moving average of the role's rewards in earlier batches, which starts at 0.

    Args:
        state: of the role; `state["baseline"]` is the average. Changed in place, after use: the baseline owes nothing to the
            rewards that it is subtracted from.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"rllm.algorithm.estimator_kwargs.decay: must be in [0, 1], got {decay}")
    groups = Ragged.of(rewards)
    baseline = float(state.get("baseline", 0.0))
    if len(groups.flat_N):
        r, unit_G = groups.pooled().in_units()
        state["baseline"] = decay * baseline + (1 - decay) * float(r.mean_G[0] * unit_G[0])
    with np.errstate(over="ignore"):
        return as_pair(groups, groups.flat_N - baseline)


@register_rllm_adv_estimator(
    "remax",
    formula="r - reward of the greedy answer to the same task",
    scope="trajectory",
    source="Li et al. 2023, ReMax, arXiv:2310.10505",
)
def remax(rewards: Sequence[Any], greedy_rewards: Sequence[Any]) -> Pair:
    """r minus what the greedy answer earns.

    Args:
        greedy_rewards: shaped like `rewards`.
    """
    groups = Ragged.of(rewards)
    with np.errstate(over="ignore"):
        return as_pair(groups, groups.flat_N - Ragged.of(greedy_rewards).flat_N)


def _whitened(values_N: Array, epsilon: float, weights_N: Array | None = None) -> Array:
    """(x - mean) / (std + epsilon), mean and std weighted; 0 where the weight is 0, and where nothing differs."""
    whitened_N = np.zeros_like(values_N)
    counted_N = np.ones(len(values_N), bool) if weights_N is None else weights_N > 0
    pool = Ragged.of([values_N[counted_N]])
    if pool.differs_G[0]:
        x, (unit,) = pool.in_units()
        weights = None if weights_N is None else weights_N[counted_N]
        centred = x.flat_N - np.average(x.flat_N, weights=weights)
        whitened_N[counted_N] = centred / (np.sqrt(np.average(centred**2, weights=weights)) + epsilon / unit)
    return whitened_N
