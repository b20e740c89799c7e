"""Groups of unequal size as one flat array, so that a formula is a few NumPy passes however many groups there are.

    [array of group 0, array of group 1, ...]  --Ragged.of-->  flat_N, sizes_G  --formula-->  x_N  --split-->  [array, ...]

Shapes: `_N` one entry a trajectory, all groups one behind the other; `_G` one entry a group; `ragged.expand(x_G)` brings `_G` to
`_N`. Groups may be empty: their statistics are 0. To take statistics of other values in the same groups: `ragged.like(values_N)`.
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
# Between these magnitudes squares and sums stay inside float64's range.
_MODERATE = (1e-100, 1e100)
_LARGEST = np.finfo(np.float64).max
_SMALLEST = 5e-324


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
            at = int(np.argmin(np.isfinite(flat_N)))
            raise ValueError(f"{ragged.place(at)}: {flat_N[at]} is not a finite number")
        return ragged

    def like(self, values_N: Array) -> Ragged:
        """Other values in the same groups."""
        return Ragged(values_N, self.sizes_G)

    def pooled(self) -> Ragged:
        """All values as one group."""
        return Ragged(self.flat_N, np.array([len(self.flat_N)]))

    def split(self, values_N: Array) -> list[Array]:
        """Values in these groups, one array a group."""
        return nest(values_N, self.sizes_G)

    def in_units(self, common: bool = False) -> tuple[Ragged, Array]:
        """The values in units that keep their squares and sums inside float64's range.

        Args:
            common: one unit for all groups instead of one for each.

        Returns:
            The values divided by the unit of their group, and the units [G]: 1 for moderate magnitudes, else the power of two next
            above the largest, by which dividing is exact.
        """
        magnitude_G = np.full(len(self.sizes_G), self.magnitude_G.max(initial=0.0)) if common else self.magnitude_G
        extreme_G = (magnitude_G > 0) & ((magnitude_G < _MODERATE[0]) | (magnitude_G > _MODERATE[1]))
        if not extreme_G.any():
            return self, np.ones(len(self.sizes_G))
        exponent_G = np.clip(np.frexp(magnitude_G)[1], -1000, 1000)
        unit_G = np.ldexp(1.0, np.where(extreme_G, exponent_G, 0))
        return self.like(self.flat_N / self.expand(unit_G)), unit_G

    # ------------------------------------------------------------------------------------------------------- layout

    @cached_property
    def starts_G(self) -> Array:
        return np.cumsum(self.sizes_G) - self.sizes_G

    def expand(self, values_G: Array) -> Array:
        """For each entry the value of its group, in a fresh array."""
        return np.repeat(values_G, self.sizes_G)

    def place(self, at: int) -> str:
        """Where an entry stands, in words."""
        group = int(np.searchsorted(np.cumsum(self.sizes_G), at, side="right"))
        return f"group {group}, position {at - int(self.starts_G[group])}"

    def by_size(self) -> Iterator[Array]:
        """Index arrays `[groups of size n, n]` into N, one for each n that occurs: for what a segmented sum cannot do."""
        for size in np.unique(self.sizes_G[self.sizes_G > 0]):
            yield self.starts_G[self.sizes_G == size][:, None] + np.arange(size)

    # --------------------------------------------------------------------------------------------------- statistics

    @cached_property
    def sum_G(self) -> Array:
        return self._reduce(np.add)

    @cached_property
    def max_G(self) -> Array:
        return self._reduce(np.maximum)

    @cached_property
    def min_G(self) -> Array:
        return self._reduce(np.minimum)

    @cached_property
    def mean_G(self) -> Array:
        return self.sum_G / np.maximum(self.sizes_G, 1)

    @cached_property
    def magnitude_G(self) -> Array:
        return np.maximum(np.abs(self.max_G), np.abs(self.min_G))

    @cached_property
    def differs_G(self) -> Array:
        """Whether the values differ by more than float residue (False for one member)."""
        with np.errstate(over="ignore"):
            return self.max_G - self.min_G > NO_SPREAD * self.magnitude_G

    @cached_property
    def median_G(self) -> Array:
        """The middle value, or the mean of the two middle ones."""
        sorted_N = np.empty_like(self.flat_N)
        for index in self.by_size():
            sorted_N[index] = np.sort(self.flat_N[index], axis=1)
        filled = self.sizes_G > 0
        starts, sizes = self.starts_G[filled], self.sizes_G[filled]
        result_G = np.zeros(len(self.sizes_G))
        result_G[filled] = (sorted_N[starts + (sizes - 1) // 2] + sorted_N[starts + sizes // 2]) / 2
        return result_G

    @cached_property
    def centred_N(self) -> Array:
        mean_N = self.expand(self.mean_G)
        return np.subtract(self.flat_N, mean_N, out=mean_N)  # in place: a fresh large array costs more than the subtraction

    def std_G(self, ddof: int = 0) -> Array:
        """Standard deviations; exactly 0 for a group that does not differ."""
        squares = self.like(self.centred_N**2)
        return np.where(self.differs_G, np.sqrt(squares.sum_G / np.maximum(self.sizes_G - ddof, 1)), 0.0)

    def _reduce(self, ufunc: np.ufunc) -> Array:
        filled = self.sizes_G > 0
        result_G = np.zeros(len(self.sizes_G))
        if filled.any():
            result_G[filled] = ufunc.reduceat(self.flat_N, self.starts_G[filled])
        return result_G


def nest(items: Any, sizes: Array) -> list[Any]:
    """Cut a sequence into consecutive pieces of the given sizes. Numbers beyond float64's range become its largest one."""
    if isinstance(items, np.ndarray):
        items = items if np.isfinite(items).all() else np.clip(items, -_LARGEST, _LARGEST)
        if len(sizes) and sizes[0] and (sizes == sizes[0]).all():
            return list(items.reshape(len(sizes), sizes[0]))
    ends = np.cumsum(sizes).tolist()
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def divide(numerator_N: Array, divisor_N: Array) -> Array:
    """numerator_N / divisor_N, written over `divisor_N`, which is at least 0; 0 / 0 is 0. What leaves float64's range is infinite, for
    `nest` to cut."""
    np.maximum(divisor_N, _SMALLEST, out=divisor_N)
    with np.errstate(over="ignore"):
        return np.divide(numerator_N, divisor_N, out=divisor_N)
