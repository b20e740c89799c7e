"""The output head where it is needed: log-probs and entropies of chosen tokens without a [tokens, vocabulary] tensor.

The logits of one chunk of tokens at a time are computed, reduced and dropped, in the forward pass and again in the backward
pass, so peak memory does not grow with the number of response tokens times the vocabulary. Chunks are large, for the sake of the
matrix products; what is done to each logit goes over a chunk in blocks that stay in a CPU's caches.

Shapes: N tokens, C tokens of a chunk, B tokens of a block, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25  # logits held at once (64 MiB in bfloat16)
CPU_BLOCK_ELEMENTS = 2**18  # of them in float32 at once on a CPU (1 MiB)


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies under softmax((hidden·weightᵀ + bias) / temperature).

    Args:
        hidden_ND: last hidden states, any float dtype; matrix products run in it (or in autocast's dtype).
        weight_VD: the head's weight; bias_V: its bias or None.
        targets_N: int64 token ids.
        temperature: above 0.

    Returns:
        `(logprobs_N, entropies_N)`, float32 (float64 for float64 input), both differentiable.
    """
    return _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, targets_N, temperature)


def logprobs_from_logits(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same from logits that are there already: for heads that do more than one matrix product."""
    scaled = _upcast(logits_NV) / temperature
    all_logprobs = scaled.log_softmax(-1)
    entropies = -(all_logprobs.exp() * all_logprobs.masked_fill(all_logprobs == float("-inf"), 0.0)).sum(-1)
    return all_logprobs.gather(-1, targets_N[:, None]).squeeze(-1), entropies


def _upcast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float) -> Any:
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        hidden, weight = hidden_ND.detach().to(dtype), weight_VD.detach().to(dtype)
        out = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs, entropies, normalisers = (torch.empty(len(hidden), dtype=out, device=hidden.device) for _ in range(3))
        for chunk in _chunks(hidden, weight):
            logits_CV = hidden[chunk] @ weight.T
            for block, logits_BV in _blocks(logits_CV, chunk.start, bias_V, temperature):
                highest_B1 = logits_BV.amax(-1, keepdim=True)
                chosen_B = logits_BV.gather(-1, targets_N[block, None])[:, 0]
                shifted_BV = logits_BV.sub_(highest_B1)
                weights_BV = shifted_BV.exp()
                total_B = weights_BV.sum(-1)
                normaliser_B = total_B.log() + highest_B1[:, 0]
                normalisers[block], logprobs[block] = normaliser_B, chosen_B - normaliser_B
                entropies[block] = total_B.log() - weights_BV.mul_(shifted_BV).sum(-1) / total_B
        ctx.save_for_backward(hidden, weight, bias_V, targets_N, normalisers, entropies)
        ctx.set_materialize_grads(False)  # the entropies are seldom trained on
        ctx.temperature, ctx.dtypes = temperature, (hidden_ND.dtype, weight_VD.dtype)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None) -> Any:
        hidden, weight, bias_V, targets_N, normalisers, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias_V) if need_bias and bias_V is not None else None
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normalisers)
        for chunk in _chunks(hidden, weight):
            logits_CV = hidden[chunk] @ weight.T
            for block, logits_BV in _blocks(logits_CV, chunk.start, bias_V, ctx.temperature):
                # with p = softmax(z): d logp[target]/dz = onehot - p, d entropy/dz = -p·(log p + entropy)
                all_logprobs_BV = logits_BV.sub_(normalisers[block, None])
                grad_B1 = grad_logprobs_N[block, None]
                factor = grad_B1
                if grad_entropies_N is not None:
                    factor = (all_logprobs_BV + entropies[block, None]).mul_(grad_entropies_N[block, None]).add_(grad_B1)
                grad_BV = all_logprobs_BV.exp_().mul_(-factor).scatter_add_(-1, targets_N[block, None], grad_B1)
                logits_CV[block.start - chunk.start : block.stop - chunk.start] = grad_BV.div_(ctx.temperature)
            grad_CV = logits_CV
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_CV @ weight
            if need_weight:
                part = (grad_CV.T @ hidden[chunk]).to(ctx.dtypes[1])
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0, dtype=grad_bias.dtype)
        if need_weight and grad_weight is None:  # not a token
            grad_weight = torch.zeros_like(weight, dtype=ctx.dtypes[1])
        return None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0]), grad_weight, grad_bias, None, None


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    return _parts(0, len(hidden_ND), max(16, CHUNK_ELEMENTS // len(weight_VD)))


def _blocks(logits_CV: Tensor, start: int, bias_V: Tensor | None, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """The places and (logits + bias) / temperature of a few tokens at a time, in float32, to be overwritten; `logits_CV` may then be,
    up to there."""
    num_tokens, vocabulary = logits_CV.shape
    at_once = max(1, CPU_BLOCK_ELEMENTS // vocabulary) if logits_CV.device.type == "cpu" else num_tokens
    for block in _parts(start, num_tokens, at_once):
        logits_BV = _upcast(logits_CV[block.start - start : block.stop - start])
        if bias_V is not None:
            logits_BV = logits_BV.add(bias_V)
        yield block, logits_BV.div_(temperature) if temperature != 1 else logits_BV


def _parts(start: int, num: int, at_once: int) -> list[slice]:
    return [slice(first, min(first + at_once, start + num)) for first in range(start, start + num, at_once)]
