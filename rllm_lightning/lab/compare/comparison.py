"""From folders to a `Comparison`: everything that is said about some runs.

    folders -> find_runs, read_run -> Run -> make_groups -> Group -> summaries (GroupResult) ----\\
                                                       \\-> two by two (PairResult), Holm -----> Comparison -> caveats, conclusions
                                                                                                        -> text, page, data, W&B

`compare_runs(folders, by)` does all of it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllm_lightning.lab.compare import statistics
from rllm_lightning.lab.compare.caveats import caveats_of
from rllm_lightning.lab.compare.conclusions import conclusions_of
from rllm_lightning.lab.compare.groups import Group, make_groups, shared_seeds
from rllm_lightning.lab.compare.measures import DEFAULT_METRIC, MEASURES, Metric, check_metric
from rllm_lightning.lab.compare.results import Comparison, GroupResult, PairResult, Summary
from rllm_lightning.lab.compare.runs import find_runs, read_run
from rllm_lightning.lab.compare.statistics import Array, Interval

DEFAULT_DIFFERENCE = 0.03  # of the metric: what would be worth knowing


def compare_runs(
    folders: Sequence[str | os.PathLike[str]],
    by: Sequence[str],
    *,
    metric: str = DEFAULT_METRIC,
    measure: str = "final",
    smaller_is_better: bool = False,
    threshold: float | None = None,
    difference: float = DEFAULT_DIFFERENCE,
    done_only: bool = False,
) -> Comparison:
    """Compare the runs at and below `folders`.

    Args:
        folders: run folders, or folders below which some lie.
        by: config keys; runs that agree in all of them are a group.
        metric: a column of `metrics.csv`; a `*` stands for the source of the validation tasks, over which the mean is taken.
        measure: what of a run is compared: `final`, `best` or `auc`.
        smaller_is_better: of the metric.
        threshold: of the metric, whose cost is told; by default half-way from where runs began to where the best group ended.
        difference: in the metric's unit, above 0: the smallest that would matter. For it the number of seeds is told.
        done_only: leave out runs that failed, were stopped, or are not at their end.

    Raises:
        ValueError: a folder, key, metric or measure is not there, or a file of a run is not what it should be.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure: expected one of {', '.join(MEASURES)}, got {measure!r}")
    if not by:
        raise ValueError("by: name at least one config key, such as rllm.algorithm.adv_estimator")
    if not (difference > 0 and math.isfinite(difference)):
        raise ValueError(f"difference: must be above 0, got {difference}")
    found = [read_run(path) for path in find_runs(folders)]
    runs = [run for run in found if run.status == "done"] if done_only else found
    if not runs:
        raise ValueError(f"none of the {len(found)} runs is done; leave --done-only out to see them")
    chosen = Metric(metric, -1 if smaller_is_better else 1)
    check_metric(chosen, runs)
    groups = make_groups(runs, list(dict.fromkeys(by)), chosen)
    level = default_threshold(groups, chosen) if threshold is None else threshold
    results = sorted((_summarize(group, level) for group in groups), key=lambda result: _rank(result, measure, chosen.sign))
    pairs = _pairs(results, measure, chosen.sign, difference)
    bare = Comparison(list(dict.fromkeys(by)), chosen, measure, level, difference, results, pairs, [], [])
    told = replace(bare, caveats=caveats_of(bare, num_left_out=len(found) - len(runs)))
    return replace(told, conclusions=conclusions_of(told))


def default_threshold(groups: Sequence[Group], metric: Metric) -> float:
    """Half-way from the mean first value of all runs to the best group's mean last one; NaN where there are none."""
    first = [curve.values[0] for group in groups for member in group.members if (curve := member.curve).values.size]
    first = [value for value in first if math.isfinite(value)]
    last = [math.fsum(values) / len(values) for group in groups if (values := group.values("final").values())]
    if not first or not last:
        return math.nan
    return (math.fsum(first) / len(first) + metric.sign * max(metric.sign * value for value in last)) / 2


def _summarize(group: Group, threshold: float) -> GroupResult:
    return GroupResult(group, {name: summarize(group.values(name)) for name in MEASURES}, group.reaches(threshold))


def summarize(values: dict[int, float]) -> Summary:
    """The means of one value a seed, with their intervals; all NaN without a seed."""
    if not values:
        nothing = Interval(math.nan, math.nan, math.nan)
        return Summary(values, nothing, nothing)
    x = np.array(list(values.values()))
    return Summary(values, _plain(statistics.mean_interval(x)), _plain(statistics.interquartile_mean_interval(x)))


def _rank(result: GroupResult, measure: str, sign: int) -> tuple[float, str]:
    """Best mean first, groups without a value last."""
    mean = result.summaries[measure].mean.value
    return (-sign * mean if math.isfinite(mean) else math.inf, result.label)


def _pairs(results: Sequence[GroupResult], measure: str, sign: int, difference: float) -> list[PairResult]:
    having = [result for result in results if result.summaries[measure].values]
    couples = list(itertools.combinations(having, 2))
    pairs = [_compare(a, b, measure, sign, difference, len(couples)) for a, b in couples]
    differ, equal = (statistics.holm(np.array([getattr(pair, p) for pair in pairs])) for p in ("p", "p_equal"))
    return [replace(pair, p_holm=float(p), p_equal=float(q)) for pair, p, q in zip(pairs, differ, equal, strict=True)]


def _compare(a: GroupResult, b: GroupResult, measure: str, sign: int, difference: float, num_comparisons: int) -> PairResult:
    values_a, values_b = a.summaries[measure].values, b.summaries[measure].values
    seeds = shared_seeds(values_a, values_b)
    if seeds:
        x, y = (np.array([values[seed] for seed in seeds]) for values in (values_a, values_b))
        test, ahead = statistics.paired_test(x, y), sign * (x - y)
        spread = float((x - y).std(ddof=1)) if math.isfinite(test.mean.low) else math.nan
    else:
        x, y = (np.array(list(values.values())) for values in (values_a, values_b))
        test, ahead = statistics.welch_test(x, y), sign * (x[:, None] - y).ravel()
        spread = _pooled_spread(x, y)
    low, high = sorted(_sided(p, sign) for p in test.improvement[1:])
    return PairResult(
        a=a.label,
        b=b.label,
        seeds=seeds,
        num_seeds=(len(values_a), len(values_b)),
        difference=_plain(test.mean),
        p=float(test.p),
        p_holm=math.nan,
        p_equal=float(statistics.equivalence_p(test, difference)),
        improvement=Interval(_sided(test.improvement.value, sign), low, high),
        wins=float((ahead > 0).sum() + (ahead == 0).sum() / 2),
        chances=ahead.size,
        needed=statistics.seeds_needed(spread, difference, bool(seeds), num_comparisons),
    )


def _pooled_spread(x: Array, y: Array) -> float:
    return math.sqrt((x.var(ddof=1) + y.var(ddof=1)) / 2) if min(x.size, y.size) > 1 else math.nan


def _sided(probability: Any, sign: int) -> float:
    """The probability of a larger value as that of a better one."""
    return float(probability if sign > 0 else 1 - probability)


def _plain(interval: Interval) -> Interval:
    return Interval(*map(float, interval))
