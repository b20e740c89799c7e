"""From logits to sampled tokens by inverse CDF: one uniform number per token, exactly the distribution asked for.

A uniform number u chooses the first token whose cumulative probability exceeds u. So the token is a function of the logits
and of u alone, and a request that draws its numbers from a stream of its own gets the same tokens in any batch. The search
takes two levels, blocks of the vocabulary and then tokens of one block, because a cumulative sum over the whole vocabulary
is slow.

Shapes: B rows of the batch, V tokens of the vocabulary, K blocks, N entries searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rllm_lightning.rollout.engine import SamplingParams

BLOCK = 256  # tokens of a block: about the square root of a usual vocabulary
CPU_CHUNK = 2**20  # probabilities computed at once on a CPU: what stays in its caches is three times as fast


@dataclass(frozen=True)
class BatchSampling:
    """The sampling parameters of a batch as tensors; None stands for a parameter that is neutral in every row."""

    temperature_B: Tensor | None
    greedy_B: Tensor | None
    truncation: tuple[Tensor, Tensor] | None  # top_k_B (V or more: all tokens), top_p_B

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> BatchSampling:
        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        temperature_B = greedy_B = truncation = None
        if any(p.temperature not in (0.0, 1.0) for p in params):
            temperature_B = column([p.temperature or 1.0 for p in params], torch.float32)
        if any(p.temperature == 0.0 for p in params):
            greedy_B = column([p.temperature == 0.0 for p in params], torch.bool)
        if any(p.is_truncated for p in params):
            top_k = [p.top_k if p.is_truncated and p.top_k > 0 else 2**31 for p in params]
            top_p = [p.top_p if p.is_truncated else 1.0 for p in params]
            truncation = column(top_k, torch.int64), column(top_p, torch.float64)
        return cls(temperature_B, greedy_B, truncation)

    def of_rows(self, rows: slice) -> BatchSampling:
        """The same for some of the rows."""
        return BatchSampling(
            temperature_B=None if self.temperature_B is None else self.temperature_B[rows],
            greedy_B=None if self.greedy_B is None else self.greedy_B[rows],
            truncation=None if self.truncation is None else (self.truncation[0][rows], self.truncation[1][rows]),
        )


def sample(logits_BV: Tensor, uniforms_B: Tensor, sampling: BatchSampling) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from.

    That distribution is softmax(logits / temperature), with top-k and then top-p cut off and the rest renormalised where a row
    asks for it. A row at temperature 0 takes its most likely token (the first of equals), with the log-probability at
    temperature 1.

    Args:
        logits_BV: any floating dtype; -inf is a token that cannot be.
        uniforms_B: float64 in [0, 1).

    Returns:
        tokens_B (int64), logprobs_B (float64, NaN where a row's logits are not numbers).
    """
    num_rows, vocab_size = logits_BV.shape
    at_once = max(1, CPU_CHUNK // vocab_size) if logits_BV.device.type == "cpu" else num_rows
    chunks = [slice(start, start + at_once) for start in range(0, num_rows, at_once)]
    drawn = [_sample(logits_BV[rows], uniforms_B[rows], sampling.of_rows(rows)) for rows in chunks]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits_BV: Tensor, uniforms_B: Tensor, sampling: BatchSampling) -> tuple[Tensor, Tensor]:
    if sampling.temperature_B is not None:
        logits_BV = logits_BV.float() / sampling.temperature_B[:, None]
    weights_BV = torch.softmax(logits_BV, dim=-1, dtype=torch.float32)
    if sampling.truncation is not None:
        weights_BV = _truncate(weights_BV, *sampling.truncation)

    missing = -weights_BV.shape[-1] % BLOCK
    padded_BV = functional.pad(weights_BV, (0, missing)) if missing else weights_BV
    blocks_BKN = padded_BV.unflatten(-1, (-1, BLOCK))
    block_weights_BK = blocks_BKN.sum(-1).double()
    total_B = block_weights_BK.sum(-1)
    block_B, rest_B = _invert(block_weights_BK, uniforms_B * total_B)
    rows_B = torch.arange(len(block_B), device=block_B.device)
    token_B, _ = _invert(blocks_BKN[rows_B, block_B].double(), rest_B)
    token_B = block_B * BLOCK + token_B
    if sampling.greedy_B is not None:
        token_B = torch.where(sampling.greedy_B, logits_BV.argmax(-1), token_B)
    chosen_B = weights_BV.gather(-1, token_B[:, None])[:, 0].double()
    return token_B, chosen_B.log() - total_B.log()


def _invert(weights_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry whose cumulative weight exceeds the target, and the target's distance into it.

    Rounding never chooses an entry of weight 0 or a place past the end: where the target reaches the whole sum, it is the last
    entry that has weight.
    """
    cumulative_BN = weights_BN.cumsum(-1)
    place_N = torch.arange(weights_BN.shape[-1], device=weights_BN.device)
    # ranks: hits from 2n down to n+1, so that the first is the highest; entries before the target 1 to n; weightless ones 0
    rank_BN = torch.where(cumulative_BN > target_B[:, None], 2 * len(place_N) - place_N, place_N + 1)
    index_B = torch.where(weights_BN > 0, rank_BN, 0).argmax(-1)
    before_B1 = (cumulative_BN - weights_BN).gather(-1, index_B[:, None])
    return index_B, target_B - before_B1[:, 0]


def _truncate(weights_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Weights with everything set to 0 but the top_k most likely tokens, of which the fewest that hold top_p of their sum."""
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
    sorted_BV = torch.where(rank_V < top_k_B[:, None], sorted_BV, 0.0)
    mass_BV = sorted_BV.double().cumsum(-1)
    before_BV = mass_BV - sorted_BV
    sorted_BV = torch.where(before_BV < top_p_B[:, None] * mass_BV[:, -1:], sorted_BV, 0.0)
    return torch.zeros_like(sorted_BV).scatter(-1, order_BV, sorted_BV)
