"""Numbers about a batch of episodes, of rewards and of advantages; metric keys are documented where they are returned.

Means over parts (micro-batches, ranks) are carried as sums and counts in a `Sums` and divided once, at the very end: a mean of
means would depend on how the parts were cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.needs import as_float
from rllm_lightning.algorithms.ragged import Array, Ragged
from rllm_lightning.types import Episode, TerminationReason

PERCENTILES = (10, 50, 90)
UNKNOWN_SOURCE = "unknown"


class Sums:
    """Sums and counts by name. `add` on each part, `merge` the parts (in any order), then `means`.

    `totals` is plain data, name -> [sum, count], to be gathered from other processes.
    """

    def __init__(self, totals: Mapping[str, Sequence[float]] | None = None):
        self.totals: dict[str, list[float]] = {name: [float(total), float(count)] for name, (total, count) in (totals or {}).items()}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, which is a sum over `count` things."""
        carried = self.totals.setdefault(name, [0.0, 0.0])
        carried[0] += float(total)
        carried[1] += float(count)

    def merge(self, other: Sums) -> Sums:
        for name, (total, count) in other.totals.items():
            self.add(name, total, count)
        return self

    def means(self) -> dict[str, float]:
        """Sum / count; names that nothing was counted for are left out."""
        return {name: total / count for name, (total, count) in self.totals.items() if count}


# ---------------------------------------------------------------------------------------------------------- episodes


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k answers is right, estimated without bias from n answers of which c are right.

    1 - C(n-c, k) / C(n, k): the share of subsets of k answers that hold a right one (Chen et al. 2021, arXiv:2107.03374).

    Returns:
        None for n < k, where there is no such estimate.

    Raises:
        ValueError: not 0 <= c <= n, or k < 1.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass_at_k: need 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}")
    return None if n < k else (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def data_source(episode: Episode) -> str:
    """Where the task of an episode comes from, `task["data_source"]`; "unknown" where it does not say."""
    source = episode.task.get("data_source") if isinstance(episode.task, Mapping) else None
    return UNKNOWN_SOURCE if source is None else str(source)


def solve_counts(episodes: Iterable[Episode]) -> dict[str, tuple[int, int]]:
    """Task id -> (number of its episodes, number of correct ones). Episodes that failed in whatever way count, as not correct."""
    counts: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        num_episodes, num_correct = counts.get(episode.task_id, (0, 0))
        counts[episode.task_id] = (num_episodes + 1, num_correct + bool(episode.is_correct))
    return counts


def validation_metrics(episodes: Iterable[Episode], n_val: int) -> dict[str, float]:
    """What a validation found, for each source of tasks.

    Args:
        episodes: of all tasks and ranks. Those that crashed, timed out or grew too long belong to it: they are wrong answers.
        n_val: rollouts of a task.

    Returns:
        `val/{data_source}/pass@k` for k = 1, 2, 4, ... and `n_val`: the mean over tasks of the unbiased estimate, over those tasks
        that have k episodes (no task has: the key is left out). `val/{data_source}/{name}` for each metric of the workflow.
    """
    by_source: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_source[data_source(episode)].append(episode)
    ks = sorted({n_val} | {2**power for power in range(n_val.bit_length())})
    sums = Sums()
    for source, members in by_source.items():
        for num_episodes, num_correct in solve_counts(members).values():
            for k in ks:
                if (estimate := pass_at_k(num_episodes, num_correct, k)) is not None:
                    sums.add(f"val/{source}/pass@{k}", estimate)
    means = sums.means()
    for source, members in by_source.items():
        means |= workflow_metrics(members, f"val/{source}").means()
    return means


def workflow_metrics(episodes: Iterable[Episode], prefix: str = "batch") -> Sums:
    """`{prefix}/{name}` for each number in `Episode.metrics`: its mean over the episodes that report it.

    An accuracy (`..._acc`) that an episode lacks because it did not come to its end is 0, so that failures do not raise it.
    """
    episodes = list(episodes)
    numbers = [{name: value for name, value in episode.metrics.items() if _is_number(value)} for episode in episodes]
    accuracies = {name for metrics in numbers for name in metrics if name.endswith("_acc")}
    sums = Sums()
    for episode, metrics in zip(episodes, numbers, strict=True):
        failed = episode.termination_reason not in (None, TerminationReason.ENV_DONE)
        for name, value in (dict.fromkeys(sorted(accuracies), 0.0) | metrics if failed else metrics).items():
            sums.add(f"{prefix}/{name}", as_float(value))
    return sums


def termination_metrics(episodes: Iterable[Episode], prefix: str = "batch") -> Sums:
    """`{prefix}/termination_reason/{reason}` for every reason there is: the share of episodes (none given: unknown)."""
    sums = Sums()
    for episode in episodes:
        for reason in TerminationReason:
            is_it = (episode.termination_reason or TerminationReason.UNKNOWN) == reason
            sums.add(f"{prefix}/termination_reason/{reason.value}", is_it)
    return sums


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.bool_ | np.number)


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
    groups, unit_G = Ragged.of([r for r in rewards if len(r) >= 2]).in_units(common=True)
    mean_G, std_G, differs_G = groups.mean_G, groups.std_G(), groups.differs_G
    at = f"batch/{role}"
    metrics = {f"{at}/total": float(len(mean_G)), f"{at}/informative": float(differs_G.sum())}
    if len(mean_G):
        metrics[f"{at}/fractions/effective"] = float(differs_G.mean())
        unit = unit_G[0]
        metrics[f"{at}/fractions/too_easy"] = float((~differs_G & (mean_G * unit >= 1)).mean())
        metrics[f"{at}/fractions/too_hard"] = float((~differs_G & (mean_G <= 0)).mean())
        for stat, values_G in (("group_reward_mean", mean_G), ("group_reward_std", std_G)):
            for percentile, value in zip(PERCENTILES, np.percentile(values_G, PERCENTILES), strict=True):
                metrics[f"{at}/{stat}/p{percentile}"] = float(value * unit)
    return metrics


def _summary(at: str, values: Array) -> dict[str, float]:
    if not len(values):
        return {}
    x, (unit,) = Ragged.of([values]).in_units()
    stats = {"mean": x.mean_G, "std": x.std_G(), "max": x.max_G, "min": x.min_G}
    return {f"{at}/{name}": float(value[0] * unit) for name, value in stats.items()}


def validation_score(metrics: dict[str, float]) -> float:
    """The mean over the data sources of `val/*/pass@1`; what `best.ckpt` is the best in."""
    scores = [value for key, value in metrics.items() if key.startswith("val/") and key.endswith("/pass@1")]
    return sum(scores) / len(scores) if scores else -math.inf


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What was sampled: `rollout/num_response_tokens` (all), `rollout/num_model_calls`, and over the model calls
    `rollout/response_length/mean|max|p10|p50|p90` (tokens) and `rollout/prompt_length/mean|max`."""
    steps = [step for episode in episodes for trajectory in episode.trajectories for step in trajectory.steps]
    lengths = {"response_length": [len(step.response_ids) for step in steps], "prompt_length": [len(step.prompt_ids) for step in steps]}
    metrics = {"rollout/num_response_tokens": float(sum(lengths["response_length"])), "rollout/num_model_calls": float(len(steps))}
    for name, values in lengths.items():
        if values:
            metrics |= {f"rollout/{name}/mean": sum(values) / len(values), f"rollout/{name}/max": float(max(values))}
    if steps:
        for percentile, value in zip(PERCENTILES, np.percentile(lengths["response_length"], PERCENTILES), strict=True):
            metrics[f"rollout/response_length/p{percentile}"] = float(value)
    return metrics
