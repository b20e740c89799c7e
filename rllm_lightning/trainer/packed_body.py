"""The layers of a model like Llama in few operations and without padding: for training on a CPU.

    tokens of all sequences, one behind the other [M, E]
      --add_norm--> --linear--> q, k, v --rotate--> [S, heads, L, D] --attention--> [M, heads*D] --linear-->    30 times in SmolLM2
      --add_norm--> --linear--> gate, up --swiglu--> --linear-->

It is the function that the model's own code computes, from the same parameters, and the same matrix products. What lies between them
is done otherwise: every step there goes over all activations, and on a CPU such steps take as long as the products of a small model.
So what belongs together is one step with a gradient of its own (addition to the residual stream, norm and cast to autocast's dtype;
rotation, cast and layout for attention; SiLU and product), in blocks that stay in a CPU's caches; linear layers with one input are one
product; and only attention sees sequences with padding. Query heads that share a key head are further queries of that head.

Shapes: S sequences, L tokens of the longest, M tokens in all, E width, H heads, K key heads, R query heads a key head, D dimension of a
head, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rllm_lightning.models.llama import Llama
from rllm_lightning.trainer.batch import MicroBatch

BLOCK_ELEMENTS = 2**18  # of a step at once (1 MiB in float32)


class PackedBody:
    """The body of a causal LM whose parts are `llama`; parameters are read at each call."""

    def __init__(self, llama: Llama):
        self._llama = llama

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Last hidden states [M, E] of a micro-batch's tokens."""
        llama, grid = self._llama, _Grid(micro.lengths)
        x_ME = llama.embedding(micro.unpadded(micro.input_ids))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_ME.dtype
        exact = torch.promote_types(x_ME.dtype, torch.float32)
        cos_S1LD, sin_S1LD = (table[:, None, :, : llama.head_dim // 2].to(exact) for table in llama.rotary(x_ME, micro.position_ids))
        num_heads = [linear.out_features // llama.head_dim for linear in llama.layers[0].qkv]
        attend = _Attention(micro.attention_mask, num_heads[0] // num_heads[1], llama.scaling, dtype)
        delta_ME: Tensor | None = None
        for layer in llama.layers:
            x_ME, normed_ME = _add_norm(x_ME, delta_ME, layer.attention_norm, dtype)
            q, k, v = _RotateToGrid.apply(_joined(normed_ME, layer.qkv), cos_S1LD, sin_S1LD, num_heads, grid)
            delta_ME = layer.out(_FromGrid.apply(attend(q, k, v), grid))
            x_ME, normed_ME = _add_norm(x_ME, delta_ME, layer.mlp_norm, dtype)
            delta_ME = layer.down(_SwiGLU.apply(_joined(normed_ME, layer.gate_up)))
        return _add_norm(x_ME, delta_ME, llama.norm, x_ME.dtype)[1]


class _Attention:
    """Attention of a micro-batch: under its mask [S, 1, L, L] where tokens see a tree, else of each token to those before it (padding
    comes last, so no token sees any)."""

    def __init__(self, mask: Tensor, num_shared: int, scaling: float, dtype: torch.dtype):
        self._num_shared, self._scaling = num_shared, scaling
        self._bias_S1QL: Tensor | None = None
        if mask.ndim == 4:
            self._bias_S1QL = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf).repeat(1, 1, num_shared, 1)

    def __call__(self, q_SHLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor) -> Tensor:
        if self._bias_S1QL is None:
            shared = self._num_shared
            k_SHLD, v_SHLD = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (k_SKLD, v_SKLD))
            return functional.scaled_dot_product_attention(q_SHLD, k_SHLD, v_SHLD, is_causal=True, scale=self._scaling)
        q_SKQD = q_SHLD.reshape(*k_SKLD.shape[:2], -1, k_SKLD.shape[-1])
        out_SKQD = functional.scaled_dot_product_attention(q_SKQD, k_SKLD, v_SKLD, attn_mask=self._bias_S1QL, scale=self._scaling)
        return out_SKQD.view(q_SHLD.shape)


def _add_norm(x_ME: Tensor, delta_ME: Tensor | None, norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + delta (x where there is none), and its RMS norm in `dtype`."""
    result: tuple[Tensor, Tensor] = _AddNorm.apply(x_ME, delta_ME, norm.weight, norm.variance_epsilon, dtype)
    return result


def _joined(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """The outputs of linear layers with one input, side by side."""
    biases = [linear.bias for linear in linears if linear.bias is not None]  # of all or of none
    joined: Tensor = _JoinedLinear.apply(x, len(linears), *(linear.weight for linear in linears), *biases)
    return joined


class _AddNorm(torch.autograd.Function):
    """total = x + delta; normed = total / sqrt(mean(total²) + eps) · weight, computed in float32 or better."""

    @staticmethod
    def forward(ctx: Any, x_ME: Tensor, delta_ME: Tensor | None, weight_E: Tensor, eps: float, dtype: torch.dtype) -> Any:
        total_ME = x_ME if delta_ME is None else torch.empty_like(x_ME, dtype=torch.promote_types(x_ME.dtype, delta_ME.dtype))
        normed_ME = torch.empty_like(x_ME, dtype=dtype)
        exact = torch.promote_types(total_ME.dtype, torch.float32)
        scale_M1 = torch.empty(len(x_ME), 1, dtype=exact)
        for rows in _blocks(x_ME):
            if delta_ME is not None:
                torch.add(x_ME[rows], delta_ME[rows], out=total_ME[rows])
            total = total_ME[rows].to(exact)
            torch.rsqrt(total.square().mean(-1, keepdim=True).add_(eps), out=scale_M1[rows])
            normed_ME[rows] = (total * scale_M1[rows]).mul_(weight_E)
        ctx.save_for_backward(total_ME, scale_M1, weight_E)
        ctx.set_materialize_grads(False)  # nobody reads the last total
        ctx.delta_dtype = None if delta_ME is None else delta_ME.dtype
        return total_ME, normed_ME

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total_ME: Tensor | None, grad_normed_ME: Tensor) -> Any:
        """With n = total · scale and g = grad_normed · weight: grad_total + scale · (g - n · mean(g · n)); both x and delta get it."""
        total_ME, scale_M1, weight_E = ctx.saved_tensors
        grad_ME = torch.empty_like(total_ME)
        is_cast = ctx.delta_dtype not in (None, total_ME.dtype)
        grad_delta_ME = torch.empty_like(total_ME, dtype=ctx.delta_dtype) if is_cast else grad_ME
        exact, width = scale_M1.dtype, total_ME.shape[1]
        weight_E1, grad_weight_E = weight_E.to(exact)[:, None], torch.zeros(width, dtype=exact)
        for rows in _blocks(total_ME):
            plain = total_ME[rows].to(exact) * scale_M1[rows]
            grad = grad_normed_ME[rows].to(exact)
            by_weight = grad * plain
            grad_weight_E += by_weight.sum(0)
            mean = (by_weight @ weight_E1).div_(width)
            grad = (grad * weight_E).addcmul_(plain, mean, value=-1.0).mul_(scale_M1[rows])
            if grad_total_ME is not None:
                grad += grad_total_ME[rows]
            grad_ME[rows] = grad
            if is_cast:
                grad_delta_ME[rows] = grad
        return grad_ME, None if ctx.delta_dtype is None else grad_delta_ME, grad_weight_E.to(weight_E.dtype), None, None


class _JoinedLinear(torch.autograd.Function):
    """[x·W1ᵀ + b1, x·W2ᵀ + b2, ...] as one product in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x_ME: Tensor, num: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:num], parameters[num:]
        weight = _cat(weights, x_ME.dtype)
        ctx.save_for_backward(x_ME, weight)
        ctx.sizes, ctx.dtypes = [len(part) for part in weights], [part.dtype for part in parameters]
        return torch.addmm(_cat(biases, x_ME.dtype), x_ME, weight.T) if biases else x_ME @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> Any:
        x_ME, weight = ctx.saved_tensors
        num, needed = len(ctx.sizes), ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(ctx.dtypes)
        if any(needed[2 : 2 + num]):
            grads[:num] = (grad_MO.T @ x_ME).split(ctx.sizes)
        if any(needed[2 + num :]):
            grads[num:] = grad_MO.sum(0, dtype=torch.promote_types(grad_MO.dtype, torch.float32)).split(ctx.sizes)
        grads = [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return grad_MO @ weight if needed[0] else None, None, *grads


class _Grid:
    """Sequences of some lengths side by side, padded on the right: where a token's heads go, and where they come from."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.shape = lengths, (len(lengths), max(lengths))
        length_S1, column_L = torch.tensor(lengths)[:, None], torch.arange(self.shape[1])
        self._is_token_SL = column_L < length_S1
        self._token_SL = torch.where(self._is_token_SL, length_S1.cumsum(0) - length_S1 + column_L, 0)
        self._indices: dict[int, tuple[Tensor, Tensor]] = {}

    def scatter(self, x: Tensor, num_heads: int) -> Tensor:
        """[M, heads·D] -> [S, heads, L, D]; padding holds the first token's numbers."""
        dim = x.shape[1] // num_heads
        return x.reshape(-1, dim).index_select(0, self._index(num_heads)[0]).view(self.shape[0], num_heads, self.shape[1], dim)

    def gather(self, grid_SALD: Tensor) -> Tensor:
        """[S, heads, L, D] -> [M, heads·D]."""
        num_heads, dim = grid_SALD.shape[1], grid_SALD.shape[3]
        return grid_SALD.reshape(-1, dim).index_select(0, self._index(num_heads)[1]).view(-1, num_heads * dim)

    def clear_padding(self, grid_SALD: Tensor) -> Tensor:
        for sequence, length in enumerate(self.lengths):
            grid_SALD[sequence, :, length:] = 0
        return grid_SALD

    def _index(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """The head of a token for each head of a cell, and the other way round."""
        if num_heads not in self._indices:
            head_A1, head_A = torch.arange(num_heads)[:, None], torch.arange(num_heads)
            to_grid = self._token_SL[:, None] * num_heads + head_A1
            sequence_M, column_M = self._is_token_SL.nonzero(as_tuple=True)
            to_flat = (sequence_M[:, None] * num_heads + head_A) * self.shape[1] + column_M[:, None]
            self._indices[num_heads] = (to_grid.flatten(), to_flat.flatten())
        return self._indices[num_heads]


class _RotateToGrid(torch.autograd.Function):
    """q, k, v side by side [M, (H+2K)·D] -> q [S, H, L, D] and k [S, K, L, D] turned by their positions, v [S, K, L, D]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_S1LD: Tensor, sin_S1LD: Tensor, num_heads: list[int], grid: _Grid) -> Any:
        ctx.save_for_backward(cos_S1LD, sin_S1LD)
        ctx.grid = grid
        grid_SALD = grid.scatter(qkv, sum(num_heads))
        turned = grid_SALD[:, : sum(num_heads[:2])]
        _turn(turned, cos_S1LD, sin_S1LD, out_SALD=turned)
        return grid_SALD.split(num_heads, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
        cos_S1LD, sin_S1LD = ctx.saved_tensors
        num_heads = [grad.shape[1] for grad in (grad_q, grad_k, grad_v)]
        grad_SALD = grad_q.new_empty(len(grad_q), sum(num_heads), *grad_q.shape[2:])
        for grad, place in zip((grad_q, grad_k), grad_SALD.split(num_heads, dim=1), strict=False):
            _turn(grad, cos_S1LD, -sin_S1LD, out_SALD=place)
        grad_SALD[:, -num_heads[2] :] = grad_v
        return ctx.grid.gather(grad_SALD), None, None, None, None


class _FromGrid(torch.autograd.Function):
    """[S, H, L, D] -> [M, H·D]."""

    @staticmethod
    def forward(ctx: Any, grid_SHLD: Tensor, grid: _Grid) -> Tensor:
        ctx.grid, ctx.num_heads = grid, grid_SHLD.shape[1]
        return grid.gather(grid_SHLD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grid.clear_padding(ctx.grid.scatter(grad, ctx.num_heads)), None


class _SwiGLU(torch.autograd.Function):
    """gate and up side by side [M, 2F] -> SiLU(gate) · up [M, F]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[1] // 2
        product_MF = torch.empty(len(gate_up), width, dtype=gate_up.dtype)
        for rows in _blocks(product_MF):
            gate, up = gate_up[rows].split(width, dim=1)
            torch.mul(functional.silu(gate), up, out=product_MF[rows])
        return product_MF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MF: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        for rows in _blocks(grad_MF):
            gate, up = gate_up[rows].split(grad_MF.shape[1], dim=1)
            grad_gate, grad_up = grad_gate_up[rows].split(grad_MF.shape[1], dim=1)
            torch.ops.aten.silu_backward(grad_MF[rows] * up, gate, grad_input=grad_gate)
            torch.mul(grad_MF[rows], functional.silu(gate), out=grad_up)
        return grad_gate_up


def _turn(x_SALD: Tensor, cos_S1LD: Tensor, sin_S1LD: Tensor, out_SALD: Tensor) -> None:
    """Rotary position embedding: the pairs (x[i], x[i + D/2]) turned by their angles, of which D/2 are given."""
    half = x_SALD.shape[-1] // 2
    for some in _blocks(x_SALD):
        cos, sin, out = cos_S1LD[some], sin_S1LD[some], out_SALD[some]
        left, right = (part.to(cos.dtype) for part in x_SALD[some].split(half, dim=-1))
        turned_left = (left * cos).addcmul_(right, sin, value=-1.0)
        out[..., half:] = (right * cos).addcmul_(left, sin)
        out[..., :half] = turned_left


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    out = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    for place, part in zip(out.split([len(part) for part in parts]), parts, strict=True):
        place.copy_(part)
    return out


def _blocks(x: Tensor) -> Iterator[slice]:
    at_once = max(1, BLOCK_ELEMENTS // x[0].numel())
    return (slice(first, first + at_once) for first in range(0, len(x), at_once))
