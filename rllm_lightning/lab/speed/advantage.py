"""Advantages of many trajectories: the catalogue's vectorised estimators beside the NumPy loop over groups that one would write.

The loops are those formulas in which a group's advantages follow from its own rewards (and lengths); a test compares them
with the estimators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import Estimator
from rllm_lightning.lab.speed.report import SECONDS, Column, Report, seconds_of
from rllm_lightning.lab.speed.timing import Variant, take_turns
from rllm_lightning.registry import ESTIMATORS

Array = np.ndarray
SUPPLIED = {"lengths", "state"}  # what these trajectories bring beside their reward

# rewards [n] and lengths [n] of one group -> advantages [n]
LOOPS: dict[str, Callable[[Array, Array], Array]] = {
    "grpo": lambda r, lengths: (r - r.mean()) / (r.std() + 1e-6),
    "grpo_verl": lambda r, lengths: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "grpo_trl": lambda r, lengths: (r - r.mean()) / (r.std(ddof=1) + 1e-4),
    "dr_grpo": lambda r, lengths: r - r.mean(),
    "rloo": lambda r, lengths: r - (r.sum() - r) / (len(r) - 1),
    "maxrl": lambda r, lengths: (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r),
    "opo": lambda r, lengths: r - (lengths * r).sum() / lengths.sum(),
}
COLUMNS = (
    Column("variant", "estimator"),
    *SECONDS,
    Column("rate", "million trajectories/s", ".1f"),
    Column("loop_s", "loop, median s", ".3g"),
    Column("ratio", "times the loop", ".1f"),
)


def measure(num_trajectories: int = 1_000_000, group_size: int = 8, repeats: int = 5) -> list[Report]:
    """Every estimator that needs one reward a trajectory (and at most its length)."""
    rewards, lengths = batch(num_trajectories, group_size)
    rows = []
    for name, entry in measurable():
        variants = [Variant(name, partial(_vectorised, entry, rewards, lengths))]
        if name in LOOPS:
            variants.append(Variant("loop", partial(_loop, LOOPS[name], rewards, lengths)))
        timings = take_turns(variants, repeats)
        row = {"variant": name, **seconds_of(timings[name]), "rate": timings[name].rate / 1e6}
        if "loop" in timings:
            row |= {"loop_s": timings["loop"].median_s, "ratio": timings["loop"].median_s / timings[name].median_s}
        rows.append(row)
    counts = {"trajectories": num_trajectories, "groups of": group_size, "repeats": repeats, "arrays": "float64, NumPy, one thread"}
    note = "The loop calls NumPy once for each group. Both take a list of arrays, one a group, and return such a list."
    return [Report("Advantages: vectorised estimators and a loop over groups", counts, COLUMNS, rows, [note])]


def measurable() -> Iterator[tuple[str, Estimator]]:
    """The catalogue's estimators that can run on these trajectories."""
    for name, entry in ESTIMATORS.items():
        if entry.per == "trajectory" and set(entry.needs) <= SUPPLIED and not entry.required:
            yield name, entry


def batch(num_trajectories: int, group_size: int) -> tuple[list[Array], list[Array]]:
    """Rewards (0 or 1; about one half) and lengths, one array a group."""
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (num_trajectories // group_size, group_size)).astype(np.float64)
    return list(rewards), list(rng.integers(1, 1000, rewards.shape))


def advantages_of(entry: Estimator, rewards: list[Array], lengths: list[Array]) -> Any:
    """What an estimator makes of the batch."""
    offered: dict[str, Any] = {"lengths": lengths, "state": {}}
    return entry(rewards, **{need: offered[need] for need in entry.needs})[0]


def looped(loop: Callable[[Array, Array], Array], rewards: list[Array], lengths: list[Array]) -> list[Array]:
    """What a loop makes of it."""
    return [loop(r, length) for r, length in zip(rewards, lengths, strict=True)]


def _vectorised(entry: Estimator, rewards: list[Array], lengths: list[Array], number: int) -> float:
    advantages_of(entry, rewards, lengths)
    return float(sum(map(len, rewards)))


def _loop(loop: Callable[[Array, Array], Array], rewards: list[Array], lengths: list[Array], number: int) -> float:
    looped(loop, rewards, lengths)
    return float(sum(map(len, rewards)))
