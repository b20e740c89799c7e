"""Padded rows and prefix trees: the same numbers either way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.trainer.attention_blocks import BLOCK_QUERIES
from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.layout import (
    LayoutCost,
    PrefixTree,
    choose_trees,
    collate_chains,
    collate_rows,
    collate_trees,
    make_chains,
    micro_batches,
)
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.types import Step

CHEAP_ATTENTION = LayoutCost(per_token=1.0, per_pair=0.0)


def rows_of(*pairs, group=0):
    return [Row(Step(prompt_ids=list(p), response_ids=list(r)), index, group, "", None) for index, (p, r) in enumerate(pairs)]


def tree_of(rows):
    tree = PrefixTree()
    for chain in make_chains(rows):
        tree.add(chain)
    return tree


def rows_in(things):
    """The rows of chains or trees."""
    chains = [chain for thing in things for chain in getattr(thing, "chains", [thing])]
    return [row for chain in chains for row in chain.rows]


@pytest.fixture(scope="module")
def policy():
    model, tokenizer = tiny_model(0)
    with torch.no_grad():  # sharpen the random model, so that a wrong mask shows
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return Policy(model, tokenizer, temperature=0.8)


# ------------------------------------------------------------------------------------------------------------- padded rows


def test_the_first_response_token_and_the_end_token_are_trained():
    """B15: prompt of 2, response r1 r2 eos. Over the 4 predicted tokens the mask is [0, 1, 1, 1]: 3 trainable, the response's length."""
    micro = collate_rows(rows_of(([11, 12], [21, 22, 23])))
    predicted = torch.zeros(4)
    predicted[micro.columns_N] = 1
    assert predicted.tolist() == [0, 1, 1, 1]
    assert micro.targets_N.tolist() == [21, 22, 23]
    assert micro.mask_BT.tolist() == [[1, 1, 1]]


def test_rows_of_different_length_are_padded_on_the_right():
    micro = collate_rows(rows_of(([1, 2, 3], [4]), ([5], [6, 7])))
    assert micro.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert micro.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert micro.mask_BT.tolist() == [[1, 0], [1, 1]]
    assert list(zip(micro.sequences_N.tolist(), micro.columns_N.tolist(), micro.targets_N.tolist(), strict=True)) == [
        (0, 2, 4),
        (1, 0, 6),
        (1, 1, 7),
    ]
    assert micro.padded([[9.0], [8.0, 7.0]]).tolist() == [[9, 0], [8, 7]]
    assert micro.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0], [2, 3]]


def test_micro_batches_keep_the_token_budget_and_lose_no_row():
    rows = rows_of(*[([1, 2], [3] * ((7 * i) % 13 + 1)) for i in range(20)])
    parts = list(micro_batches(rows, 40))
    assert sorted(id(row) for part in parts for row in part.rows) == sorted(map(id, rows))
    assert all(part.input_ids.numel() <= 40 for part in parts)
    assert [part.input_ids.shape[0] for part in micro_batches(rows, 1)] == [1] * 20  # a row longer than the budget stands alone


# ------------------------------------------------------------------------------------------------------------------- trees


def test_a_tree_holds_common_tokens_once():
    tree = tree_of(rows_of(([1, 2], [3, 4]), ([1, 2], [3, 5]), ([1, 2], [6])))
    assert tree.tokens == [1, 2, 3, 4, 5, 6]
    assert tree.parents == [-1, 0, 1, 2, 2, 1]
    assert tree.depths == [0, 1, 2, 3, 3, 2]
    assert tree.paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5]]


def test_a_token_of_a_tree_sees_its_ancestors_and_itself():
    sees = tree_of(rows_of(([1], [2, 3]), ([1], [4]))).ancestors(5)  # nodes: 1, 2, 3, 4; the fifth is padding
    assert sees.astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_the_first_tokens_of_responses_are_all_predicted_by_the_last_prompt_token():
    micro = collate_trees([tree_of(rows_of(([1, 2], [3, 4]), ([1, 2], [5])))])
    assert micro.columns_N.tolist() == [1, 2, 1]
    assert micro.targets_N.tolist() == [3, 4, 5]


