"""What a comparison holds, before it is printed, drawn or written: plain records, every number of them a float or NaN."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rllm_lightning.lab.compare.groups import Group
from rllm_lightning.lab.compare.measures import Metric, Reach
from rllm_lightning.lab.compare.runs import Run
from rllm_lightning.lab.compare.statistics import Interval


@dataclass(frozen=True)
class Summary:
    """One measure over the seeds of a group: every value by seed, the mean and the interquartile mean. NaN: cannot be said."""

    values: dict[int, float]
    mean: Interval
    interquartile_mean: Interval


@dataclass(frozen=True)
class GroupResult:
    """A group and its summaries by measure (`final`, `best`, `auc`), and by seed what the threshold cost."""

    group: Group
    summaries: dict[str, Summary]
    reaches: dict[int, Reach]

    @property
    def label(self) -> str:
        return self.group.label

    def median_reach(self) -> Reach:
        """Medians over the seeds; infinite where half of them never reached it."""
        costs = [(r.step, r.samples, r.seconds) for r in self.reaches.values()]
        return Reach(*map(_median, zip(*costs, strict=True))) if costs else Reach(math.nan, math.nan, math.nan)


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    if any(map(math.isnan, values)):
        return math.nan
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class PairResult:
    """Two groups, a being the one with the better mean.

    `seeds`: those they are paired by; empty where they are compared as independent groups. `wins` of `chances`: how often a was ahead (a
    tie is half), seed by seed or run by run. `p_equal`: that they differ by at least
    the difference of interest, Holm's, too. `needed`: seeds a group to see the difference of interest; None where that cannot be said.
    """

    a: str
    b: str
    seeds: list[int]
    num_seeds: tuple[int, int]
    difference: Interval
    p: float
    p_holm: float
    p_equal: float
    improvement: Interval
    wins: float
    chances: int
    needed: int | None


@dataclass(frozen=True)
class Comparison:
    """Groups from the best mean to the worst, pairs of them in that order, what to beware of, and what may be concluded."""

    by: list[str]
    metric: Metric
    measure: str
    threshold: float
    difference: float
    groups: list[GroupResult]
    pairs: list[PairResult]
    caveats: list[str]
    conclusions: list[str]

    @property
    def metric_name(self) -> str:
        """The column that is compared, where it is one in all runs; else the name with its `*`."""
        columns = {key for run in self.runs for key in self.metric.keys(run)}
        return columns.pop() if len(columns) == 1 else self.metric.name

    @property
    def runs(self) -> list[Run]:
        return [run for result in self.groups for run in result.group.runs]

    @property
    def common_folder(self) -> Path:
        """The deepest folder that holds all of the run folders."""
        return Path(os.path.commonpath([run.path.parent for run in self.runs]))

    def group(self, label: str) -> GroupResult:
        return next(result for result in self.groups if result.label == label)

    def pair(self, a: str, b: str) -> PairResult:
        """The pair of two groups, in whichever order."""
        return next(pair for pair in self.pairs if {pair.a, pair.b} == {a, b})
