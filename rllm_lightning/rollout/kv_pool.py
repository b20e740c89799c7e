"""Keys and values of many sequences in one preallocated tensor, written in place, and who may look at what.

A line holds a prompt and, behind it, the tokens of up to `SEATS` samples of that prompt in the order in which they were
sampled. The mask says which places each of its samples sees: the prompt, and its own tokens.

Shapes: L lines, S seats, P places, N tokens to be written, H key heads, D their dimension.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# Samples of a prompt that share its line. More would read a long prompt less often but look at more of each other's masked
# tokens; measured on a CPU, 4 is within 1.3 of the best number for prompts and responses of 12 to 512 tokens.
SEATS = 4
LITTLE = 2**30  # bytes; as much as `kept_state_mb` takes by default
HUGE = 2**22  # bytes from which huge pages are asked for
GROWTH = 2  # lines and places grow by this factor at least, so that growing costs little in all


class KVPool:
    """Lines 0 to n-1 are in use; whoever empties one moves the last one there.

    `kv` is [layers, 2 (keys, values), lines, heads, places, dim]; `mask_LSP` is 0 where a sample may look and -inf elsewhere, in the
    same dtype. What stands in masked places is finite, so it has no influence.
    """

    def __init__(self, num_layers: int, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device):
        self.kv = torch.zeros(num_layers, 2, 0, num_heads, 0, dim, dtype=dtype, device=device)
        self.mask_LSP = torch.zeros(0, SEATS, 0, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def reserve(self, num_lines: int, num_places: int) -> None:
        """Make room, and keep what is there."""
        _, _, lines, _, places, _ = self.kv.shape
        if num_lines <= lines and num_places <= places:
            return
        lines_now = lines if num_lines <= lines else max(num_lines, lines * GROWTH)
        places_now = places if num_places <= places else max(num_places, places * GROWTH)
        kv, mask_LSP = self.kv, self.mask_LSP
        self._resize(lines_now, places_now)
        self.kv[:, :, :lines, :, :places] = kv
        self.mask_LSP[:lines, :, :places] = mask_LSP

    def trim(self) -> None:
        """No line is in use: give the memory back, unless it is little and would soon be asked for again."""
        if self.kv.nbytes > LITTLE:
            self._resize(0, 0)

    @torch.inference_mode()
    def reset(self) -> None:
        """As `trim`, and nothing that was written (it may not be finite) is left over."""
        self.trim()
        self.kv.zero_()

    def open_lines(self, lines: Sequence[int], num_places: Sequence[int]) -> None:
        """All seats of these lines see the first places, the prompt, and nothing else."""
        line_X, num_X = torch.tensor(lines, device=self.device), torch.tensor(num_places, device=self.device)
        place_P = torch.arange(self.mask_LSP.shape[-1], device=self.device)
        mask_XP = self.mask_LSP.new_zeros(len(lines), len(place_P)).masked_fill_(place_P >= num_X[:, None], -torch.inf)
        self.mask_LSP[line_X] = mask_XP[:, None].expand(-1, SEATS, -1)

    def index(self, lines_N: Tensor, places_N: Tensor) -> Tensor:
        """Where `write` puts N tokens, keys and then values, in flat places."""
        _, two, lines, heads, places, _ = self.kv.shape
        row_X = (torch.arange(two, device=self.device)[:, None] * lines + lines_N).flatten()
        head_H = torch.arange(heads, device=self.device)
        return ((row_X[:, None] * heads + head_H) * places + places_N.repeat(two)[:, None]).flatten()

    def write(self, layer: int, index: Tensor, keys_NHD: Tensor, values_NHD: Tensor) -> None:
        """Store one layer's keys and values of N tokens."""
        new_XD = torch.cat([keys_NHD, values_NHD]).flatten(0, 1)
        self.kv[layer].view(-1, new_XD.shape[1]).index_copy_(0, index, new_XD)

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_places: int) -> None:
        """Copy lines onto others, with keys and values of their first places."""
        if sources:
            source, target = torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
            self.kv[:, :, target, :, :num_places] = self.kv[:, :, source, :, :num_places]
            self.mask_LSP[target] = self.mask_LSP[source]

    def _resize(self, lines: int, places: int) -> None:
        layers, two, _, heads, _, dim = self.kv.shape
        self.kv = _zeros((layers, two, lines, heads, places, dim), self.kv.dtype, self.device)
        self.mask_LSP = self.mask_LSP.new_full((lines, SEATS, places), -torch.inf)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, on Linux in huge pages: attention reads all of the pool at every step, and much of its time goes into
    finding small pages (reading 270 MB: 33 instead of 20 GB/s; attention of 64 conversations 10% faster)."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
