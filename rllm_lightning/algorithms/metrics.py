"""Numbers about a batch, and how they are carried: as sums and counts until the very end, never as averages of averages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllm_lightning.algorithms.ragged import Array, Ragged, unit_of
from rllm_lightning.algorithms.rl_algo import std

PERCENTILES = (10, 50, 90)


# ------------------------------------------------------------------------------------------- rewards and advantages


def reward_metrics(role: str, rewards: Sequence[Array]) -> dict[str, float]:
    """`reward/{role}/mean|std|max|min` over all trajectories of a role, std with ddof 0; nothing for no trajectories."""
    return _summary(f"reward/{role}", np.concatenate(rewards) if rewards else np.zeros(0))


def advantage_metrics(role: str, advantages: Array) -> dict[str, float]:
    """`advantage/{role}/mean|std|max|min|fraction_zero` over the numbers that were assigned (one a trajectory, step or token, as
    the estimator gives them); zero is |A| < 1e-8. Nothing for no numbers."""
    metrics = _summary(f"advantage/{role}", advantages)
    if len(advantages):
        metrics[f"advantage/{role}/fraction_zero"] = float(np.mean(np.abs(advantages) < 1e-8))
    return metrics


def difficulty_metrics(role: str, rewards: Sequence[Array]) -> dict[str, float]:
    """How much there is to learn from the groups of a role that hold two trajectories or more.

    Returns:
        `batch/{role}/total`: their number; `informative`: those whose rewards differ; `fractions/effective|too_easy|too_hard`:
        the shares that differ, are all equal at 1 or more, and all equal at 0 or less (equal in between is none of the three);
        `group_reward_mean/p10|p50|p90` and `group_reward_std/p10|p50|p90`: percentiles over groups. Without such groups only
        `total` and `informative`, both 0; nothing for no groups at all.
    """
    if not rewards:
        return {}
    groups = Ragged.of([r for r in rewards if len(r) >= 2])
    mean_G, std_G = groups.mean(groups.flat_N), std(groups, groups.flat_N)
    differs_G = groups.has_spread(groups.flat_N)
    at = f"batch/{role}"
    metrics = {f"{at}/total": float(len(mean_G)), f"{at}/informative": float(differs_G.sum())}
    if len(mean_G):
        metrics[f"{at}/fractions/effective"] = float(differs_G.mean())
        metrics[f"{at}/fractions/too_easy"] = float((~differs_G & (mean_G >= 1)).mean())
        metrics[f"{at}/fractions/too_hard"] = float((~differs_G & (mean_G <= 0)).mean())
        for stat, values_G in (("group_reward_mean", mean_G), ("group_reward_std", std_G)):
            for percentile, value in zip(PERCENTILES, np.percentile(values_G, PERCENTILES), strict=True):
                metrics[f"{at}/{stat}/p{percentile}"] = float(value)
    return metrics


def _summary(at: str, values: Array) -> dict[str, float]:
    if not len(values):
        return {}
    unit = float(unit_of(np.abs(values).max()))  # the sum of large values may leave float64's range
    scaled = values / unit
    stats = {"mean": scaled.mean(), "std": scaled.std(), "max": scaled.max(), "min": scaled.min()}
    return {f"{at}/{name}": float(value) * unit for name, value in stats.items()}
