"""How alike two estimators weigh the same trajectories, and how many trajectories carry an estimator's update. Arrays in, numbers out.

Shapes: N trajectories of a batch. An entry that is NaN is a trajectory that the estimator dropped; pairs look at what both kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Array = np.ndarray

ZERO = 1e-8  # below it an advantage counts as 0, as in the metric advantage/{role}/fraction_zero
DIGITS = 12  # of the largest advantage: what differs less is float residue of equal numbers


class Agreement(NamedTuple):
    """Of two estimators on one batch. NaN where it is not defined.

    pearson: correlation of the advantages; spearman: of their ranks (ties: mean rank). Both need an advantage that varies.
    cosine: a·b / |a||b|, without centring: 1 only where one is the other times a positive factor.
    factor: a·b / b·b, what b is to be multiplied by to come closest to a.
    flips: share of trajectories that one pushes up and the other down.
    one_sided: share that one pushes and the other leaves alone.
    """

    pearson: float
    spearman: float
    cosine: float
    factor: float
    flips: float
    one_sided: float


def agreement_of(a_N: Array, b_N: Array) -> Agreement:
    """See `Agreement`. Equal arrays of one value: the correlations are not defined, cosine 1. No trajectories: nothing is."""
    both = ~np.isnan(a_N) & ~np.isnan(b_N)
    a_N, b_N = a_N[both], b_N[both]
    if not a_N.size:
        return Agreement(*[math.nan] * 6)
    pushed_a, pushed_b = np.abs(a_N) >= ZERO, np.abs(b_N) >= ZERO
    return Agreement(
        pearson=correlation(a_N, b_N),
        spearman=correlation(ranks(a_N), ranks(b_N)),
        cosine=_cosine(a_N, b_N),
        factor=float(a_N @ b_N / (b_N @ b_N)) if b_N.any() else math.nan,
        flips=float(np.mean(pushed_a & pushed_b & (np.sign(a_N) != np.sign(b_N)))),
        one_sided=float(np.mean(pushed_a != pushed_b)),
    )


def correlation(a_N: Array, b_N: Array) -> float:
    """Pearson's; NaN where one of them does not vary (beyond float residue)."""
    centred = [x - x.mean() for x in (a_N, b_N)]
    if any(np.abs(c).max() <= 10.0**-DIGITS * np.abs(x).max() for c, x in zip(centred, (a_N, b_N), strict=True)):
        return math.nan
    return _cosine(*centred)


def ranks(values_N: Array) -> Array:
    """1 for the smallest; equal values share their mean rank. Equal means to `DIGITS` digits of the largest."""
    largest = np.abs(values_N).max(initial=0.0) or 1.0
    _, inverse, counts = np.unique(np.round(values_N / largest, DIGITS), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def effective_share(advantages_N: Array) -> float:
    """Kish's effective sample size of the weights |A|, (Σ|A|)² / ΣA², as a share of the trajectories: 1 where all weigh the same,
    1/N where one carries everything, 0 where all are 0. Dropped trajectories weigh nothing. NaN without trajectories."""
    if not advantages_N.size:
        return math.nan
    weights_N = np.abs(np.nan_to_num(advantages_N))
    largest = weights_N.max()
    if largest == 0:
        return 0.0
    weights_N = weights_N / largest
    return float(weights_N.sum() ** 2 / (weights_N @ weights_N) / len(weights_N))


def zero_share(advantages_N: Array) -> float:
    """Share of the kept trajectories whose advantage is 0 (below `ZERO`); NaN where none was kept."""
    kept = advantages_N[~np.isnan(advantages_N)]
    return float(np.mean(np.abs(kept) < ZERO)) if kept.size else math.nan


def size(advantages_N: Array) -> float:
    """Root mean square of the kept advantages; NaN where none was kept."""
    kept = advantages_N[~np.isnan(advantages_N)]
    return float(np.sqrt(np.mean(kept**2))) if kept.size else math.nan


def _cosine(a_N: Array, b_N: Array) -> float:
    # in units of the largest, so that squares stay inside float64's range
    a_N, b_N = (x / (np.abs(x).max(initial=0.0) or 1.0) for x in (a_N, b_N))
    norms = float(np.linalg.norm(a_N)) * float(np.linalg.norm(b_N))
    return float(np.clip(a_N @ b_N / norms, -1.0, 1.0)) if norms > 0 else math.nan
