"""Attention for a flat list of tokens from many sequences, where samples share their prompt's keys and values.

The model sees one row of N tokens without padding; linear layers need not know whose they are. Only attention does: the
model's forward hands `packed=` through to the function registered here, which asks that object: tokens of new prompts
(`prefill`), one more token of every sample (`decode`), or both in one pass (`Joined`). New keys and values go into the lines of
a `KVPool`; queries are gathered into a grid, line by line, so that one call computes all: the samples of a line are queries of
one sequence, and the pool's mask keeps them from each other's tokens. Query heads that share a key head (grouped-query
attention) are further queries of that head.

Shapes: N tokens of the forward pass, L lines, Q queries a line, P places, S seats, H key heads, R query heads a key head, D
dimension of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from rllm_lightning.rollout.kv_pool import KVPool

IMPLEMENTATION = "rllm_lightning_packed"
NOT_COMPUTED_HERE = ("softcap", "s_aux", "position_bias", "sliding_window")


class UnsupportedModel(ValueError):
    """The model's attention is not what this file computes."""


def use_packed_attention(causal_lm: Any) -> None:
    """Let a Hugging Face model compute attention by this file; its forward then needs the keyword `packed`."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    causal_lm.set_attn_implementation(IMPLEMENTATION)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    packed: Packed | Joined | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of `IMPLEMENTATION`: query [1, H*R, N, D], key and value [1, H, N, D] -> [1, N, H*R, D].

    Raises:
        UnsupportedModel: the layer asks for what this file does not compute.
    """
    if packed is None or not hasattr(module, "layer_idx"):
        raise UnsupportedModel("its layers do not hand keywords on to the attention function, or have no numbers")
    if asked := [name for name in NOT_COMPUTED_HERE if kwargs.get(name) is not None]:
        raise UnsupportedModel(f"its attention uses {', '.join(asked)}")
    q_NHRD, k_NHD, v_NHD = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1)), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return packed.attend(module.layer_idx, q_NHRD, k_NHD, v_NHD, scaling).flatten(1, 2)[None], None


class Packed:
    """Tokens of a forward pass as its attention layers see them: queries that all look at their own line.

    Args:
        first_line: of the lines that the queries look at; as many as the mask has.
        line_N, query_N: each token's line, counted from the first, and its query there.
        place_N: where in its line each token's keys and values go.
        mask_LQP: 0 where a query may look, else -inf.
    """

    def __init__(
        self, pool: KVPool, first_line: int, line_N: Sequence[int], query_N: Sequence[int], place_N: Sequence[int], mask_LQP: Tensor
    ):
        self.num_tokens = len(line_N)
        self._pool = pool
        self._mask_LQP = mask_LQP
        num_lines, self._num_queries, self._num_places = mask_LQP.shape
        self._lines = slice(first_line, first_line + num_lines)
        self._line_N = torch.tensor(line_N, device=pool.device)
        self._query_N = torch.tensor(query_N, device=pool.device)
        self._write_index = pool.index(self._line_N + first_line, torch.tensor(place_N, device=pool.device))
        self._layout: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, layer: int, q_NHRD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scaling: float | None) -> Tensor:
        """Store the tokens' keys and values, then the attention output [N, H, R, D]."""
        self._pool.write(layer, self._write_index, k_NHD, v_NHD)
        k_LHPD, v_LHPD = self._pool.kv[layer, :, self._lines, :, : self._num_places]
        if self._layout is None:  # the same for all layers
            self._layout = self._lay_out(*q_NHRD.shape[1:3])
        token_of_cell, cell_of_token, mask_L1QP = self._layout
        q_LHQD = q_NHRD.flatten(0, 2).index_select(0, token_of_cell).view(*k_LHPD.shape[:2], -1, k_LHPD.shape[-1])
        out_LHQD = functional.scaled_dot_product_attention(q_LHQD, k_LHPD, v_LHPD, attn_mask=mask_L1QP, scale=scaling)
        return out_LHQD.flatten(0, 2).index_select(0, cell_of_token).view(q_NHRD.shape)

    def _lay_out(self, num_heads: int, num_shared: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of tokens [N, H, R] in a grid of cells [L, H, Q, R]: for each cell its query's flat number, for each query its
        cell's, and the mask for queries Q*R. A cell without a token holds query 0, and is not read back."""
        num_lines, device = len(self._mask_LQP), self._pool.device
        head_H1, shared_R = torch.arange(num_heads, device=device)[:, None], torch.arange(num_shared, device=device)
        line_N11, query_N11 = self._line_N[:, None, None], self._query_N[:, None, None]
        cell_of_token = (((line_N11 * num_heads + head_H1) * self._num_queries + query_N11) * num_shared + shared_R).flatten()
        num_cells = num_lines * num_heads * self._num_queries * num_shared
        token_of_cell = torch.zeros(num_cells, dtype=torch.int64, device=device)
        token_of_cell[cell_of_token] = torch.arange(len(cell_of_token), device=device)
        return token_of_cell, cell_of_token, self._mask_LQP.repeat_interleave(num_shared, dim=1)[:, None]


class Joined:
    """Several `Packed` in one forward pass, one after the other: grids of different sizes need no padding to each other."""

    def __init__(self, parts: Sequence[Packed]):
        self._parts = parts
        self._sizes = [part.num_tokens for part in parts]

    def attend(self, layer: int, q_NHRD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scaling: float | None) -> Tensor:
        slices = zip(self._parts, *(x.split(self._sizes) for x in (q_NHRD, k_NHD, v_NHD)), strict=True)
        return torch.cat([part.attend(layer, q, k, v, scaling) for part, q, k, v in slices])


def prefill(pool: KVPool, first_line: int, spans: Sequence[range]) -> Packed:
    """Prompts on the lines from `first_line` on: of each the places in its span; those before are filled already."""
    starts, num_queries, num_places = [span.start for span in spans], max(map(len, spans)), max(span.stop for span in spans)
    place_P = torch.arange(num_places, device=pool.device)
    query_place_LQ1 = torch.tensor(starts, device=pool.device)[:, None, None] + torch.arange(num_queries, device=pool.device)[:, None]
    mask_LQP = pool.kv.new_zeros(len(spans), num_queries, num_places).masked_fill_(place_P > query_place_LQ1, -torch.inf)
    line_N = [line for line, span in enumerate(spans) for _ in span]
    query_N = [query for span in spans for query in range(len(span))]
    return Packed(pool, first_line, line_N, query_N, [place for span in spans for place in span], mask_LQP)


def decode(pool: KVPool, line_N: Sequence[int], seat_N: Sequence[int], place_N: Sequence[int]) -> Packed:
    """One token of each sample: its line, its seat there, and the place that its token takes."""
    lines, seats, places = (torch.tensor(column, device=pool.device) for column in (line_N, seat_N, place_N))
    pool.mask_LSP[lines, seats, places] = 0
    mask_LQP = pool.mask_LSP[: max(line_N) + 1, : max(seat_N) + 1, : max(place_N) + 1]
    return Packed(pool, 0, line_N, seat_N, place_N, mask_LQP)
