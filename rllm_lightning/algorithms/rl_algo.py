"""Group-normalised advantages: (reward - baseline) / scale, over all groups at once or for one group.

`normalise` is the whole family (GRPO and its relatives in other libraries); estimators are choices of its knobs, see
`presets.py`. The functions `..._per_group` are rLLM's names for one group's GRPO and RLOO.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from rllm_lightning.algorithms.ragged import NO_SPREAD, Array, Ragged, divide

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
        singleton: a group of one: `raw` (baseline 0, scale 1), `zero`, `drop` (0, and no part of `batch_std`) or `error`.

    Returns:
        [N] float64. Groups whose rewards do not differ get exactly 0 with every baseline but `none`. A std of 0 is no scale: the
        value stays as it is.

    Raises:
        ValueError: a knob has no such value, or a group of one under `singleton="error"`.
    """
    _check(baseline=baseline, scale=scale, ddof=ddof, epsilon=epsilon, eps_mode=eps_mode, singleton=singleton)
    single_G = rewards.sizes_G == 1
    if singleton == "error" and single_G.any():
        raise ValueError(
            f"group {single_G.argmax()} holds one trajectory, and singleton is 'error'; "
            "raise rllm.rollout.n, or set rllm.algorithm.estimator_kwargs.singleton to raw, zero or drop"
        )
    r, unit_G = rewards.in_units(common=scale == "batch_std")
    if baseline == "loo" and scale == "std":
        divisor_N = _divisor(_std_of_others(r, ddof), scale, r.expand(unit_G), epsilon, eps_mode)
    else:
        counted_N = r.expand(~single_G) if singleton == "drop" else slice(None)
        divisor_N = r.expand(_divisor(_scale(r, scale, ddof, counted_N), scale, unit_G, epsilon, eps_mode))
    advantages_N = divide(_centred(r, baseline), divisor_N)

    zero_G = ~r.differs_G if baseline != "none" else np.zeros_like(r.differs_G)
    if scale == "mean":
        zero_G |= r.mean_G <= 0
    advantages_N[r.expand(zero_G)] = 0.0
    if single_G.any():
        single_N = r.expand(single_G)
        raw = rewards.flat_N[single_N] / _divisor(1.0, scale, 1.0, epsilon, eps_mode)
        advantages_N[single_N] = raw if singleton == "raw" else 0.0
    return advantages_N


def _centred(r: Ragged, baseline: Baseline) -> Array:
    if baseline == "none":
        return r.flat_N
    if baseline == "loo":
        return r.flat_N - _mean_of_others(r)
    return r.centred_N if baseline == "mean" else r.flat_N - r.expand(r.median_G)


def _mean_of_others(r: Ragged) -> Array:
    return (r.expand(r.sum_G) - r.flat_N) / r.expand(np.maximum(r.sizes_G - 1, 1))


def _scale(r: Ragged, scale: Scale, ddof: int, counted_N: Any) -> Array:
    """[G] scale of each group; not used for `none`."""
    if scale == "mean":
        return r.mean_G
    if scale == "mad":
        return 1.4826 * r.like(np.abs(r.flat_N - r.expand(r.median_G))).median_G
    if scale == "batch_std":
        return np.full(len(r.sizes_G), Ragged.of([r.flat_N[counted_N]]).std_G(ddof)[0])
    return r.std_G(ddof) if scale == "std" else np.ones(len(r.sizes_G))


def _std_of_others(r: Ragged, ddof: int) -> Array:
    """[N] for each member the std of the rest of its group; 0 for a rest of one, or one that does not differ.

    Sums of squares stand around the group's median, and leave a member out by adding up what is before and behind it:
    subtracting it from the sum of all would lose a small spread beside one large reward.
    """
    mean_of_others_N, std_N = _mean_of_others(r), np.zeros_like(r.flat_N)
    for index in r.by_size():
        num_others = index.shape[1] - 1
        if num_others <= ddof:
            continue
        median = np.median(r.flat_N[index], axis=1, keepdims=True)
        squares = np.pad((r.flat_N[index] - median) ** 2, ((0, 0), (1, 1)))
        before, behind = squares.cumsum(axis=1)[:, :-2], squares[:, ::-1].cumsum(axis=1)[:, ::-1][:, 2:]
        around_mean = before + behind - num_others * (mean_of_others_N[index] - median) ** 2
        std_N[index] = np.sqrt(np.maximum(around_mean, 0.0) / (num_others - ddof))
    return np.where(std_N > NO_SPREAD * np.abs(mean_of_others_N), std_N, 0.0)


def _divisor(size: Any, scale: Scale, unit: Any, epsilon: float, eps_mode: EpsMode) -> Any:
    """A scale, whose size is in `unit`s, with its epsilon, which is not; 1 where there is no scale, and where a std is 0."""
    if scale == "none":
        return 1 / unit
    least = (np.sqrt(epsilon) if eps_mode == "clamp_var" else epsilon) / unit
    divisor = size + least if eps_mode == "add" else np.maximum(size, least)
    return np.where(size == 0, 1 / unit, divisor) if scale in ("std", "batch_std") else divisor


def _check(**knobs: Any) -> None:
    for name, value in knobs.items():
        at = f"rllm.algorithm.estimator_kwargs.{name}"
        if name in _CHOICES and value not in get_args(_CHOICES[name]):
            raise ValueError(f"{at}: {value!r} is none of {', '.join(get_args(_CHOICES[name]))}")
        if name == "ddof" and value not in (0, 1):
            raise ValueError(f"{at}: must be 0 or 1, got {value!r}")
        if name == "epsilon" and not (isinstance(value, int | float) and 0 <= value < np.inf):
            raise ValueError(f"{at}: must be a number of at least 0, got {value!r}")