def test_gradients_that_meet_in_one_place_add_up_in_one_order():
    """Of a thousand responses' first tokens, by two threads; in any other order the last digits are others."""
    micro = collate_trees([tree_of(rows_of(*[([1, 2], [token]) for token in range(1024)]))])
    assert set(micro.columns_N.tolist()) == {1}
    torch.manual_seed(0)
    outputs_SLD = torch.randn(*micro.input_ids.shape, 64, requires_grad=True)
    gathered_ND, slope_ND = micro.gather(outputs_SLD), torch.randn(1024, 64)
    assert gathered_ND.equal(outputs_SLD[0, 1].expand(1024, -1))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = [torch.autograd.grad(gathered_ND, outputs_SLD, slope_ND, retain_graph=True)[0] for _ in range(50)]
    finally:
        torch.set_num_threads(num_threads)
    assert all(gradient.equal(gradients[0]) for gradient in gradients)
    assert torch.allclose(gradients[0][0, 1].double(), slope_ND.double().sum(0), atol=1e-4)


prompts = st.lists(st.integers(10, 14), min_size=1, max_size=5)
responses = st.lists(st.integers(10, 14), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(prompts, st.lists(responses, min_size=1, max_size=4)), min_size=1, max_size=3))
def test_trees_give_the_log_probs_and_gradients_of_plain_rows(policy, groups):
    """Prompts of length 1, equal responses, responses that are prefixes of others: whatever the rows share."""
    rows = [row for g, (prompt, answers) in enumerate(groups) for row in rows_of(*[(prompt, a) for a in answers], group=g)]
    members = [[row for row in rows if row.group == g] for g in range(len(groups))]
    layouts = [collate_rows(rows), collate_trees([tree_of(group) for group in members])]
    results = []
    for micro in layouts:
        scores = policy(micro)
        weights = torch.linspace(-1, 1, scores.logprobs.numel()).reshape(scores.logprobs.shape) * micro.mask_BT
        grads = torch.autograd.grad((weights * scores.logprobs).sum() + 0.1 * scores.entropies.sum(), list(policy.parameters()))
        results.append((scores.logprobs.detach(), torch.cat([g.flatten() for g in grads])))
    assert [id(row) for row in layouts[0].rows] == [id(row) for row in layouts[1].rows]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=5e-5)
    assert (results[1][1] - results[0][1]).norm() <= 1e-5 * results[0][1].norm() + 1e-7


def test_positions_in_a_tree_go_on_from_the_parent(policy):
    """A wrong version with running positions gives other log-probs."""
    rows = rows_of(([10, 11, 12], [13, 14]), ([10, 11, 12], [20, 21]))
    right = collate_trees([tree_of(rows)])
    right_logprobs = policy(right).logprobs
    right.position_ids = torch.arange(right.input_ids.shape[1])[None]
    assert (policy(right).logprobs - right_logprobs).abs().max() > 1e-3


def test_rows_become_a_tree_only_where_that_is_cheaper():
    shared = rows_of(*[(range(1, 50), [60 + i]) for i in range(4)])
    distinct = rows_of(([70], [2, 3, 4]), ([71], [6, 7, 8]))
    plain, trees = choose_trees(make_chains(shared + distinct), 1000, CHEAP_ATTENTION)
    assert [rows_in([tree]) for tree in trees] == [shared]
    assert rows_in(plain) == distinct
    # two rows of 32 tokens that share 2. Tree: 62 tokens and 62^2 = 3844 pairs; alone: 64 tokens and 2 * 32^2 = 2048 pairs
    long_answers = rows_of(([1, 2], range(100, 130)), ([1, 2], range(200, 230)))
    assert choose_trees(make_chains(long_answers), 1000, LayoutCost(1.0, 1.0)) == (make_chains(long_answers), [])


def test_a_short_row_does_not_join_a_long_one_it_shares_nothing_with():
    """Joining adds 2 * 500 * 2 pairs to the tree's mask and saves no token."""
    rows = rows_of((range(1, 501), [600]), ([700], [701]))
    assert choose_trees(make_chains(rows), 1000, LayoutCost(1.0, 1.0)) == (make_chains(rows), [])


