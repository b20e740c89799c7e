"""The catalogue of estimators that look at one group at a time and give one number a trajectory, beside GRPO's family.

Each is registered with its formula and the paper that it comes from; the formulas are derived anew. Shapes as in `ragged.py`: `_N`
one entry a trajectory of the role-batch, `_G` one a group. Large and small rewards are handled in units of their group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rllm_lightning.algorithms.estimator import register_rllm_adv_estimator
from rllm_lightning.algorithms.presets import Pair, as_pair
from rllm_lightning.algorithms.ragged import Array, Ragged, divide
from rllm_lightning.algorithms.rl_algo import normalise


@register_rllm_adv_estimator(
    "opo",
    formula="r - sum(len * r) / sum(len) in the group",
    scope="group",
    source="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585",
)
def opo(rewards: Sequence[Any], lengths: Sequence[Any]) -> Pair:
    """r minus the group's mean reward weighted by response length: the baseline of least variance where the squared norm of a
    response's gradient grows with its length.

    Args:
        lengths: response tokens of each trajectory. A group without any has plain weights.

    A group of one, and equal rewards: exactly 0.
    """
    groups = Ragged.of(rewards)
    r, unit_G = groups.in_units()
    num_tokens = groups.like(Ragged.of(lengths).flat_N)
    weights = groups.like(np.where(groups.expand(num_tokens.sum_G > 0), num_tokens.flat_N, 1.0))
    baseline_G = r.like(weights.flat_N * r.flat_N).sum_G / np.maximum(weights.sum_G, 1.0)
    return as_pair(groups, r.flat_N - groups.expand(baseline_G), unit_G, zero_G=~groups.differs_G)


@register_rllm_adv_estimator(
    "maxrl",
    formula="(r - mean) / mean in the group, 0 where the mean is 0",
    scope="group",
    source="Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning",
    objective="log_likelihood",
)
def maxrl(rewards: Sequence[Any]) -> Pair:
    """(r - mean) / mean: for rewards of 0 and 1 an estimate of the gradient of the log of the success rate, which weights hard
    tasks up.

    A group whose mean is 0, a group of one, and equal rewards: exactly 0.

    Raises:
        ValueError: a reward is negative; there is no success rate then.
    """
    groups = Ragged.of(rewards)
    if (negative_N := groups.flat_N < 0).any():
        at = int(negative_N.argmax())
        raise ValueError(f"maxrl: {groups.place(at)}: the reward is {groups.flat_N[at]}; it needs rewards of at least 0")
    return as_pair(groups, normalise(groups, scale="mean", epsilon=0.0, singleton="zero"))


@register_rllm_adv_estimator(
    "mapo",
    formula="L * (r - mean) / mean + (1 - L) * (r - mean) / std in the group, L = 1 - 4p(1-p), p the mean within [0, 1]",
    scope="group",
    source="Huang et al. 2025, Mixed Advantage Policy Optimization, arXiv:2509.18849",
)
def mapo(rewards: Sequence[Any]) -> Pair:
    """A mixture of the relative and the standardised distance to the mean: the more certain the group is (success rate p near 0 or
    1), the more of the relative one. The std is the population's.

    The relative part is 0 where the mean is not positive. A group of one, and equal rewards: exactly 0.
    """
    groups = Ragged.of(rewards)
    r, unit_G = groups.in_units()
    p_G = np.clip(r.mean_G * unit_G, 0.0, 1.0)
    certainty_N = groups.expand(1 - 4 * p_G * (1 - p_G))
    relative_N = normalise(groups, scale="mean", epsilon=0.0, singleton="zero")
    standard_N = normalise(groups, scale="std", epsilon=0.0, singleton="zero")
    return as_pair(groups, certainty_N * relative_N + (1 - certainty_N) * standard_N)


@register_rllm_adv_estimator(
    "grpo_passk",
    formula="best of the group: (r1 - r2) / (std + epsilon), r1 and r2 the two largest rewards; all others 0",
    scope="group",
    source="Tang et al. 2025, arXiv:2503.19595, as in verl",
    objective="pass_at_n",
)
def grpo_passk(rewards: Sequence[Any], norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6) -> Pair:
    """Only the best trajectory is pushed, by how much the group's maximum would fall without it.

    Two that share the first place, a group of one, and equal rewards: 0. The std is the population's.
    """
    groups = Ragged.of(rewards)
    r, unit_G = groups.in_units()
    divisor_G = r.std_G() + epsilon / unit_G if norm_adv_by_std_in_grpo else 1 / unit_G
    lead_N = np.zeros_like(r.flat_N)
    for index in groups.by_size():
        if index.shape[1] > 1:
            r_Kn = r.flat_N[index]
            second, first = np.partition(r_Kn, (-2, -1), axis=1)[:, -2:].T
            lead_N[index[np.arange(len(index)), r_Kn.argmax(axis=1)]] = first - second
    return as_pair(groups, divide(lead_N, groups.expand(divisor_G)), zero_G=~groups.differs_G)


@register_rllm_adv_estimator(
    "pass_at_k",
    formula="s_i - baseline_i: share of best-of-k that sample i brings about, minus that of the k-1 others without it",
    scope="group",
    source="Walder & Karkhanis 2025, Pass@K Policy Optimization, arXiv:2505.15201",
    objective="pass_at_k",
)
def pass_at_k(rewards: Sequence[Any], k: int = 2, baseline: Literal["loo", "none"] = "loo") -> Pair:
    """PKPO: the policy gradient of the expected best of k samples (pass@k for rewards of 0 and 1), without bias from n >= k.

    Sample i carries s_i = sum of max(I) / C(n, k) over the subsets I of k samples that hold it. With the rewards g in ascending
    order that is s_i = sum_j m_ij g_j, m_ii = C(i-1, k-1) / C(n, k), m_ij = C(j-2, k-2) / C(n, k) for j > i. The baseline takes
    the same sum over the maxima of I without i (the paper's leave-one-out-minus-one), so that only differences remain:
    sum of (g_i - g_j) C(j-1, k-2) / C(n, k) over j < i. For k = 1 it is the mean of the others, over n.

    Args:
        k: samples of which the best counts, at least 1.
        baseline: `loo`, or `none` for s_i itself.

    Equal rewards with a baseline: exactly 0.

    Raises:
        ValueError: a group holds fewer than k trajectories.
    """
    groups = Ragged.of(rewards)
    if k < 1 or baseline not in ("loo", "none"):
        raise ValueError(f"pass_at_k: estimator_kwargs must have k >= 1 and baseline loo or none, got {k!r} and {baseline!r}")
    if (small_G := (groups.sizes_G > 0) & (groups.sizes_G < k)).any():
        raise ValueError(
            f"pass_at_k: group {small_G.argmax()} holds {groups.sizes_G[small_G.argmax()]} trajectories, fewer than k={k}; "
            "raise rllm.rollout.n or lower rllm.algorithm.estimator_kwargs.k"
        )
    r, unit_G = groups.in_units()
    if k == 1 and baseline == "loo":
        return as_pair(groups, normalise(groups, baseline="loo", scale="none") / groups.expand(groups.sizes_G))
    advantages_N = np.empty_like(r.flat_N)
    for index in groups.by_size():
        order = np.argsort(r.flat_N[index], axis=1)
        index = np.take_along_axis(index, order, axis=1)
        values = _best_of_k_lead(r.flat_N[index], k) if baseline == "loo" else _best_of_k(r.flat_N[index], k)
        advantages_N[index] = values
    return as_pair(groups, advantages_N, unit_G, zero_G=~groups.differs_G if baseline == "loo" else None)


def _best_of_k(ascending: Array, k: int) -> Array:
    """s_i of each row of rewards in ascending order."""
    n = ascending.shape[1]
    own = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    above = np.array([math.comb(j - 1, k - 2) / math.comb(n, k) if j >= 1 and k >= 2 else 0.0 for j in range(n)])
    from_here = np.cumsum((above * ascending)[:, ::-1], axis=1)[:, ::-1]
    return own * ascending + from_here - above * ascending


def _best_of_k_lead(ascending: Array, k: int) -> Array:
    """s_i minus its baseline, for k >= 2: from one rank to the next it grows by the gap times the subsets that the gap decides."""
    n = ascending.shape[1]
    decided = np.cumsum([math.comb(j, k - 2) / math.comb(n, k) for j in range(n - 1)])
    return np.pad(np.cumsum(np.diff(ascending, axis=1) * decided, axis=1), ((0, 0), (1, 0)))
