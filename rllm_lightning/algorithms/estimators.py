"""The catalogue of estimators that give one number a trajectory, beside the four of `advantage.py`.

Each is registered with its formula, its scope and the paper or library that it comes from; the formulas are derived anew.
Shapes as in `ragged.py`: `_N` one entry a trajectory of the role-batch, `_G` one a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_lightning.algorithms.estimator import CONTEXT, register_rllm_adv_estimator
from rllm_lightning.algorithms.ragged import Array, Ragged
from rllm_lightning.algorithms.rl_algo import KNOBS, normalise

Pair = tuple[list[Any], list[Any]]


def as_pair(groups: Ragged, advantages_N: Array) -> Pair:
    """Advantages and returns, split by group. Without a critic the two are the same."""
    advantages = groups.split(advantages_N)
    return advantages, advantages


# ------------------------------------------------------------------------------------------- the group-normalised family


def group_normalised(rewards: Sequence[Any], preset: Mapping[str, Any], use_scale: bool, given: Mapping[str, Any]) -> Pair:
    """`rl_algo.normalise` with the knobs of a preset, overridden by those that were given; a dropped group is None.

    Raises:
        ValueError: an unknown keyword, or a scale together with `norm_adv_by_std_in_grpo=False`, which asks for none.
    """
    given = {key: value for key, value in given.items() if key not in CONTEXT}
    if "episilon" in given:
        given = {"epsilon": given.pop("episilon"), **given}
    if unknown := sorted(set(given) - set(KNOBS)):
        raise ValueError(f"rllm.algorithm.estimator_kwargs: no keyword {', '.join(map(repr, unknown))}; known: {', '.join(KNOBS)}")
    knobs = {**preset, **given}
    if not use_scale:
        if given.get("scale", "none") != "none":
            raise ValueError(
                f"rllm.algorithm.norm_adv_by_std_in_grpo=false asks for no scale, estimator_kwargs.scale for {given['scale']!r}; give one"
            )
        knobs["scale"] = "none"
    groups = Ragged.of(rewards)
    advantages, returns = as_pair(groups, normalise(groups, **knobs))
    if knobs.get("singleton") == "drop":
        advantages[:] = [None if len(of_group) == 1 else of_group for of_group in advantages]
    return advantages, returns


def _preset(name: str, formula: str, source: str, scope: Any = "group", **knobs: Any) -> None:
    def advantages(rewards: Sequence[Any], norm_adv_by_std_in_grpo: bool = True, **kwargs: Any) -> Pair:
        return group_normalised(rewards, knobs, norm_adv_by_std_in_grpo, kwargs)

    advantages.__doc__ = f"{formula}, as in {source}. A preset of `rl_algo.normalise`: {knobs}."
    register_rllm_adv_estimator(name, formula=formula, scope=scope, source=source, kwargs=("episilon", *KNOBS))(advantages)


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
