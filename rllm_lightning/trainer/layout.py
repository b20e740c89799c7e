"""How the rows of a minibatch are laid out for the model: padded rows, or trees that compute a shared prefix once.

    rows --sorted by prompt--> PrefixTree (grown while that is cheaper) --> collate_trees   one sequence a tree
      |
      '--those that share too little--> collate_rows                                        one sequence a row

A group's n responses follow one prompt, and all prompts of a task may begin alike. As padded rows the prompt is computed n times;
in a tree, `prompt, response 1, ..., response n`, once: every token sees its ancestors alone, and positions go on from the parent,
so that log-probs and gradients are those of plain rows. That saves tokens, but attention reaches over the whole tree: `LayoutCost`
says how far it pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from rllm_lightning.trainer.batch import MicroBatch, Row, response_mask

Item = TypeVar("Item")

MAX_TREE_TOKENS = 2048  # of a tree; its mask grows with the square
SOFTMAX_COST = 32  # of a pair in one head, in multiply-adds: mask, exponential and their gradients


@dataclass(frozen=True)
class LayoutCost:
    """What tokens cost a model, in multiply-adds: `per_token` for its matrix products, `per_pair` for a query and a key."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: Any) -> LayoutCost:
        """Estimated from the weights and the config of a Hugging Face causal LM."""
        config = model.config
        embedding = model.get_input_embeddings().weight.numel()
        tied = 1 if getattr(config, "tie_word_embeddings", False) else 2
        body = sum(p.numel() for p in model.parameters()) - tied * embedding
        per_layer = 2 * config.hidden_size + SOFTMAX_COST * config.num_attention_heads
        return cls(float(max(body, 1)), float(per_layer * config.num_hidden_layers))

    def __call__(self, length: int) -> float:
        """Of one sequence."""
        return length * self.per_token + length * length * self.per_pair


