"""How the rows of a minibatch are laid out for the model, so that no token is computed more often than it pays.

    rows --the turns of a conversation--> Chain --sorted by prompt--> PrefixTree (grown while that is cheaper)
                                            |                            |
                                       collate_chains               collate_trees
                                  one sequence a conversation     one sequence a tree

A later turn's prompt is all of the turn before and something new. As rows of their own, k turns compute the first prompt k times; as
a chain, one sequence whose responses are all trained, once: causal attention sees to it that each turn sees what it saw.

A group's n responses follow one prompt, and all prompts of a task may begin alike. As padded sequences the prompt is computed n times;
in a tree, `prompt, response 1, ..., response n`, once: every token sees its ancestors alone, and positions go on from the parent.
That saves tokens, but a model's own attention reaches over the whole tree: `LayoutCost` says how far it pays. Attention in blocks
(`attention_blocks.py`) leaves out what the branches do not see.

Either way log-probs and gradients are those of plain rows, and whoever reads them sees plain rows: losses, weights and metrics do
not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from rllm_lightning.trainer.attention_blocks import BLOCK_QUERIES
from rllm_lightning.trainer.batch import MicroBatch, Row, response_mask

Item = TypeVar("Item", "Chain", "PrefixTree")

MAX_TREE_TOKENS = 2048  # of a tree; its mask grows with the square
SOFTMAX_COST = 32  # of a pair in one head, in multiply-adds: mask, exponential and their gradients


@dataclass(frozen=True)
class LayoutCost:
    """What tokens cost a model, in multiply-adds: `per_token` for its matrix products, `per_pair` for a query and a key.

    `in_blocks`: whether attention leaves out what a tree's branches do not see (`attention_blocks.py`), or computes all pairs.
    """

    per_token: float
    per_pair: float
    in_blocks: bool = False

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

    def of_joining(self, tree_length: int, length: int, num_new: int) -> float:
        """What a tree costs more with a chain of some length, of which so many tokens are new to it."""
        if self.in_blocks:
            return num_new * self.per_token + num_new * (length + BLOCK_QUERIES) * self.per_pair
        return self(tree_length + num_new) - self(tree_length)


@dataclass
class Chain:
    """Rows of one trajectory, the prompt of each beginning with all tokens of the one before: the last one's tokens hold them all."""

    rows: list[Row]

    @property
    def tokens(self) -> list[int]:
        return self.rows[-1].tokens

    def __len__(self) -> int:
        return self.rows[-1].num_tokens

    def extended_by(self, row: Row) -> bool:
        """Whether `row` is a later turn of this conversation."""
        return row.sequence == self.rows[-1].sequence and row.prompt_ids[: len(self)] == self.tokens


def make_chains(rows: Iterable[Row]) -> list[Chain]:
    """The rows, later turns joined to the one before them. A turn whose prompt changed what was said begins a new chain."""
    chains: list[Chain] = []
    for row in rows:
        if chains and chains[-1].extended_by(row):
            chains[-1].rows.append(row)
        else:
            chains.append(Chain([row]))
    return chains


@dataclass
class PrefixTree:
    """The distinct prefixes of some chains. Node i holds one token; its parent stands before it (-1: a first token)."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # the nodes of each chain's tokens
    _children: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def num_shared(self, chain: Chain) -> int:
        """How many of the chain's first tokens are in the tree already."""
        node, count = -1, 0
        for token in chain.tokens:
            child = self._children.get((node, token))
            if child is None:
                break
            node, count = child, count + 1
        return count

    def add(self, chain: Chain) -> None:
        """Walk down from the root along the chain's tokens, making the nodes that are not there."""
        node, path = -1, []
        for token in chain.tokens:
            child = self._children.get((node, token))
            if child is None:
                child = self._children[(node, token)] = len(self.tokens)
                self.depths.append(0 if node < 0 else self.depths[node] + 1)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            path.append(node)
        self.chains.append(chain)
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
    """The forward passes of a minibatch. Each holds at most `max_tokens` tokens, padding included (one chain or tree at least).

    Args:
        tree_cost: what tokens cost the model; None: chains only, no trees.
    """
    chains = make_chains(rows)
    trees: list[PrefixTree] = []
    if tree_cost is not None:
        chains, trees = choose_trees(chains, min(MAX_TREE_TOKENS, max_tokens), tree_cost)
    for part in _by_budget(chains, max_tokens):
        yield collate_chains(part, device)
    for forest in _by_budget(trees, max_tokens):
        yield collate_trees(forest, device)