def test_a_tree_stops_at_the_size_of_least_cost_per_row():
    """Prompt of 40 shared by answers of 10: a tree of k rows has 40 + 10k tokens and costs, with a pair worth 1/10 of a token,
    (40 + 10k) + (40 + 10k)^2 / 10. Per row: k = 1: 300, 2: 210, 3: 186.7, 4: 180, 5: 180, 6: 183.3: best at 4 or 5."""
    rows = rows_of(*[(range(1, 41), range(100 * i, 100 * i + 10)) for i in range(1, 11)])
    _, trees = choose_trees(make_chains(rows), 1000, LayoutCost(1.0, 0.1))
    assert [len(tree.chains) for tree in trees] == [5, 5]


def test_no_tree_exceeds_the_budget():
    rows = rows_of(*[(range(1, 41), [50 + i, 60 + i]) for i in range(10)])
    plain, trees = choose_trees(make_chains(rows), 45, CHEAP_ATTENTION)
    assert plain == []
    assert sorted(map(id, rows_in(trees))) == sorted(map(id, rows))
    assert [len(tree) for tree in trees] == [44] * 5  # 40 + 2 * 2: a third row would make 46


def test_prompts_that_begin_alike_share_their_beginning():
    rows = rows_of(([1, 2, 3, 4], [5])) + rows_of(([1, 2, 3, 9], [5]), group=1)
    _, (tree,) = choose_trees(make_chains(rows), 100, CHEAP_ATTENTION)
    assert len(tree) == 7


def test_where_attention_goes_in_blocks_a_tree_grows_as_long_as_tokens_are_saved():
    """Long answers to one prompt: over all pairs a tree of them would cost more than rows; in blocks its branches do not see each other."""
    rows = rows_of(*[(range(1, 41), range(100 * i, 100 * i + 80)) for i in range(1, 11)])
    all_pairs, in_blocks = LayoutCost(1.0, 0.1), LayoutCost(1.0, 0.1, in_blocks=True)
    assert choose_trees(make_chains(rows), 1000, all_pairs)[1] == []
    short = rows_of((range(1, 41), [50]))  # an answer that costs more than those before it on the average is no reason to stop
    assert [len(tree.chains) for tree in choose_trees(make_chains(short + rows), 1000, in_blocks)[1]] == [11]
    # a chain of 120 tokens, 80 of them new, is 80 queries of at most 120 keys and those of the block beside it
    assert in_blocks.of_joining(120, 120, 80) == pytest.approx(80 + 0.1 * 80 * (120 + BLOCK_QUERIES))
    # a token that is shared does not pay for a long answer in blocks of its own
    assert choose_trees(make_chains(rows_of(([1], range(2, 60)), ([1], range(70, 130)))), 1000, in_blocks)[1] == []


# ------------------------------------------------------------------------------------------------------------------ chains


def conversation(sequence, *turns, group=0):
    """Rows of one trajectory: each turn gives (new prompt tokens, response)."""
    rows, said = [], []
    for new, response in turns:
        prompt = said + list(new)
        rows.append(Row(Step(prompt_ids=prompt, response_ids=list(response)), sequence, group, "", None))
        said = prompt + list(response)
    return rows


def test_the_turns_of_a_conversation_are_one_sequence_that_trains_each_response():
    """Prompt 1 2, answer 3, feedback 4 5, answer 6 7: of the 6 predicted tokens 3, 6 and 7 are trained; the feedback is not."""
    rows = conversation(0, ([1, 2], [3]), ([4, 5], [6, 7]))
    (micro,) = micro_batches(rows, 100)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert micro.targets_N.tolist() == [3, 6, 7]
    assert micro.columns_N.tolist() == [1, 4, 5]
    assert micro.mask_BT.tolist() == [[1, 0], [1, 1]]
    assert micro.rows == rows


def test_a_turn_that_changes_what_was_said_begins_a_new_sequence():
    """A template that drops the thoughts of earlier turns, a summary in place of the history: no token is made up to join them."""
    first, second = conversation(0, ([1, 2], [3]), ([4], [5]))
    changed = Row(Step(prompt_ids=[1, 2, 9, 4], response_ids=[5]), 0, 0, "", None)
    shorter = Row(Step(prompt_ids=[1, 2], response_ids=[5]), 0, 0, "", None)
    assert [len(chain.rows) for chain in make_chains([first, second, changed, shorter])] == [2, 1, 1]


