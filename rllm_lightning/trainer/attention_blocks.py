"""Which tokens attend to which, as blocks that a kernel computes at once.

In a tree a token sees its ancestors only, and most pairs of tokens do not see each other: ten responses of a hundred tokens to a prompt
of a hundred have 1,100² pairs, of which one in eight counts. A block is some tokens that stand behind one another (queries), with those
that any of them sees (keys): its own and the way down to it. All blocks together have little more pairs than count, and what a longer
tree adds grows with its tokens, not with their square.

Shapes: B blocks, Q queries, C keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from rllm_lightning.trainer.batch import MicroBatch

BLOCK_QUERIES = 64
MULTIPLE = 16  # of queries and keys, with padding: matrix units take rows by the dozen, and are slow with what is left over


class Blocks(NamedTuple):
    """Blocks of nearly one size. A token's number is its place among all tokens of a micro-batch without padding; padding is -1.

    Query i of a block sees key j where `sees_BQC`, or where j <= i without that (all of a sequence in one block). Padding among the
    queries sees the first key, so that no softmax is over nothing.
    """

    query_BQ: Tensor
    key_BC: Tensor
    sees_BQC: Tensor | None


def attention_blocks(micro: MicroBatch) -> list[Blocks]:
    """The blocks of a micro-batch, every token a query of one: a sequence a block, or trees cut up (those with up to twice as many
    keys together)."""
    if micro.attention_mask.ndim == 2:
        tokens = pad_sequence([*torch.arange(sum(micro.lengths)).split(micro.lengths)], batch_first=True, padding_value=-1)
        return [Blocks(tokens, tokens, None)]
    blocks = sorted(_tree_blocks(micro), key=lambda block: len(block[1]))
    return [_padded([*some]) for _, some in groupby(blocks, key=lambda block: (len(block[1]) - 1).bit_length())]


def _tree_blocks(micro: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries [Q], keys [C], and what sees what [Q, C]."""
    first = 0
    for length, sees_LL in zip(micro.lengths, micro.attention_mask[:, 0], strict=True):
        for query_Q in torch.arange(length).split(BLOCK_QUERIES):
            sees_QL = sees_LL[query_Q, :length]
            key_C = sees_QL.any(0).nonzero().flatten()
            yield first + query_Q, first + key_C, sees_QL[:, key_C]
        first += length


def _padded(blocks: list[tuple[Tensor, Tensor, Tensor]]) -> Blocks:
    query_BQ, key_BC = (_side_by_side([block[i] for block in blocks]) for i in (0, 1))
    sees_BQC = torch.zeros(*query_BQ.shape, key_BC.shape[1], dtype=torch.bool)
    sees_BQC[:, :, 0] = query_BQ < 0
    for index, (_, _, sees_QC) in enumerate(blocks):
        sees_BQC[index, : sees_QC.shape[0], : sees_QC.shape[1]] = sees_QC
    return Blocks(query_BQ, key_BC, sees_BQC)


def _side_by_side(tokens: list[Tensor]) -> Tensor:
    padded = pad_sequence(tokens, batch_first=True, padding_value=-1)
    return functional.pad(padded, (0, -padded.shape[1] % MULTIPLE), value=-1)
