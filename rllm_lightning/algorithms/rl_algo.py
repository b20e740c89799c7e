"""Group-normalised advantages: (reward - baseline) / scale, over all groups at once or for one group.

`normalise` is the whole family (GRPO and its relatives in other libraries); estimators are choices of its knobs, see
`estimators.py`. The functions `..._per_group` are rLLM's names for one group's GRPO and RLOO.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from rllm_lightning.algorithms.ragged import NO_SPREAD, Array, Ragged, unit_of

Baseline = Literal["mean", "loo", "median", "none"]
Scale = Literal["std", "batch_std", "mad", "mean", "none"]
EpsMode = Literal["add", "clamp_std", "clamp_var"]
Singleton = Literal["raw", "zero", "drop", "error"]

KNOBS = ("ddof", "epsilon", "eps_mode", "baseline", "scale", "singleton")
_CHOICES = {"baseline": Baseline, "scale": Scale, "eps_mode": EpsMode, "singleton": Singleton}


def calculate_grpo_advantages_per_group(rewards: Any, norm_adv_by_std_in_grpo: bool = True, episilon: float = 1e-6) -> tuple[Array, Array]:
    """GRPO of one group: (r - mean) / (std + epsilon), std of the population (ddof 0); without the std where told so.

    Args:
        rewards: [n] numbers, n >= 0.

    Returns:
        advantages [n] and returns [n], which are the same. One reward: mean 0 and std 1. Equal rewards: exactly 0.
    """
    group = Ragged.of([rewards])
    (advantages,) = group.split(normalise(group, scale="std" if norm_adv_by_std_in_grpo else "none", epsilon=episilon))
    return advantages, advantages


def calculate_rloo_advantages_per_group(rewards: Any) -> tuple[Array, Array]:
    """RLOO of one group: r minus the mean of the others = n/(n-1) * (r - mean).

    Args:
        rewards: [n] numbers, n >= 0.

    Returns:
        advantages [n] and returns [n], which are the same. One reward: the reward itself. Equal rewards: exactly 0.
    """
    group = Ragged.of([rewards])
    (advantages,) = group.split(normalise(group, baseline="loo", scale="none"))
    return advantages, advantages


def normalise(
    rewards: Ragged,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    epsilon: float = 1e-6,
    eps_mode: EpsMode = "add",
    singleton: Singleton = "raw",
) -> Array:
    """(reward - baseline) / scale for each trajectory.

    Args:
        baseline: of the group: its `mean`, the mean of the others (`loo`), its `median`, or `none` (0).
        scale: of the group: its `std`, `mad` (1.4826 times the median distance to the median), `mean` (advantages are 0 where
            it is not positive) or `none` (1); or `batch_std`, the std of all rewards of the role-batch. Beside the baseline
            `loo`, `std` is that of the others too.
        ddof: 0: std of the population; 1: of a sample.
        epsilon, eps_mode: how a small scale is kept from blowing up: `add`: scale + epsilon; `clamp_std`: at least epsilon;
            `clamp_var`: its square at least epsilon.
        singleton: a group of one: `raw` (baseline 0, scale 1), `zero`, `drop` (0, and no part of `batch_std`) or
            `error`.

    Returns:
        [N] float64. Groups whose rewards do not differ get exactly 0 with
        every baseline but `none`. A std of 0 is no scale: the value stays as it is.

    Raises:
        ValueError: a knob has no such value, or a group of one under `singleton="error"`.
    """
    check_knobs(baseline=baseline, scale=scale, ddof=ddof, epsilon=epsilon, eps_mode=eps_mode, singleton=singleton)
    single_N = rewards.size_N == 1
    if singleton == "error" and single_N.any():
        raise ValueError(
            f"group {rewards.group_N[single_N.argmax()]} holds one trajectory, and singleton is 'error'; "
            "raise rllm.rollout.n, or set rllm.algorithm.estimator_kwargs.singleton to raw, zero or drop"
        )
    # In units of the largest reward (of the batch, where its std is the scale), squares and sums stay inside float64's range.
    magnitude_G = rewards.max(np.abs(rewards.flat_N))
    if scale == "batch_std":
        magnitude_G[:] = magnitude_G.max(initial=0.0)
    unit_N = unit_of(magnitude_G)[rewards.group_N]
    r_N = rewards.flat_N / unit_N

    baseline_N = _baseline(rewards, r_N, baseline)
    centred_N = r_N - baseline_N
    if baseline != "none":
        centred_N[~rewards.has_spread(r_N)[rewards.group_N]] = 0.0
    if scale == "batch_std":
        counted_N = ~single_N if singleton == "drop" else np.ones(len(r_N), bool)
        scale_N = np.broadcast_to(std(Ragged.of([r_N[counted_N]]), r_N[counted_N], ddof), r_N.shape)
    else:
        scale_N = _group_scale(rewards, r_N, baseline_N, scale, ddof, of_others=baseline == "loo")

    as_it_is_N = (scale_N == 0) & (scale in ("std", "batch_std", "none"))
    divisor_N = np.where(as_it_is_N, 1 / unit_N, _guarded(scale_N, epsilon, eps_mode, unit_N))
    advantages_N = _ratio(centred_N, divisor_N)
    if scale == "mean":
        advantages_N[scale_N <= 0] = 0.0
    if singleton == "raw":
        advantages_N[single_N] = _ratio(rewards.flat_N[single_N], 1.0 if scale == "none" else _guarded(1.0, epsilon, eps_mode, 1.0))
    else:
        advantages_N[single_N] = 0.0
    return advantages_N


def centred(groups: Ragged, values_N: Array) -> Array:
    """Values minus the mean of their group; a group of one has mean 0, one without spread gives exactly 0."""
    mean_G = np.where(groups.sizes_G == 1, 0.0, groups.mean(values_N))
    centred_N = values_N - mean_G[groups.group_N]
    centred_N[~(groups.has_spread(values_N) | (groups.sizes_G == 1))[groups.group_N]] = 0.0
    return centred_N


def std(groups: Ragged, values_N: Array, ddof: int = 0) -> Array:
    """[G] standard deviations; exactly 0 for a group without spread."""
    centred_N = values_N - groups.mean(values_N)[groups.group_N]
    std_G = np.sqrt(groups.sum(centred_N**2) / np.maximum(groups.sizes_G - ddof, 1))
    return np.where(groups.has_spread(values_N), std_G, 0.0)


def check_knobs(**knobs: Any) -> None:
    """Raise a `ValueError` that names the first knob without such a value."""
    for name, value in knobs.items():
        at = f"rllm.algorithm.estimator_kwargs.{name}"
        if name in _CHOICES and value not in get_args(_CHOICES[name]):
            raise ValueError(f"{at}: {value!r} is none of {', '.join(get_args(_CHOICES[name]))}")
        if name == "ddof" and value not in (0, 1):
            raise ValueError(f"{at}: must be 0 or 1, got {value!r}")
        if name == "epsilon" and not (isinstance(value, int | float) and 0 <= value < np.inf):
            raise ValueError(f"{at}: must be a number of at least 0, got {value!r}")


def _baseline(rewards: Ragged, r_N: Array, baseline: Baseline) -> Array:
    if baseline == "none":
        return np.zeros_like(r_N)
    if baseline == "median":
        return rewards.median(r_N)[rewards.group_N]
    if baseline == "mean":
        return rewards.mean(r_N)[rewards.group_N]
    return (rewards.sum(r_N)[rewards.group_N] - r_N) / np.maximum(rewards.size_N - 1, 1)


def _group_scale(rewards: Ragged, r_N: Array, baseline_N: Array, scale: Scale, ddof: int, of_others: bool) -> Array:
    if scale == "none":
        return np.zeros_like(r_N)
    if scale == "mean":
        return rewards.mean(r_N)[rewards.group_N]
    if scale == "mad":
        median_G = rewards.median(r_N)
        return 1.4826 * rewards.median(np.abs(r_N - median_G[rewards.group_N]))[rewards.group_N]
    if of_others:
        return _std_of_others(rewards, r_N, baseline_N, ddof)
    return std(rewards, r_N, ddof)[rewards.group_N]


def _std_of_others(rewards: Ragged, r_N: Array, mean_of_others_N: Array, ddof: int) -> Array:
    """For each member the std of the rest of its group; 0 for a rest of one, or one without spread.

    Sums of squares stand around the group's median, and leave a member out by adding up what is before and behind it:
    subtracting it from the sum of all would lose a small spread beside one large reward.
    """
    std_N = np.zeros_like(r_N)
    for index in rewards.by_size():
        num_others = index.shape[1] - 1
        if num_others <= ddof:
            continue
        median = np.median(r_N[index], axis=1, keepdims=True)
        squares = np.pad((r_N[index] - median) ** 2, ((0, 0), (1, 1)))
        before, behind = squares.cumsum(axis=1)[:, :-2], squares[:, ::-1].cumsum(axis=1)[:, ::-1][:, 2:]
        shift = mean_of_others_N[index] - median
        std_N[index] = np.sqrt(np.maximum(before + behind - num_others * shift**2, 0.0) / (num_others - ddof))
    return np.where(std_N > NO_SPREAD * np.abs(mean_of_others_N), std_N, 0.0)


def _guarded(scale: Any, epsilon: float, eps_mode: EpsMode, unit: Any) -> Any:
    """`scale`, which is in `unit`s, kept from blowing up by `epsilon`, which is not."""
    if eps_mode == "add":
        return scale + epsilon / unit
    return np.maximum(scale, (epsilon if eps_mode == "clamp_std" else np.sqrt(epsilon)) / unit)


def _ratio(numerator_N: Array, divisor_N: Any) -> Array:
    """0 / x is 0 whatever x is; what leaves float64's range is infinite here and cut to the largest number by `split`."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.divide(numerator_N, divisor_N, out=np.zeros_like(numerator_N), where=numerator_N != 0)
