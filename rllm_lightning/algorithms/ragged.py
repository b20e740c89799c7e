"""Groups of unequal size as one flat array, so that a formula is a few NumPy passes however many groups there are.

    [array of group 0, array of group 1, ...]  --Ragged.of-->  flat_N, sizes_G  --formula-->  x_N  --split-->  [array, ...]

Shapes: `_N` one entry a trajectory, all groups one behind the other; `_G` one entry a group. Statistics take `_N` and give
`_G`; `x_G[ragged.group_N]` brings `_G` back to `_N`. Groups may be empty: their statistics are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray

# A spread (largest minus smallest) up to this share of the largest magnitude is float residue of equal numbers.
NO_SPREAD = 1e-12
_LARGEST = np.finfo(np.float64).max


@dataclass(frozen=True)
class Ragged:
    """`flat_N` float64, `sizes_G` int: group g holds the next `sizes_G[g]` entries of `flat_N`."""

    flat_N: Array
    sizes_G: Array

    @classmethod
    def of(cls, groups: Sequence[Any]) -> Ragged:
        """Lay 1-D groups of numbers one behind the other, in float64.

        Raises:
            ValueError: a group is not 1-D, or a value is None, text, NaN or infinite; the message names group and position.
        """
        sizes_G = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
        if not len(groups):
            return cls(np.zeros(0), sizes_G)
        try:
            flat_N = np.concatenate(groups, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected one 1-D array of numbers a group: {error}") from error
        if flat_N.ndim != 1:
            raise ValueError(f"expected one 1-D array of numbers a group, got arrays of {flat_N.ndim} dimensions")
        ragged = cls(flat_N, sizes_G)
        if not np.isfinite(flat_N).all():
            at = int(np.flatnonzero(~np.isfinite(flat_N))[0])
            group = int(ragged.group_N[at])
            raise ValueError(f"group {group}, position {at - int(ragged.starts_G[group])}: {flat_N[at]} is not a finite number")
        return ragged

    def split(self, values_N: Array) -> list[Array]:
        """One array a group. Numbers beyond float64's range are its largest finite number."""
        values_N = np.clip(values_N, -_LARGEST, _LARGEST)
        ends = np.cumsum(self.sizes_G).tolist()
        return [values_N[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    # ------------------------------------------------------------------------------------------------------- layout

    @cached_property
    def starts_G(self) -> Array:
        return np.cumsum(self.sizes_G) - self.sizes_G

    @cached_property
    def group_N(self) -> Array:
        """The group that each entry belongs to."""
        return np.repeat(np.arange(len(self.sizes_G)), self.sizes_G)

    @cached_property
    def size_N(self) -> Array:
        return self.sizes_G[self.group_N]

    def pooled(self) -> Ragged:
        """All entries as one group."""
        return Ragged(self.flat_N, np.array([len(self.flat_N)]))

    def by_size(self) -> Iterator[Array]:
        """Index arrays `[groups of size n, n]` into N, one for each n that occurs: for what a segmented sum cannot do."""
        for size in np.unique(self.sizes_G[self.sizes_G > 0]):
            yield self.starts_G[self.sizes_G == size][:, None] + np.arange(size)

    # --------------------------------------------------------------------------------------------------- statistics

    def _reduce(self, ufunc: np.ufunc, values_N: Array) -> Array:
        filled = self.sizes_G > 0
        result_G = np.zeros(len(self.sizes_G))
        if filled.any():
            result_G[filled] = ufunc.reduceat(values_N, self.starts_G[filled])
        return result_G

    def sum(self, values_N: Array) -> Array:
        return self._reduce(np.add, values_N)

    def max(self, values_N: Array) -> Array:
        return self._reduce(np.maximum, values_N)

    def min(self, values_N: Array) -> Array:
        return self._reduce(np.minimum, values_N)

    def mean(self, values_N: Array) -> Array:
        return self.sum(values_N) / np.maximum(self.sizes_G, 1)

    def sort(self, values_N: Array) -> Array:
        """Ascending within each group."""
        result_N = np.empty_like(values_N)
        for index in self.by_size():
            result_N[index] = np.sort(values_N[index], axis=1)
        return result_N

    def median(self, values_N: Array) -> Array:
        """The middle value, or the mean of the two middle ones."""
        filled, sorted_N = self.sizes_G > 0, self.sort(values_N)
        starts, sizes = self.starts_G[filled], self.sizes_G[filled]
        result_G = np.zeros(len(self.sizes_G))
        result_G[filled] = (sorted_N[starts + (sizes - 1) // 2] + sorted_N[starts + sizes // 2]) / 2
        return result_G

    def has_spread(self, values_N: Array) -> Array:
        """Whether a group's values differ by more than float residue (False for one member)."""
        highest_G, lowest_G = self.max(values_N), self.min(values_N)
        return highest_G - lowest_G > NO_SPREAD * np.maximum(np.abs(highest_G), np.abs(lowest_G))


def unit_of(magnitude: Array) -> Array:
    """The power of two next above `magnitude` (within 2^±1000): dividing by it is exact, and keeps squares and sums of
    values of that magnitude inside float64's range."""
    _, exponent = np.frexp(magnitude)
    return np.ldexp(1.0, np.where(magnitude > 0, np.clip(exponent, -1000, 1000), 0))
