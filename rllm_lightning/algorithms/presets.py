"""GRPO's family: (reward - baseline) / scale within the group, under the names that libraries and papers know it by.

Well-known libraries mean different things by "GRPO". Each is a preset of the knobs of `rl_algo.normalise` here, so that a result
can be compared with the library it came from; every knob can be overridden under `rllm.algorithm.estimator_kwargs`.
To add a preset: one more call of `_preset`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import CONTEXT, Scope, register_rllm_adv_estimator
from rllm_lightning.algorithms.ragged import Array, Ragged
from rllm_lightning.algorithms.rl_algo import KNOBS, normalise

Pair = tuple[list[Any], list[Any]]


def as_pair(groups: Ragged, advantages_N: Array, unit_G: Array | None = None, zero_G: Array | None = None) -> Pair:
    """Advantages (times the unit of their group, and exactly 0 in the groups `zero_G`) and returns, split by group. Without a critic
    the two are the same."""
    with np.errstate(over="ignore"):
        advantages_N = advantages_N if unit_G is None else advantages_N * groups.expand(unit_G)
    if zero_G is not None:
        advantages_N = np.where(groups.expand(zero_G), 0.0, advantages_N)
    advantages = groups.split(advantages_N)
    return advantages, advantages


def group_normalised(rewards: Sequence[Any], preset: Mapping[str, Any], use_scale: bool, given: Mapping[str, Any]) -> Pair:
    """`rl_algo.normalise` with the knobs of a preset, overridden by those that were given; a dropped group is None."""
    knobs = knobs_of(preset, use_scale, given)
    groups = Ragged.of(rewards)
    advantages, returns = as_pair(groups, normalise(groups, **knobs))
    if knobs.get("singleton") == "drop":
        advantages[:] = [None if len(of_group) == 1 else of_group for of_group in advantages]
    return advantages, returns


def knobs_of(preset: Mapping[str, Any], use_scale: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a preset, overridden by those among the keywords of an estimator.

    Raises:
        ValueError: an unknown keyword, or a scale together with `norm_adv_by_std_in_grpo=False`, which asks for none.
    """
    given = {key: value for key, value in given.items() if key not in CONTEXT}
    if "episilon" in given:
        given = {"epsilon": given.pop("episilon"), **given}
    if unknown := sorted(set(given) - set(KNOBS)):
        raise ValueError(f"rllm.algorithm.estimator_kwargs: no keyword {', '.join(map(repr, unknown))}; known: {', '.join(KNOBS)}")
    if use_scale:
        return {**preset, **given}
    if given.get("scale", "none") != "none":
        raise ValueError(
            f"rllm.algorithm.norm_adv_by_std_in_grpo=false asks for no scale, estimator_kwargs.scale for {given['scale']!r}; give one"
        )
    return {**preset, **given, "scale": "none"}


def _preset(name: str, formula: str, source: str, scope: Scope = "group", **knobs: Any) -> None:
    def advantages(rewards: Sequence[Any], norm_adv_by_std_in_grpo: bool = True, **kwargs: Any) -> Pair:
        return group_normalised(rewards, knobs, norm_adv_by_std_in_grpo, kwargs)

    advantages.__doc__ = f"{formula}, as in {source}. A preset of `rl_algo.normalise`: {knobs}."
    register_rllm_adv_estimator(name, formula=formula, scope=scope, source=source, kwargs=("episilon", *KNOBS), preset=knobs)(advantages)


_preset("grpo_trl", "(r - mean) / (std + 1e-4), std with ddof 1", "TRL", ddof=1, epsilon=1e-4, singleton="zero")
_preset("grpo_verl", "(r - mean) / (std + 1e-6), std with ddof 1", "verl and SkyRL", ddof=1, epsilon=1e-6)
_preset(
    "grpo_nemo",
    "(r - mean of the others) / (std of the others + 1e-6), std with ddof 1, left out where it is 0",
    "NeMo-RL",
    baseline="loo",
    ddof=1,
    epsilon=1e-6,
    singleton="zero",
)
_preset(
    "dr_grpo", "r - mean", "Liu et al. 2025, Dr. GRPO, arXiv:2503.20783 (prime-rl's and tinker's default)", scale="none", singleton="zero"
)
_preset(
    "grpo_batch_std",
    "(r - group mean) / (std over the role-batch + 1e-4), std with ddof 1",
    "TRL, scale_rewards='batch'",
    scope="role-batch",
    scale="batch_std",
    ddof=1,
    epsilon=1e-4,
    singleton="zero",
)


@register_rllm_adv_estimator(
    "median_mad",
    formula="(r - median) / (1.4826 * MAD + epsilon) in the group",
    scope="group",
    source="robust statistics: Hampel 1974, J. Am. Stat. Assoc. 69",
    kwargs=("episilon", *KNOBS),
)
def median_mad(rewards: Sequence[Any], **kwargs: Any) -> Pair:
    """(r - median) / (1.4826 MAD + epsilon), MAD the median distance to the median; 1.4826 makes it a std for normal rewards.

    One outlier moves neither. Where more than half of a group is equal, MAD is 0 and epsilon alone is the scale: choose it
    accordingly (`estimator_kwargs.epsilon`) for rewards of 0 and 1. A group of one: baseline 0, scale 1.
    """
    return group_normalised(rewards, {"baseline": "median", "scale": "mad"}, True, kwargs)
