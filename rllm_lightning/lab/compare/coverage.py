"""Do the intervals hold what they say? Made-up seeds from known distributions, and how often each interval holds the truth.

The functions of `statistics` are measured as they are, on many comparisons at once: `[num, n]` scores of two groups.
`python experiments/compare.py --coverage` prints the table that stands in docs/compare.md. To add a distribution: an entry in
`DISTRIBUTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import special

from rllm_lightning.lab.compare import statistics
from rllm_lightning.lab.compare.statistics import ALPHA, Array, Interval

SIZES = (3, 4, 5, 7, 10)  # seeds a group
NUM_COMPARISONS = 10_000  # a row: a share of .95 has a standard error of .002
NUM_RESAMPLES = 400  # of the bootstrap here: a standard error is then known to 4%
NUM_QUESTIONS = 200  # of the made-up validation
NUM_GROUPS = 4  # of a family of comparisons: 6 pairs
SHARED = 0.5  # correlation of two groups by the seed that they share
LIFT = 1.0  # true difference of two groups, in standard deviations of a group's scores
NUM_TRUTH = 1_000_000  # scores that the truth is read from


@dataclass(frozen=True)
class Distribution:
    """Scores as a function of standard normal numbers, increasing in them, so that groups can share the luck of a seed."""

    name: str
    scores: Callable[[Array, np.random.Generator], Array]


def _pass_rate(z: Array, rng: np.random.Generator) -> Array:
    """pass@1 on a finite set of questions: a run's true rate, and the chance of its answers."""
    return rng.binomial(NUM_QUESTIONS, np.clip(0.8 + 0.03 * z, 0, 1)) / NUM_QUESTIONS


DISTRIBUTIONS = (
    Distribution("normal", lambda z, rng: 0.8 + 0.03 * z),
    Distribution("pass@1 of 200 questions", _pass_rate),
    Distribution("near the ceiling: Beta(40, 2)", lambda z, rng: special.betaincinv(40, 2, special.ndtr(z))),
    Distribution("heavy tails: t with 4 degrees", lambda z, rng: 0.8 + 0.03 * special.stdtrit(4, special.ndtr(z))),
)


@dataclass(frozen=True)
class Coverage:
    """Shares of comparisons: `covered` by interval, how often it holds the truth; `alarms`: how often equal groups are told apart.

    `percentile` is the plain percentile bootstrap of the mean, which is not used, to show why.
    """

    distribution: str
    n: int
    covered: dict[str, float]
    alarms: dict[str, float]


def measure_coverage(distribution: Distribution, n: int, num: int = NUM_COMPARISONS, seed: int = 0) -> Coverage:
    """Measure every interval on `num` comparisons of `n` seeds a group, with a true difference of `LIFT`; false alarms without one."""
    rng = np.random.default_rng(seed)
    a, b, other = _lifted(distribution, (num, n), rng)
    true_a, true_b, true_other = _lifted(distribution, (NUM_TRUTH // n, n), rng)
    difference = float(true_a.mean() - true_b.mean())
    paired, welch = statistics.paired_test(a, b), statistics.welch_test(a, other)
    covered = {
        "mean": _share_holding(statistics.mean_interval(b), float(true_b.mean())),
        "interquartile mean": _share_holding(
            statistics.interquartile_mean_interval(b, NUM_RESAMPLES), float(statistics.interquartile_mean(true_b).mean())
        ),
        "paired difference": _share_holding(paired.mean, difference),
        "difference (Welch)": _share_holding(welch.mean, difference),
        "P(better), paired": _share_holding(paired.improvement, _share_ahead(true_a, true_b)),
        "P(better), independent": _share_holding(welch.improvement, _share_ahead(true_a, true_other)),
        "percentile bootstrap of the mean": _share_holding(_percentile_interval(b, rng), float(true_b.mean())),
    }
    equal = _groups(distribution, NUM_GROUPS, (num, n), rng)
    p = np.stack([statistics.paired_test(x, y).p for k, x in enumerate(equal) for y in equal[k + 1 :]], axis=-1)
    alarms = {
        "one comparison": float(np.mean(p[:, 0] <= ALPHA)),
        f"any of {p.shape[-1]}, after Holm": float(np.mean((statistics.holm(p) <= ALPHA).any(axis=-1))),
    }
    return Coverage(distribution.name, n, covered, alarms)


def _groups(distribution: Distribution, num: int, shape: tuple[int, int], rng: np.random.Generator, lift: float = 0.0) -> list[Array]:
    """`num` groups that share seeds; the first is better by `lift`."""
    luck = rng.standard_normal(shape)
    own = [np.sqrt(SHARED) * luck + np.sqrt(1 - SHARED) * rng.standard_normal(shape) for _ in range(num)]
    return [distribution.scores(z + (lift if k == 0 else 0.0), rng) for k, z in enumerate(own)]


def _lifted(distribution: Distribution, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """A better group, a worse one of the same seeds, and a worse one of seeds of its own."""
    a, b = _groups(distribution, 2, shape, rng, LIFT)
    return a, b, distribution.scores(rng.standard_normal(shape), rng)


def _share_ahead(a: Array, b: Array) -> float:
    return float(np.mean(a > b) + np.mean(a == b) / 2)


def _share_holding(interval: Interval, truth: float) -> float:
    """An interval that cannot be given (no spread) is no miss and no hit: those are left out."""
    given = ~np.isnan(interval.low)
    return float(np.mean(((interval.low <= truth) & (truth <= interval.high))[given]))


def _percentile_interval(x: Array, rng: np.random.Generator) -> Interval:
    drawn = rng.integers(x.shape[-1], size=(NUM_RESAMPLES, x.shape[-1]))
    low, high = np.quantile(x[:, drawn].mean(axis=-1), [ALPHA / 2, 1 - ALPHA / 2], axis=-1)
    return Interval(x.mean(axis=-1), low, high)


def print_coverage(console: Console, num: int = NUM_COMPARISONS) -> None:
    """Measure all distributions and sizes (a minute), and print a table of percentages."""
    rows = [measure_coverage(distribution, n, num) for distribution in DISTRIBUTIONS for n in SIZES]
    table = Table(title=f"% of {num:,} comparisons", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("distribution", "seeds", *rows[0].covered, *(f"false alarms: {name}" for name in rows[0].alarms)):
        table.add_column(name)
    for row in rows:
        table.add_row(row.distribution, str(row.n), *(f"{100 * share:.1f}" for share in (*row.covered.values(), *row.alarms.values())))
    console.print(table)
