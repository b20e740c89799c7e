"""The layers of a model like Llama in few operations and without padding: for training on a CPU.

    tokens of all sequences, one behind the other [M, E]
      --add_norm--> --linear--> q, k, v --rotate--> blocks of queries and keys --attention--> [M, H*D] --linear-->    30 times in SmolLM2
      --add_norm--> --linear--> gate, up --swiglu--> --linear-->

It is the function that the model's own code computes, from the same parameters, and the same matrix products. What lies between them
is done otherwise: every step there goes over all activations, and on a CPU such steps take as long as the products of a small model.
So what belongs together is one step with a gradient of its own (addition to the residual stream, norm and cast to autocast's dtype;
rotation, cast and layout for attention; SiLU and product), in pieces that stay in a CPU's caches; linear layers with one input are one
product; and only attention sees padding (`attention_blocks.py`).

Shapes: M tokens in all, E width, H heads, K key heads, R query heads a key head, A heads of q, k and v together, D dimension of a head,
F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rllm_lightning.models.llama import Llama
from rllm_lightning.trainer.attention_blocks import attention_blocks
from rllm_lightning.trainer.batch import MicroBatch

BLOCK_ELEMENTS = 2**19  # of a step at once (2 MiB in float32)


class PackedBody:
    """The body of a causal LM whose parts are `llama`; parameters are read at each call."""

    def __init__(self, llama: Llama):
        self._llama = llama

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Last hidden states [M, E] of a micro-batch's tokens."""
        llama = self._llama
        x_ME = llama.embedding(micro.unpadded(micro.input_ids))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_ME.dtype
        exact = torch.promote_types(x_ME.dtype, torch.float32)
        positions_1M, half = micro.unpadded(micro.position_ids)[None], llama.head_dim // 2
        cos_M1D, sin_M1D = (table[0, :, None, :half].to(exact) for table in llama.rotary(x_ME, positions_1M))
        num_heads, num_key_heads = (linear.out_features // llama.head_dim for linear in llama.layers[0].qkv[:2])
        attend = _Attention(micro, num_heads, num_key_heads, llama.scaling, dtype)
        delta_ME: Tensor | None = None
        for layer in llama.layers:
            x_ME, normed_ME = _add_norm(x_ME, delta_ME, layer.attention_norm, dtype)
            delta_ME = layer.out(attend(_joined(normed_ME, layer.qkv), cos_M1D, sin_M1D))
            x_ME, normed_ME = _add_norm(x_ME, delta_ME, layer.mlp_norm, dtype)
            delta_ME = layer.down(_SwiGLU.apply(_joined(normed_ME, layer.gate_up)))
        return _add_norm(x_ME, delta_ME, llama.norm, x_ME.dtype)[1]


class _Attention:
    """Attention of a micro-batch, the same in all layers: the blocks with their masks, and where in them the heads of tokens stand.

    Where a block has a mask, the query heads that share a key head are further queries of it. PyTorch's causal kernel wants a key head
    for each. G heads, N queries and C keys of a block are what a call sees.
    """

    def __init__(self, micro: MicroBatch, num_heads: int, num_key_heads: int, scaling: float, dtype: torch.dtype):
        self._scaling, self._num_turned = scaling, num_heads + num_key_heads
        self._biases: list[Tensor | None] = []
        num_tokens, width = sum(micro.lengths), num_heads + 2 * num_key_heads
        inputs, outputs = [], []
        for query_BQ, key_BC, sees_BQC in attention_blocks(micro):
            head_GR = torch.arange(num_heads).view(num_heads if sees_BQC is None else num_key_heads, -1)
            query_B11Q, head_GR1 = query_BQ[:, None, None], head_GR[:, :, None]
            key_B1C, key_head_G1 = key_BC[:, None], head_GR[:, :1] // (num_heads // num_key_heads)
            inputs.append(_row(query_B11Q, head_GR1, width).flatten(2))
            inputs.append(_row(key_B1C, num_heads + key_head_G1, width))
            inputs.append(_row(key_B1C, num_heads + num_key_heads + key_head_G1, width))
            outputs.append(_row(query_B11Q, head_GR1, num_heads).flatten(2))
            bias_BQC = None if sees_BQC is None else torch.zeros(sees_BQC.shape, dtype=dtype).masked_fill_(~sees_BQC, -torch.inf)
            self._biases.append(None if bias_BQC is None else bias_BQC.repeat(1, head_GR.shape[1], 1)[:, None])
        self._inputs, self._outputs = _Places(inputs, num_tokens * width), _Places(outputs, num_tokens * num_heads)

    def __call__(self, qkv: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """q, k, v side by side [M, (H+2K)·D] -> [M, H·D]."""
        parts = iter(_RotateToBlocks.apply(qkv, cos_M1D, sin_M1D, self._num_turned, self._inputs))
        outs = []
        for q, k, v, bias in zip(parts, parts, parts, self._biases, strict=True):
            if bias is None:
                outs.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scaling))
            else:
                outs.append(_BlockAttention.apply(q, k, v, bias, self._scaling))
        out: Tensor = _FromBlocks.apply(self._outputs, *outs)
        return out.view(len(qkv), -1)


def _row(token: Tensor, head: Tensor, num_heads: int) -> Tensor:
    """The row of a token's head in [tokens · heads]; -1 in padding."""
    return torch.where(token < 0, -1, token * num_heads + head)