@dataclass
class PrefixTree:
    """The distinct prefixes of some rows. Node i holds one token; its parent stands before it (-1: a first token)."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # the nodes of each row's tokens
    _children: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def num_shared(self, row: Row) -> int:
        """How many of the row's first tokens are in the tree already."""
        node, count = -1, 0
        for token in _tokens(row):
            child = self._children.get((node, token))
            if child is None:
                break
            node, count = child, count + 1
        return count

    def add(self, row: Row) -> None:
        """Walk down from the root along the row's tokens, making the nodes that are not there."""
        node, path = -1, []
        for token in _tokens(row):
            child = self._children.get((node, token))
            if child is None:
                child = self._children[(node, token)] = len(self.tokens)
                self.depths.append(0 if node < 0 else self.depths[node] + 1)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            path.append(node)
        self.rows.append(row)
        self.paths.append(path)

    def ancestors(self, size: int) -> np.ndarray:
        """bool [size, size]: whether token i sees token j, an ancestor or itself. Padding sees itself only."""
        sees = np.eye(size, dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                sees[node, : parent + 1] |= sees[parent, : parent + 1]
        return sees


def micro_batches(
    rows: Sequence[Row], max_tokens: int, device: torch.device | str = "cpu", tree_cost: LayoutCost | None = None
) -> Iterator[MicroBatch]:
    """The forward passes of a minibatch. Each holds at most `max_tokens` tokens, padding included (one row or tree at least).

    Args:
        tree_cost: what tokens cost the model; None: rows only, no trees.
    """
    plain: list[Row] = list(rows)
    trees: list[PrefixTree] = []
    if tree_cost is not None:
        plain, trees = choose_trees(rows, min(MAX_TREE_TOKENS, max_tokens), tree_cost)
    for part in _by_budget(plain, [row.num_tokens for row in plain], max_tokens):
        yield collate_rows(part, device)
    for forest in _by_budget(trees, [len(tree) for tree in trees], max_tokens):
        yield collate_trees(forest, device)


def choose_trees(rows: Sequence[Row], max_tokens: int, cost: LayoutCost) -> tuple[list[Row], list[PrefixTree]]:
    """The rows that are cheaper alone, and trees of the others.

    Rows are taken in the order of their prompts, so that neighbours share most. The next one joins the tree as long as that costs
    less than computing it alone and lowers the tree's cost per row (the cost of attention grows with the square of the tree, so
    there is a best size); else it begins a new tree. No tree exceeds `max_tokens`.
    """
    trees = [PrefixTree()]
    for row in sorted(rows, key=lambda row: row.prompt_ids):
        tree = trees[-1]
        if tree.rows:
            length = len(tree) + row.num_tokens - tree.num_shared(row)
            extra = cost(length) - cost(len(tree))
            if length > max_tokens or extra >= cost(row.num_tokens) or extra > cost(len(tree)) / len(tree.rows):
                trees.append(tree := PrefixTree())
        tree.add(row)
    alone = [tree.rows[0] for tree in trees if len(tree.rows) == 1]
    return alone, [tree for tree in trees if len(tree.rows) > 1]


def _tokens(row: Row) -> Iterator[int]:
    yield from row.prompt_ids
    yield from row.response_ids


def _by_budget(items: Sequence[Item], lengths: Sequence[int], max_tokens: int) -> list[list[Item]]:
    """Sort by length, longest first, and cut so that items times longest item stays within `max_tokens` (one item at least)."""
    order = sorted(range(len(items)), key=lambda index: -lengths[index])
    parts: list[list[Item]] = []
    longest = 0
    for index in order:
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(items[index])
        else:
            parts.append([items[index]])
            longest = lengths[index]
    return parts


def collate_rows(rows: Sequence[Row], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence a row, padded on the right (token id 0, mask 0)."""
    assert rows, "a micro-batch has at least one row"
    longest = max(row.num_tokens for row in rows)
    input_ids, attention_mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = torch.tensor([*row.prompt_ids, *row.response_ids])
        attention_mask[index, : row.num_tokens] = 1
    columns = [range(len(row.prompt_ids) - 1, row.num_tokens - 1) for row in rows]
    return _micro_batch(rows, [[index] * len(c) for index, c in enumerate(columns)], columns, input_ids, attention_mask, None, device)


def collate_trees(trees: Sequence[PrefixTree], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence a tree, padded on the right; the mask is bool [trees, 1, L, L]."""
    longest = max(len(tree) for tree in trees)
    input_ids, position_ids = torch.zeros(2, len(trees), longest, dtype=torch.int64)
    sees = np.zeros((len(trees), 1, longest, longest), dtype=bool)
    for index, tree in enumerate(trees):
        input_ids[index, : len(tree)] = torch.tensor(tree.tokens)
        position_ids[index, : len(tree)] = torch.tensor(tree.depths)
        sees[index, 0] = tree.ancestors(longest)
    rows = [row for tree in trees for row in tree.rows]
    paths = [path for tree in trees for path in tree.paths]
    homes = [index for index, tree in enumerate(trees) for _ in tree.rows]
    # the node before a response token predicts it
    columns = [path[len(row.prompt_ids) - 1 : -1] for row, path in zip(rows, paths, strict=True)]
    sequences = [[home] * len(c) for home, c in zip(homes, columns, strict=True)]
    return _micro_batch(rows, sequences, columns, input_ids, torch.from_numpy(sees), position_ids, device)


def _micro_batch(
    rows: Sequence[Row],
    sequences: Sequence[Sequence[int]],
    columns: Sequence[Sequence[int]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    device: torch.device | str,
) -> MicroBatch:
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)

    def flat(parts: Iterable[Iterable[int]]) -> torch.Tensor:
        return torch.tensor([number for part in parts for number in part], dtype=torch.int64).to(device)

    return MicroBatch(
        list(rows),
        input_ids.to(device),
        attention_mask.to(device),
        position_ids.to(device),
        flat(sequences),
        flat(columns),
        flat(row.response_ids for row in rows),
        response_mask(rows).to(device),
    )