def choose_trees(chains: Sequence[Chain], max_tokens: int, cost: LayoutCost) -> tuple[list[Chain], list[PrefixTree]]:
    """The chains that are cheaper alone, and trees of the others.

    Chains are taken in the order of their first prompts, so that neighbours share most. The next one joins the tree as long as that
    costs less than computing it alone; else it begins a new tree. Where attention goes over all pairs, the tree's cost per chain must
    get lower as well (it grows with the square of the tree, so there is a best size). No tree exceeds `max_tokens`.
    """
    trees = [PrefixTree()]
    for chain in sorted(chains, key=lambda chain: chain.rows[0].prompt_ids):
        tree = trees[-1]
        if tree.chains:
            num_new = len(chain) - tree.num_shared(chain)
            extra = cost.of_joining(len(tree), len(chain), num_new)
            is_larger_than_best = not cost.in_blocks and extra > cost(len(tree)) / len(tree.chains)
            if len(tree) + num_new > max_tokens or extra >= cost(len(chain)) or is_larger_than_best:
                trees.append(tree := PrefixTree())
        tree.add(chain)
    alone = [tree.chains[0] for tree in trees if len(tree.chains) == 1]
    return alone, [tree for tree in trees if len(tree.chains) > 1]


def _by_budget(items: Sequence[Item], max_tokens: int) -> list[list[Item]]:
    """Sort by length, longest first, and cut so that items times longest item stays within `max_tokens` (one item at least)."""
    parts: list[list[Item]] = []
    longest = 0
    for item in sorted(items, key=len, reverse=True):
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(item)
        else:
            parts.append([item])
            longest = len(item)
    return parts


def collate_rows(rows: Sequence[Row], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence a row, padded on the right (token id 0, mask 0): the plain layout that the others are measured against."""
    return collate_chains([Chain([row]) for row in rows], device)


def collate_chains(chains: Sequence[Chain], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence a chain, padded on the right (token id 0, mask 0)."""
    assert chains, "a micro-batch has at least one row"
    longest = max(map(len, chains))
    input_ids, attention_mask = torch.zeros(2, len(chains), longest, dtype=torch.int64)
    for index, chain in enumerate(chains):
        input_ids[index, : len(chain)] = torch.tensor(chain.tokens)
        attention_mask[index, : len(chain)] = 1
    nodes = [range(len(chain)) for chain in chains]
    return _micro_batch(chains, range(len(chains)), nodes, input_ids, attention_mask, None, [*map(len, chains)], device)


def collate_trees(trees: Sequence[PrefixTree], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence a tree, padded on the right; the mask is bool [trees, 1, L, L]."""
    longest = max(len(tree) for tree in trees)
    input_ids, position_ids = torch.zeros(2, len(trees), longest, dtype=torch.int64)
    sees = np.zeros((len(trees), 1, longest, longest), dtype=bool)
    for index, tree in enumerate(trees):
        input_ids[index, : len(tree)] = torch.tensor(tree.tokens)
        position_ids[index, : len(tree)] = torch.tensor(tree.depths)
        sees[index, 0] = tree.ancestors(longest)
    chains = [chain for tree in trees for chain in tree.chains]
    homes = [index for index, tree in enumerate(trees) for _ in tree.chains]
    paths = [path for tree in trees for path in tree.paths]
    return _micro_batch(chains, homes, paths, input_ids, torch.from_numpy(sees), position_ids, [*map(len, trees)], device)


def _micro_batch(
    chains: Sequence[Chain],
    homes: Sequence[int],
    paths: Sequence[Sequence[int]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    lengths: list[int],
    device: torch.device | str,
) -> MicroBatch:
    """Chain i stands in sequence `homes[i]`, its tokens in the columns `paths[i]`."""
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    rows = [row for chain in chains for row in chain.rows]
    placed = [(home, path, row) for chain, home, path in zip(chains, homes, paths, strict=True) for row in chain.rows]

    def flat(parts: Iterable[Iterable[int]]) -> torch.Tensor:
        return torch.tensor([number for part in parts for number in part], dtype=torch.int64).to(device)

    return MicroBatch(
        rows,
        input_ids.to(device),
        attention_mask.to(device),
        position_ids.to(device),
        lengths,
        flat([home] * len(row.response_ids) for home, _, row in placed),
        # the token before a response token predicts it
        flat(path[len(row.prompt_ids) - 1 : row.num_tokens - 1] for _, path, row in placed),
        flat(row.response_ids for row in rows),
        response_mask(rows).to(device),
    )
