"""What one run came to: the curve of the compared metric, and what of it is compared.

    Run + Metric  ->  curve_of  ->  Curve  ->  final, best, auc (one number a run), reach (what a threshold cost)

A metric may hold a `*`, as in `val/*/pass@1`, for the sources of validation tasks: then it is the mean over them, so that a run with
several sources counts once, as the one sample that it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllm_lightning.lab.compare.runs import Run
from rllm_lightning.tracking.metrics_table import STEP
from rllm_lightning.tracking.summary import is_headline

DEFAULT_METRIC = "val/*/pass@1"
NUM_SAMPLES = "groups/num_trajs_before_filter"  # rollouts of a step, whether or not they were trained on
SECONDS = "time/step"  # of a step, without validation and warm start


@dataclass(frozen=True)
class Metric:
    """Which number is compared; `sign` is 1 where larger is better, -1 where smaller is."""

    name: str = DEFAULT_METRIC
    sign: int = 1

    @property
    def is_share(self) -> bool:
        """Whether its values lie between 0 and 1, as pass@k does."""
        return "/pass@" in self.name

    def keys(self, run: Run) -> list[str]:
        """The columns of a run that it stands for."""
        pattern = re.compile(".+".join(map(re.escape, self.name.split("*"))))
        return sorted({key for row in run.rows for key in row if pattern.fullmatch(key)})


@dataclass(frozen=True)
class Curve:
    """The steps at which a run measured the metric, the values, and what had been spent by then: arrays of one length, maybe empty.

    A value is NaN where the run wrote one, or where one of several sources is missing. `samples` are rollouts and `seconds` those of
    training steps, both from the run's start; NaN where the run did not count them.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    samples: NDArray[np.float64]
    seconds: NDArray[np.float64]
    sign: int

    @property
    def final(self) -> float:
        """The last value; NaN where there is none."""
        return float(self.values[-1]) if self.values.size else math.nan

    @property
    def best(self) -> float:
        """The best finite value. The luckiest of many looks: it is above what the run can be trusted to do."""
        finite = self.values[np.isfinite(self.values)]
        return float(self.sign * (self.sign * finite).max()) if finite.size else math.nan

    @property
    def auc(self) -> float:
        """The area under the curve by trapezoids, over the steps it spans: a mean value over training. One point: its value."""
        if self.values.size < 2:
            return self.final
        return float(np.trapezoid(self.values, self.steps) / (self.steps[-1] - self.steps[0]))


MEASURES: dict[str, Callable[[Curve], float]] = {
    "final": lambda curve: curve.final,
    "best": lambda curve: curve.best,
    "auc": lambda curve: curve.auc,
}


@dataclass(frozen=True)
class Reach:
    """What it took until the metric was first seen at the threshold: seen, as it is only measured now and then."""

    step: float
    samples: float
    seconds: float


NEVER = Reach(math.inf, math.inf, math.inf)


def reach(curve: Curve, threshold: float) -> Reach:
    """Where a curve first is at least as good as `threshold`; `NEVER` where it is not."""
    there = np.flatnonzero(curve.sign * curve.values >= curve.sign * threshold)
    if not there.size:
        return NEVER
    first = there[0]
    return Reach(float(curve.steps[first]), float(curve.samples[first]), float(curve.seconds[first]))


def curve_of(run: Run, metric: Metric) -> Curve:
    """The curve of a run; empty where it has no such metric, and where it broke off before its first step: it says nothing of training."""
    keys = metric.keys(run) if run.status == "done" or run.last_step > 0 else []
    points, samples, seconds = [], 0.0, 0.0
    for row in run.rows:
        samples, seconds = (total + _cost(row, key) for total, key in ((samples, NUM_SAMPLES), (seconds, SECONDS)))
        if any(key in row for key in keys):
            value = math.fsum(row[key] for key in keys) / len(keys) if all(key in row for key in keys) else math.nan
            points.append((row[STEP], value, samples, seconds))
    steps, values, all_samples, all_seconds = np.array(points, float).reshape(-1, 4).T
    return Curve(steps.astype(int), values, all_samples, all_seconds, metric.sign)


def _cost(row: dict[str, float], key: str) -> float:
    """NaN for a training step that did not write it: a sum that lacks a part is none."""
    return 0.0 if row[STEP] == 0 else row.get(key, math.nan)


def check_metric(metric: Metric, runs: Sequence[Run]) -> None:
    """Refuse a metric that no run has.

    Raises:
        ValueError: with the metrics that there are.
    """
    if any(metric.keys(run) for run in runs):
        return
    known = sorted({key for run in runs for row in run.rows for key in row if is_headline(key)})
    raise ValueError(f"{metric.name}: no run has this metric; choose one with --metric: {', '.join(known) or 'the runs have none at all'}")