class _Places:
    """Rows of a table and places in some tensors: a row stands in one place or in several, and in padding none does.

    Args:
        parts: the row in each place of each tensor, -1 in padding.
        num_rows: of the table, each in one place at least.
    """

    def __init__(self, parts: Sequence[Tensor], num_rows: int):
        self._shapes = [part.shape for part in parts]
        row_P = torch.cat([part.flatten() for part in parts])
        self._row_P, self._padding = row_P.clamp(min=0), (row_P < 0).nonzero().flatten()
        self._place = row_P.argsort(stable=True)[len(self._padding) :]  # those of row 0, of row 1, ...
        self._first = functional.pad(row_P[self._place].bincount(minlength=num_rows).cumsum(0), (1, 0))

    def spread(self, table: Tensor, cleared: bool = False) -> list[Tensor]:
        """[rows, D] -> each tensor's [..., D]. Padding holds the first row, or 0 where it is `cleared`."""
        places = table.index_select(0, self._row_P)
        if cleared:
            places.index_fill_(0, self._padding, 0)
        parts = places.split([shape.numel() for shape in self._shapes])
        return [part.view(*shape, -1) for part, shape in zip(parts, self._shapes, strict=True)]

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over each row's places [rows, D], always in one order."""
        places = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(self._place) == len(self._first) - 1:
            return places.index_select(0, self._place)
        return functional.embedding_bag(self._place, places, self._first, mode="sum", include_last_offset=True)


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


class _RotateToBlocks(torch.autograd.Function):
    """q, k, v side by side [M, (H+2K)·D] -> the inputs of each call, q and k turned by their positions."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_M1D: Tensor, sin_M1D: Tensor, num_turned: int, inputs: _Places) -> Any:
        ctx.save_for_backward(cos_M1D, sin_M1D)
        ctx.num_turned, ctx.inputs = num_turned, inputs
        dim = 2 * cos_M1D.shape[-1]
        qkv_MAD = qkv.view(len(qkv), -1, dim)
        turned_MAD = torch.empty_like(qkv_MAD)
        _turn(qkv_MAD, cos_M1D, sin_M1D, num_turned, out_MAD=turned_MAD)
        return tuple(inputs.spread(turned_MAD.view(-1, dim)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos_M1D, sin_M1D = ctx.saved_tensors
        grad_MAD = ctx.inputs.collect(grads).view(len(cos_M1D), -1, 2 * cos_M1D.shape[-1])
        _turn(grad_MAD, cos_M1D, -sin_M1D, ctx.num_turned, out_MAD=grad_MAD)
        return grad_MAD.view(len(cos_M1D), -1), None, None, None, None


class _FromBlocks(torch.autograd.Function):
    """The outputs of the calls -> [M·H, D]."""

    @staticmethod
    def forward(ctx: Any, outputs: _Places, *outs: Tensor) -> Tensor:
        ctx.outputs = outputs
        return outputs.collect(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *ctx.outputs.spread(grad, cleared=True)


class _BlockAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scaling + bias)·v for q [B, G, N, D], k and v [B, G, C, D], bias [B, 1, N, C]. The gradient is computed here: PyTorch's
    kernel takes two to four times as long for that in bfloat16, and as long in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float) -> Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
        ctx.save_for_backward(q, k, v, bias, out)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """With p = softmax(...) and g = grad_out: grad_v = pᵀ·g; the scores get ds = p·(g·vᵀ - out·g), grad_q = ds·k, grad_k = dsᵀ·q."""
        q, k, v, bias, out = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dtype, exact = q.dtype, torch.promote_types(q.dtype, torch.float32)
        for some in _blocks(bias.expand(-1, q.shape[1], -1, -1)):
            q_XND, k_XCD, v_XCD, g_XND, out_XND = (x[some].flatten(0, 1) for x in (q, k, v, grad_out, out))
            g_exact = g_XND.to(exact)
            p_XNC = torch.bmm(q_XND.to(exact) * ctx.scaling, k_XCD.to(exact).mT)
            p_XNC.unflatten(0, (-1, q.shape[1])).add_(bias[some])
            torch.softmax(p_XNC, -1, out=p_XNC)
            torch.bmm(p_XNC.to(dtype).mT, g_XND, out=grad_v[some].flatten(0, 1))
            ds_XNC = torch.bmm(g_exact, v_XCD.to(exact).mT).sub_((g_exact * out_XND).sum(-1, keepdim=True))
            ds_XNC = ds_XNC.mul_(p_XNC).to(dtype)
            torch.bmm(ds_XNC, k_XCD, out=grad_q[some].flatten(0, 1))
            torch.bmm(ds_XNC.mT, q_XND, out=grad_k[some].flatten(0, 1))
        return grad_q.mul_(ctx.scaling), grad_k.mul_(ctx.scaling), grad_v, None, None


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


def _turn(x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor, num_turned: int, out_MAD: Tensor) -> None:
    """Rotary position embedding of the first heads: the pairs (x[i], x[i + D/2]) turned by their angles, of which D/2 are given."""
    half = x_MAD.shape[-1] // 2
    for some in _blocks(x_MAD):
        cos, sin, out = cos_M1D[some], sin_M1D[some], out_MAD[some, :num_turned]
        left, right = (part.to(cos.dtype) for part in x_MAD[some, :num_turned].split(half, dim=-1))
        turned_left = (left * cos).addcmul_(right, sin, value=-1.0)
        out[..., half:] = (right * cos).addcmul_(left, sin)
        out[..., :half] = turned_left
    if out_MAD is not x_MAD:
        out_MAD[:, num_turned:] = x_MAD[:, num_turned:]


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    out = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    for place, part in zip(out.split([len(part) for part in parts]), parts, strict=True):
        place.copy_(part)
    return out


def _blocks(x: Tensor) -> Iterator[slice]:
    at_once = max(1, BLOCK_ELEMENTS // x[0].numel())
    return (slice(first, first + at_once) for first in range(0, len(x), at_once))