def test_equal_beginnings_of_two_trajectories_are_not_one_conversation():
    """The second trajectory's prompt happens to be the first one's text: its tokens were sampled elsewhere, weights are per trajectory."""
    rows = rows_of(([1, 2], [3]), ([1, 2, 3], [4]))
    assert [len(chain.rows) for chain in make_chains(rows)] == [1, 1]


turns = st.lists(st.tuples(responses, responses), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.lists(turns, min_size=1, max_size=4), responses)
def test_merged_turns_give_the_log_probs_and_gradients_of_rows_of_their_own(policy, conversations, prompt):
    """Conversations of one task: as rows, as one sequence each, and as a tree of them; gradients agree to 1e-6 in float64."""
    rows = [row for i, turns in enumerate(conversations) for row in conversation(i, ([*prompt, *turns[0][0]], turns[0][1]), *turns[1:])]
    policy.double()
    layouts = [collate_rows(rows), collate_chains(make_chains(rows)), collate_trees([tree_of(rows)])]
    results = []
    for micro in layouts:
        assert [id(row) for row in micro.rows] == [id(row) for row in rows]
        scores = policy(micro)
        weights = torch.linspace(-1, 1, scores.logprobs.numel()).reshape(scores.logprobs.shape) * micro.mask_BT
        grads = torch.autograd.grad((weights * scores.logprobs).sum() + 0.1 * scores.entropies.sum(), list(policy.parameters()))
        results.append((scores.logprobs.detach(), torch.cat([g.flatten() for g in grads])))
    policy.float()
    for logprobs, gradient in results[1:]:
        torch.testing.assert_close(logprobs, results[0][0], rtol=0, atol=1e-9)
        assert (gradient - results[0][1]).norm() <= 1e-6 * results[0][1].norm() + 1e-12


def test_the_tokens_of_a_long_conversation_are_computed_once():
    """20 turns of 10 tokens: 200 tokens as one sequence; as rows of their own 10 + 20 + ... + 200 = 2100."""
    rows = conversation(0, *[([i] * 5, [i] * 5) for i in range(1, 21)])
    assert sum(row.num_tokens for row in rows) == 2100
    (micro,) = micro_batches(rows, 10_000)
    assert micro.input_ids.numel() == 200
    (micro,) = micro_batches(rows + conversation(1, ([1] * 5, [7] * 5)), 10_000, tree_cost=CHEAP_ATTENTION)
    assert micro.input_ids.numel() == 205


def test_the_policy_falls_back_to_rows_for_a_model_that_refuses_the_mask():
    model, tokenizer = tiny_model(0)
    plain_forward = model.model.forward

    def refuse(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 4:
            raise ValueError("no 4-D masks here")
        return plain_forward(*args, attention_mask=attention_mask, **kwargs)

    model.model.forward = refuse
    assert Policy(model, tokenizer).tree_cost is None


def test_the_policy_falls_back_to_rows_for_a_model_that_ignores_the_mask():
    model, tokenizer = tiny_model(0)
    plain_forward = model.model.forward

    def ignore(*args, attention_mask=None, **kwargs):
        return plain_forward(
            *args, attention_mask=None if attention_mask is not None and attention_mask.dim() == 4 else attention_mask, **kwargs
        )

    model.model.forward = ignore
    assert Policy(model, tokenizer).tree_cost is None


def test_eager_attention_takes_trees_too():
    model, tokenizer = tiny_model(0)
    model.set_attn_implementation("eager")
    assert Policy(model, tokenizer).tree_cost is not None


def test_cost_counts_the_body_of_the_model():
    model, _ = tiny_model(0)
    cost = LayoutCost.of(model)
    assert cost.per_token == sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert cost.per_pair == 4 * (2 * 128 + 32 * 4)
    assert np.isclose(cost(10), 10 * cost.per_token + 100 * cost.per_pair)
