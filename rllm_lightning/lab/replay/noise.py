"""Signal and noise of gradients, from the inner products of prompts' gradients. Arrays in, numbers out.

G_u^e is what prompt u alone would have estimator e's gradient be; the batch's gradient is their mean, g = Σ_u G_u / N. With

    T = (Σ_u G_u^e) · (Σ_u G_u^f)      and      C = Σ_u G_u^e · G_u^f

everything follows (`signal_and_noise`). (T - C) / N(N-1), the mean of G_u · G_v over u ≠ v, is the mean over all ways to cut the
prompts into two halves of g_half1 · g_half2: it holds no prompt's noise twice, and so is |E g|² without bias where prompts are
independent. Standard errors are those of the jackknife: each prompt is left out once, with the other prompts' advantages as they are.

Shapes: E estimators, N prompts, K entries of a gradient (or of its sketch); `...` any leading axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class SignalAndNoise:
    """[..., E] each, but for the cosines [..., E, E]. NaN where not defined.

    norm: |g|, of the gradient that is trained on, noise and all.
    variance: trace of the covariance of G_u, the noise of one prompt (ddof 1).
    signal: |E g|² without the noise; may come out below 0 where there is little of it.
    signal_to_noise: |E g| over the noise of the batch, √(signal / (variance / N)); 0 where `signal` is not above 0.
    noise_scale: variance / signal, the number of prompts at which noise and signal are equal (McCandlish et al. 2018, arXiv:1812.06162,
        B_simple); infinite where `signal` is not above 0.
    cosine: of the trained gradients of two estimators, which see the same rollouts and share their luck.
    signal_cosine: of E g of two estimators, their shared noise taken out; NaN where a signal is not above 0.
    """

    norm: Array
    variance: Array
    signal: Array
    signal_to_noise: Array
    noise_scale: Array
    cosine: Array
    signal_cosine: Array


def signal_and_noise(totals: Array, own: Array, num_prompts: int) -> SignalAndNoise:
    """From T (`totals`) and C (`own`), [..., E, E] each. With one prompt only norms and cosines are defined."""
    n = num_prompts
    with np.errstate(all="ignore"):
        products = (totals - own) / (n * (n - 1)) if n > 1 else np.full_like(totals, math.nan)
        signal, size = _diagonal(products), _diagonal(totals)
        variance = (_diagonal(own) - size / n) / (n - 1) if n > 1 else np.full_like(size, math.nan)
        variance = np.maximum(variance, 0.0)
        above = np.maximum(signal, 0.0)
        return SignalAndNoise(
            norm=np.sqrt(size) / n,
            variance=variance,
            signal=signal,
            signal_to_noise=np.sqrt(above / (variance / n)),
            noise_scale=np.where(above > 0, variance / above, np.where(np.isnan(signal) | (variance == 0), math.nan, math.inf)),
            cosine=_cosines(totals, size),
            signal_cosine=_cosines(products, np.where(above > 0, above, math.nan)),
        )


def with_errors(totals: Array, own_squares: Array, gradients: Array) -> tuple[SignalAndNoise, SignalAndNoise]:
    """The numbers, and their standard errors (NaN below 3 prompts, or where a number is not defined with some prompt left out).

    Args:
        totals: T, [E, E].
        own_squares: |G_u^e|², [E, N].
        gradients: G_u^e, [E, N, K], or sketches of them; all other inner products are taken of these.
    """
    num = gradients.shape[1]
    sizes, total_sizes = np.sqrt(own_squares), np.sqrt(_diagonal(totals))
    own = _products(gradients, gradients, sizes, sizes[:, None])
    found = signal_and_noise(totals, own.sum(axis=0), num)
    if num < 3:
        return found, SignalAndNoise(**{f.name: np.full_like(getattr(found, f.name), math.nan) for f in fields(found)})
    with_total = _products(gradients, gradients.sum(axis=1, keepdims=True), sizes, total_sizes[:, None, None])
    without = totals - with_total - with_total.transpose(0, 2, 1) + own
    parts = signal_and_noise(without, own.sum(axis=0) - own, num - 1)
    errors = {f.name: _jackknife(getattr(parts, f.name)) for f in fields(parts)}
    return found, SignalAndNoise(**errors)


def _products(a: Array, b: Array, sizes_a: Array, sizes_b: Array) -> Array:
    """a_n^e · b_n^f as [N, E, E]: the cosines of the (sketched) vectors, times the sizes that are known exactly. So they are exact where
    vectors are parallel, however they were sketched."""
    unit_a, unit_b = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.finfo(float).tiny) for x in (a, b))
    cosines = np.stack([[np.einsum("nk,nk->n", x, np.broadcast_to(y, x.shape)) for y in unit_b] for x in unit_a])
    return np.moveaxis(cosines * sizes_a[:, None] * sizes_b.reshape(1, len(b), -1), -1, 0)


def _jackknife(values: Array) -> Array:
    """Standard error of a number from its values [N, ...] with each prompt left out."""
    num = len(values)
    with np.errstate(all="ignore"):
        error = np.sqrt((num - 1) / num * ((values - values.mean(axis=0)) ** 2).sum(axis=0))
    return np.where(np.isfinite(values).all(axis=0), error, math.nan)


def _diagonal(matrix: Array) -> Array:
    return np.diagonal(matrix, axis1=-2, axis2=-1)


def _cosines(products: Array, squares: Array) -> Array:
    sizes = np.sqrt(np.where(squares > 0, squares, math.nan))
    cosines = products / sizes[..., :, None] / sizes[..., None, :]
    index = np.arange(cosines.shape[-1])
    cosines[..., index, index] = np.where(np.isnan(sizes), math.nan, 1.0)
    return cosines
