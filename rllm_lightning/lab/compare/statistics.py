"""What a few seeds say: intervals for means, interquartile means and differences, that cover even where there are three.

Pure functions on arrays. The last axis of every array is the seed, `[..., n]`; leading axes are independent data sets, so that
`coverage` can measure these very functions on a thousand of them at once. Every interval is two-sided, at `LEVEL`.

The plain percentile bootstrap is not used: it never leaves the range of the data, and so covers symmetric scores at most 1 - 2^(1-n) of
the time (75% at 3 seeds). What is used instead:

mean, difference    Student's t, Welch's where seeds are not shared (scipy.stats.ttest_1samp, ttest_ind)
interquartile mean  estimate ± c_n · SE: SE by the bootstrap (scipy.stats.bootstrap, each group resampled on its own), c_n so that the
                    interval covers exactly `LEVEL` of the time for normal scores; for n = 3, where it is the mean, nearly t
P(improvement)      the noncentral t distribution of the test statistic, inverted

What cannot be estimated is NaN: every interval of one seed, and of equal values in all seeds, where nothing tells how far they may err.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

LEVEL = 0.95  # of every interval
ALPHA = 1 - LEVEL  # of every test
POWER = 0.8  # the chance to see a true difference that `seeds_needed` asks for
NUM_RESAMPLES = 9_999
MAX_SEEDS = 1_000  # beyond it `seeds_needed` gives up
NUM_CALIBRATION = 200_000  # normal samples from which c_n is read
ROUNDING = 1e-12  # a spread below this share of the largest magnitude is float residue


class Interval(NamedTuple):
    """An estimate with its interval; each a number or an array of leading shape."""

    value: Any
    low: Any
    high: Any


class Difference(NamedTuple):
    """Of means, with its interval; the two-sided p value that it is 0; P(improvement) with its interval; its standard error and their
    degrees of freedom."""

    mean: Interval
    p: Any
    improvement: Interval
    error: Any
    df: Any


def is_constant(x: Array) -> Any:
    """Whether all seeds have one value, up to rounding. Shape [...]."""
    return np.ptp(x, axis=-1) <= ROUNDING * np.abs(x).max(axis=-1)


# ----------------------------------------------------------------------------------------------------------------- one group


def mean_interval(x: Array) -> Interval:
    """Student's interval of the mean: exact for normal scores at any n. NaN bounds where n < 2 or all values are equal."""
    n = x.shape[-1]
    mean = x.mean(axis=-1)
    if n < 2:
        return Interval(mean, mean * np.nan, mean * np.nan)
    half = np.where(is_constant(x), np.nan, stats.t.ppf(1 - ALPHA / 2, n - 1) * x.std(axis=-1, ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def interquartile_mean(x: Array, axis: int = -1) -> Any:
    """The mean without the lowest and the highest floor(n/4) values; for n < 4 the mean.

    As in Agarwal et al. 2021 (arXiv:2108.13264), whose scores are those of all seeds and tasks; here a run is one score.
    """
    return stats.trim_mean(x, 0.25, axis=axis)


def interquartile_mean_interval(x: Array, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
    """The interquartile mean ± c_n bootstrap standard errors. NaN bounds where n < 2 or all values are equal.

    Args:
        x: scores [..., n].
        num_resamples: of the bootstrap: n seeds are drawn with replacement from the n.
        seed: of the resampling, so that a page is the same when it is made again.
    """
    n = x.shape[-1]
    estimate = interquartile_mean(x)
    if n < 2:
        return Interval(estimate, estimate * np.nan, estimate * np.nan)
    batch = max(1, 20_000_000 // (x.size * 8))  # resamples at once: 160 MB of numbers
    found = stats.bootstrap(
        (x,), interquartile_mean, n_resamples=num_resamples, batch=batch, axis=-1, method="percentile", rng=np.random.default_rng(seed)
    )
    half = np.where(is_constant(x), np.nan, critical_ratio(n) * found.standard_error)
    return Interval(estimate, estimate - half, estimate + half)


@functools.cache
def critical_ratio(n: int) -> float:
    """c_n: |interquartile mean| / its bootstrap standard error stays below it `LEVEL` of the time, for n normal scores of mean 0.

    Read from `NUM_CALIBRATION` samples. A resample's interquartile mean is linear in the sorted scores, with weights that do not depend
    on them, so its variance is a quadratic form whose matrix is drawn once. Above 50 seeds Student's t is as good.
    """
    if n > 50:
        return float(stats.t.ppf(1 - ALPHA / 2, n - 1))
    rng = np.random.default_rng(n)
    places = np.sort(rng.integers(n, size=(NUM_CALIBRATION, n)), axis=-1)[:, n // 4 : n - n // 4]  # in the sorted scores, of those kept
    weights = np.stack([(places == place).mean(axis=-1) for place in range(n)])
    scores = np.sort(rng.standard_normal((NUM_CALIBRATION, n)), axis=-1)
    variance = np.einsum("si,ij,sj->s", scores, np.cov(weights), scores, optimize=True)
    return float(np.quantile(np.abs(interquartile_mean(scores)) / np.sqrt(variance), LEVEL))


# ----------------------------------------------------------------------------------------------------------------- two groups


def paired_test(a: Array, b: Array) -> Difference:
    """a - b where both hold the same seeds in the same order, [..., n]: Student's t on the differences of each seed.

    P(improvement): that a is ahead of b in a run with one further seed. The statistic is noncentral t with n - 1 degrees of freedom
    and noncentrality sqrt(n) · mean/sd of the differences, and P = Φ(mean/sd).

    One seed: everything but the difference is NaN. Equal differences in all seeds: there is no spread to judge by; the p value is then
    that of flipping signs, 2^(1-n), or 1 where all differences are 0.
    """
    d, n = a - b, a.shape[-1]
    difference = mean_interval(d)
    if n < 2:
        return _nothing_but(difference.value)
    constant = _constant_difference(d, a, b)
    spread = np.where(constant, np.nan, d.std(axis=-1, ddof=1))
    t = difference.value * math.sqrt(n) / spread
    error = spread / math.sqrt(n)
    half = stats.t.ppf(1 - ALPHA / 2, n - 1) * error
    p = np.where(constant, np.where(_is_zero(difference.value, a, b), 1.0, 2.0 ** (1 - n)), 2 * stats.t.sf(np.abs(t), n - 1))
    interval = Interval(difference.value, difference.value - half, difference.value + half)
    return Difference(interval, p, _improvement(t, n - 1, math.sqrt(n)), error, n - 1)


def welch_test(a: Array, b: Array) -> Difference:
    """a - b of independent groups, [..., n_a] and [..., n_b]: Welch's t.

    P(improvement): that a run of a is ahead of a run of b, Φ(difference of means / sqrt(var_a + var_b)).

    One seed in either: everything but the difference is NaN. Equal values in all seeds of both: the p value is that of dealing the values
    to the groups anew, 2 / C(n_a + n_b, n_a), or 1 where both are equal.
    """
    num_a, num_b = a.shape[-1], b.shape[-1]
    difference = a.mean(axis=-1) - b.mean(axis=-1)
    if min(num_a, num_b) < 2:
        return _nothing_but(difference)
    constant = is_constant(a) & is_constant(b)
    variance_a, variance_b = (np.where(constant, np.nan, x.var(axis=-1, ddof=1)) for x in (a, b))
    error_a, error_b = variance_a / num_a, variance_b / num_b
    error = np.sqrt(error_a + error_b)
    df = (error_a + error_b) ** 2 / (error_a**2 / (num_a - 1) + error_b**2 / (num_b - 1))
    t = difference / error
    half = stats.t.ppf(1 - ALPHA / 2, df) * error
    by_dealing = min(1.0, 2 / math.comb(num_a + num_b, num_a))
    p = np.where(constant, np.where(_is_zero(difference, a, b), 1.0, by_dealing), 2 * stats.t.sf(np.abs(t), df))
    interval = Interval(difference, difference - half, difference + half)
    return Difference(interval, p, _improvement(t, df, np.sqrt(variance_a + variance_b) / error), error, df)


def equivalence_p(difference: Difference, margin: float) -> Any:
    """The p value that the true difference is at least `margin` (> 0) in size: at most `ALPHA` just where the interval is within ±margin.

    Twice the larger one-sided p value (Schuirmann 1987, at half the usual level, so that it agrees with the interval). NaN without spread.
    """
    value = difference.mean.value
    larger = np.maximum(*(stats.t.sf((margin + side) / difference.error, difference.df) for side in (value, -value)))
    return np.minimum(1.0, 2 * larger)


def _constant_difference(d: Array, a: Array, b: Array) -> Any:
    largest = np.maximum(np.abs(a).max(axis=-1), np.abs(b).max(axis=-1))
    return np.ptp(d, axis=-1) <= ROUNDING * largest


def _is_zero(difference: Any, a: Array, b: Array) -> Any:
    return np.abs(difference) <= ROUNDING * np.maximum(np.abs(a).max(axis=-1), np.abs(b).max(axis=-1))


def _nothing_but(difference: Any) -> Difference:
    nan = difference * np.nan
    return Difference(Interval(difference, nan, nan), nan, Interval(nan, nan, nan), nan, nan)


def _improvement(t: Any, df: Any, scale: Any) -> Interval:
    """Φ(noncentrality / scale), for the noncentralities that put t at the median and at the two ends of the distribution."""
    t, scale = np.asarray(t), np.asarray(scale)

    def probability(quantile: float) -> Any:
        noncentrality = np.where(t == 0, -special.ndtri(quantile), special.nctdtrinc(df, quantile, t))  # wrong at t = 0 in scipy 1.17
        return special.ndtr(noncentrality / scale)

    return Interval(probability(0.5), probability(1 - ALPHA / 2), probability(ALPHA / 2))


# ---------------------------------------------------------------------------------------------------------- many comparisons, power


def holm(p: Array) -> Array:
    """p values, [..., m], after Holm's correction (1979): the chance of even one false alarm among all m stays at most `ALPHA`.

    The k-th smallest, counting from 0, is multiplied by m - k; none ends below a smaller one. NaN stays NaN and counts as no comparison.
    """
    order = np.argsort(p, axis=-1)  # NaN last
    num = np.sum(~np.isnan(p), axis=-1, keepdims=True)
    stepped = np.take_along_axis(p, order, -1) * np.maximum(num - np.arange(p.shape[-1]), 1)
    adjusted = np.minimum(np.fmax.accumulate(stepped, axis=-1), 1.0)
    result = np.empty_like(p)
    np.put_along_axis(result, order, adjusted, -1)
    return np.where(np.isnan(p), np.nan, result)


def seeds_needed(spread: float, difference: float, paired: bool, num_comparisons: int = 1) -> int | None:
    """How many seeds a group must have for a test to see a true `difference` with probability `POWER`.

    Args:
        spread: standard deviation, of the differences of each seed (paired), or of one group's scores.
        difference: above 0.
        paired: whether both groups have the same seeds.
        num_comparisons: the level is `ALPHA` over this, the first and strictest step of Holm's correction.

    Returns:
        At least 2; None where `spread` is NaN or 0, or more than `MAX_SEEDS` would be needed.
    """
    if not spread > 0:
        return None
    n = np.arange(2, MAX_SEEDS + 1)
    df = n - 1 if paired else 2 * n - 2
    noncentrality = difference / spread * np.sqrt(n if paired else n / 2)
    bound = stats.t.ppf(1 - ALPHA / num_comparisons / 2, df)
    enough = stats.nct.sf(bound, df, noncentrality) >= POWER
    return int(n[np.argmax(enough)]) if enough.any() else None
