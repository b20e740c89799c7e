"""Gradients as short vectors with nearly the same inner products: the count sketch.

Every entry of the gradient is added to one of k sums, drawn once, with a sign drawn once (Charikar et al. 2002, Finding frequent items
in data streams; Weinberger et al. 2009, arXiv:0902.2206). For fixed x and y, over the draws,

    E[sketch(x) · sketch(y)] = x · y,      standard deviation ≤ √((|x|²|y|² + (x·y)²) / k) ≤ √(2/k) · |x||y|

A gradient with no more than k entries is kept as it is, without any error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class CountSketch:
    """Sketches of gradients of parameters of the given `sizes` (numbers of entries).

    Args:
        dimensions: k, the length of a sketch.
        seed: of the draws.
        device: where the gradients are; four bytes an entry are kept there.
    """

    def __init__(self, sizes: Sequence[int], dimensions: int, seed: int = 0, device: torch.device | str = "cpu"):
        self.is_exact = sum(sizes) <= dimensions
        self.dimensions = sum(sizes) if self.is_exact else dimensions
        generator = torch.Generator().manual_seed(seed)
        if self.is_exact:
            places = list(torch.arange(self.dimensions, dtype=torch.int32).split(list(sizes)))
        else:  # a place in the upper half stands for the sum at its place in the lower half, with a minus
            places = [torch.randint(2 * dimensions, (size,), generator=generator, dtype=torch.int32) for size in sizes]
        self._places = [place.to(device) for place in places]

    @property
    def relative_error(self) -> float:
        """Standard deviation of a sketched inner product, relative to the product of the norms, at the most."""
        return 0.0 if self.is_exact else math.sqrt(2 / self.dimensions)

    def __call__(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """[k] float64 on the CPU. None: a parameter that the loss does not depend on."""
        sums = torch.zeros(2 * self.dimensions, dtype=torch.float64, device=self._places[0].device)
        for places, gradient in zip(self._places, gradients, strict=True):
            if gradient is not None:
                sums.index_add_(0, places, gradient.detach().flatten().double())
        plus, minus = sums.view(2, -1)
        return (plus - minus).cpu()
