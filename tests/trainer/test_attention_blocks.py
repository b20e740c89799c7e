"""Blocks cover what the mask of a tree lets see, once, and little more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_lightning.trainer import attention_blocks as module
from rllm_lightning.trainer.attention_blocks import attention_blocks
from rllm_lightning.trainer.layout import PrefixTree, collate_chains, collate_trees, make_chains
from tests.trainer.test_layout import rows_of, tree_of


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_QUERIES", 3)
    monkeypatch.setattr(module, "MULTIPLE", 4)


def seen_pairs(micro):
    """(query, key) pairs of the blocks, which must be no pair twice; and how often each token is a query."""
    pairs, queries = [], []
    for query_BQ, key_BC, sees_BQC in attention_blocks(micro):
        for query_Q, key_C, sees_QC in zip(query_BQ.tolist(), key_BC.tolist(), sees_BQC.tolist(), strict=True):
            for query, sees_C in zip(query_Q, sees_QC, strict=True):
                assert any(sees_C)
                pairs += [(query, key) for key, sees in zip(key_C, sees_C, strict=True) if sees and query >= 0]
            queries += [query for query in query_Q if query >= 0]
    assert len(set(pairs)) == len(pairs)
    return set(pairs), queries


def pairs_of_mask(micro):
    pairs, first = set(), 0
    for length, sees_LL in zip(micro.lengths, micro.attention_mask[:, 0], strict=True):
        pairs |= {(first + i, first + j) for i, j in sees_LL[:length, :length].nonzero().tolist()}
        first += length
    return pairs


tokens = st.lists(st.integers(10, 12), min_size=1, max_size=7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5), min_size=1, max_size=3))
def test_blocks_see_what_the_mask_says(forest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_QUERIES", 3)
        micro = collate_trees([tree_of(rows_of(*rows)) for rows in forest])
        pairs, queries = seen_pairs(micro)
    assert pairs == pairs_of_mask(micro)
    assert queries.count(0) == 1
    assert sorted(queries) == list(range(sum(micro.lengths)))


def test_a_branch_s_keys_are_the_way_down_to_it_and_its_own(small_blocks):
    """Prompt 1 2 3, responses 4 5 6 and 7 8 9: the last block has three queries, and keys 0, 1, 2 and 6, 7, 8."""
    (blocks,) = attention_blocks(collate_trees([tree_of(rows_of(([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [7, 8, 9])))]))[1:]
    assert blocks.query_BQ.tolist() == [[3, 4, 5, -1], [6, 7, 8, -1]]
    assert blocks.key_BC.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1], [0, 1, 2, 6, 7, 8, -1, -1]]
    assert blocks.sees_BQC[1].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],  # padding
    ]


def test_blocks_with_far_more_keys_are_a_call_of_their_own(small_blocks):
    """A conversation of 30 tokens beside answers of one: these are not padded to 30 keys."""
    tree = tree_of(rows_of(([1], range(2, 31)), ([1], [40]), ([1], [41]), ([1], [42])))
    sizes = sorted((len(blocks.key_BC), blocks.key_BC.shape[1]) for blocks in attention_blocks(collate_trees([tree])))
    assert sizes == [(1, 8), (2, 4), (3, 16), (5, 32)]


def test_pairs_grow_with_the_tokens_of_a_tree_not_with_their_square():
    """Responses of 40 tokens to a prompt of 80. Ten times the responses have a hundred times the pairs, and ten times those in blocks."""

    def num_pairs(num_responses):
        tree = PrefixTree()
        for chain in make_chains(rows_of(*[(range(80), range(100 * i, 100 * i + 40)) for i in range(1, num_responses + 1)])):
            tree.add(chain)
        return sum(blocks.sees_BQC.numel() for blocks in attention_blocks(collate_trees([tree])))

    assert 9 < num_pairs(100) / num_pairs(10) < 11
    assert num_pairs(100) < 0.06 * (80 + 100 * 40) ** 2


def test_sequences_without_a_tree_are_one_block_each():
    micro = collate_chains(make_chains(rows_of(([1, 2], [3]), ([4], [5]))))
    ((query_BQ, key_BC, sees_BQC),) = attention_blocks(micro)
    assert query_BQ.tolist() == key_BC.tolist() == [[0, 1, 2], [3, 4, -1]]
    assert sees_BQC is None
