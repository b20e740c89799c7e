"""The forward pass of packed tokens through a model like Llama, in few operations: for sampling on a CPU.

A step of decoding has one token of each sample. Its matrix products are small, so the dozens of operations that the model's own code
puts between them take a good part of the time, each for its call more than for its numbers. Here the residual stream is added to in
place, in float32 whatever the weights' dtype; a norm and a rotation are a few calls; linear layers with one input are one product
where their weights are copies of ours (`prepack.py`), and the layers themselves where the weights are the trainer's.

Shapes: N tokens, E width, H heads, K key heads, R query heads a key head, D dimension of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rllm_lightning.models.llama import Layer, Llama, has_hooks
from rllm_lightning.rollout.packed_attention import Joined, Packed
from rllm_lightning.rollout.prepack import prepacked
from rllm_lightning.rollout.weights import SamplingModel

Product = Callable[[Tensor], Tensor]  # the outputs of linear layers with one input, side by side


class _Layer(NamedTuple):
    """What is computed from a layer's present weights."""

    attention_norm: Tensor
    qkv: Product
    out: Product
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Sequence[Tensor]]
    down: Product


class PackedLlama:
    """See the module.

    Args:
        model: whose weights are used; what is made of them is made anew when it has got others.
        llama: its parts.
    """

    def __init__(self, model: SamplingModel, llama: Llama):
        self._model, self._llama = model, llama
        self._num_key_heads = llama.layers[0].qkv[2].out_features // llama.head_dim
        self._take_over_weights()

    @classmethod
    def of(cls, model: SamplingModel) -> PackedLlama | None:
        """For a model on a CPU whose modules are named as Llama's; its numbers are still to be compared."""
        causal_lm = model.causal_lm
        if model.device.type != "cpu" or type(causal_lm.get_output_embeddings()) is not nn.Linear or has_hooks(causal_lm):
            return None
        llama = Llama.of(causal_lm)
        return None if llama is None else cls(model, llama)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, ends: Tensor, packed: Packed | Joined) -> Tensor:
        """Logits [len(ends), V] behind the tokens at `ends`."""
        if self._version != self._model.version:
            self._take_over_weights()
        llama, dtype = self._llama, self._llama.embedding.weight.dtype
        x_NE = llama.embedding(ids_N).to(torch.promote_types(dtype, torch.float32))
        cos_N1D, sin_N1D = (table[0, :, None] for table in llama.rotary(x_NE, positions_N[None]))
        half, num_tokens = llama.head_dim // 2, len(ids_N)
        sin_N1D = torch.cat([-sin_N1D[..., :half], sin_N1D[..., half:]], dim=-1)
        for number, layer in enumerate(self._layers):
            heads_NAD = layer.qkv(self._normed(x_NE, layer.attention_norm, dtype)).view(num_tokens, -1, llama.head_dim)
            qk_NAD = heads_NAD[:, : -self._num_key_heads].to(x_NE.dtype)
            qk_NAD = (qk_NAD * cos_N1D).addcmul_(qk_NAD.roll(half, dims=-1), sin_N1D).to(dtype)
            q_NKRD = qk_NAD[:, : -self._num_key_heads].unflatten(1, (self._num_key_heads, -1))
            k_NKD, v_NKD = (x[:, -self._num_key_heads :] for x in (qk_NAD, heads_NAD))
            x_NE += layer.out(packed.attend(number, q_NKRD, k_NKD, v_NKD, llama.scaling).flatten(1))
            gate, up = layer.gate_up(self._normed(x_NE, layer.mlp_norm, dtype))
            x_NE += layer.down(functional.silu(gate).mul_(up))
        return self._head(self._normed(x_NE[ends], self._norm, dtype))

    def _normed(self, x_NE: Tensor, weight_E: Tensor, dtype: torch.dtype) -> Tensor:
        scale_N1 = torch.rsqrt(x_NE.square().mean(-1, keepdim=True).add_(self._llama.norm.variance_epsilon))
        return (x_NE * scale_N1).mul_(weight_E).to(dtype)

    def _take_over_weights(self) -> None:
        self._version = self._model.version
        self._layers = [self._layer(layer) for layer in self._llama.layers]
        self._norm = self._exact(self._llama.norm.weight)
        self._head = self._product([self._model.causal_lm.get_output_embeddings()])

    def _layer(self, layer: Layer) -> _Layer:
        attention_norm, mlp_norm = self._exact(layer.attention_norm.weight), self._exact(layer.mlp_norm.weight)
        qkv, out, down = (self._product(linears) for linears in (layer.qkv, [layer.out], [layer.down]))
        return _Layer(attention_norm, qkv, out, mlp_norm, self._pair(*layer.gate_up), down)

    def _product(self, linears: Sequence[nn.Linear]) -> Product:
        if self._model.can_prepack:
            return prepacked(linears)
        return linears[0] if len(linears) == 1 else lambda x: torch.cat([linear(x) for linear in linears], dim=-1)

    def _pair(self, first: nn.Linear, second: nn.Linear) -> Callable[[Tensor], Sequence[Tensor]]:
        """Of two products that are wide, so that side by side they would have to be copied."""
        if self._model.can_prepack:
            product = prepacked([first, second])
            return lambda x: product(x).chunk(2, dim=-1)
        return lambda x: (first(x), second(x))

    @staticmethod
    def _exact(weight: Tensor) -> Any:
        return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
