"""The output head where it is needed: log-probs and entropies of chosen tokens without a [tokens, vocabulary] tensor.

The logits of one chunk of tokens at a time are computed, reduced and dropped, in the forward pass and again in the backward
pass, so peak memory does not grow with the number of response tokens times the vocabulary.

Shapes: N tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 8_388_608  # logits held at once (32 MiB in float32)


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
        num_tokens, vocabulary = hidden.shape[0], weight.shape[0]
        ctx.chunk = max(16, CHUNK_ELEMENTS // vocabulary)
        out = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs, entropies, normalisers = (torch.empty(num_tokens, dtype=out, device=hidden.device) for _ in range(3))
        for part in _parts(num_tokens, ctx.chunk):
            logits = _logits(hidden[part], weight, bias_V, temperature)
            normaliser = logits.logsumexp(-1)
            normalisers[part] = normaliser
            logprobs[part] = logits.gather(-1, targets_N[part, None]).squeeze(-1) - normaliser
            probs = (logits - normaliser[:, None]).exp_()
            entropies[part] = normaliser - (probs * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias_V, targets_N, normalisers, entropies)
        ctx.temperature, ctx.dtypes = temperature, (hidden_ND.dtype, weight_VD.dtype)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprobs_N, grad_entropies_N = grads
        hidden, weight, bias_V, targets_N, normalisers, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=ctx.dtypes[1]) if need_weight else None
        grad_bias = torch.zeros_like(bias_V) if need_bias and bias_V is not None else None
        for part in _parts(hidden.shape[0], ctx.chunk):
            # with p = softmax(z): d logp[target]/dz = onehot - p, d entropy/dz = -p·(log p + entropy)
            logprobs = _logits(hidden[part], weight, bias_V, ctx.temperature).sub_(normalisers[part, None])
            probs = logprobs.exp()
            grad = logprobs.add_(entropies[part, None]).mul_(-grad_entropies_N[part, None]).sub_(grad_logprobs_N[part, None]).mul_(probs)
            grad.scatter_add_(-1, targets_N[part, None], grad_logprobs_N[part, None].to(grad.dtype))
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[part]).to(grad_weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(grad_bias.dtype)
        return None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0]), grad_weight, grad_bias, None, None


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits = _upcast(hidden_ND @ weight_VD.T)
    if bias_V is not None:
        logits = logits + bias_V.to(logits.dtype)
    return logits.div_(temperature)
