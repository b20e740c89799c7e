"""Row weights of every aggregation mode: hand-worked, against plain loops, and over every split of the rows."""

import subprocess
import sys
from collections import defaultdict
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_lightning.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from rllm_lightning.algorithms.losses import aggregate_loss
from rllm_lightning.config import AlgorithmConfig

NORM_LENGTH = 10


def mean(values):
    return sum(values) / len(values) if values else 0.0


def slow_aggregate(rows, sequence_ids, prompt_ids, mode):
    """`rows` are lists of token losses. Means are taken the long way: over dictionaries of lists."""
    by_sequence, by_prompt = defaultdict(list), defaultdict(list)
    for row, sequence, prompt in zip(rows, sequence_ids, prompt_ids, strict=True):
        if row:
            by_sequence[sequence] += row
            by_prompt[prompt] += row
    tokens = [token for row in rows for token in row]
    return {
        "token-mean": lambda: mean(tokens),
        "token-sum": lambda: sum(tokens),
        "seq-mean-token-sum": lambda: mean([sum(s) for s in by_sequence.values()]),
        "seq-mean-token-mean": lambda: mean([mean(s) for s in by_sequence.values()]),
        "seq-mean-token-sum-norm": lambda: mean([sum(s) / NORM_LENGTH for s in by_sequence.values()]),
        "prompt-mean": lambda: mean([mean(p) for p in by_prompt.values()]),
    }[mode]()


def pad(rows):
    """Rows of token losses as [B, T] tensors: losses (NaN in padding) and mask."""
    width = max([len(row) for row in rows], default=0) or 1
    losses = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        losses[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return losses, mask


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # three rows of 1, 3 and 2 tokens; the first two are one sequence; rows 0-1 answer prompt p, row 2 prompt q
        ("token-mean", [1 / 6, 1 / 6, 1 / 6]),
        ("token-sum", [1, 1, 1]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 8, 1 / 8, 1 / 4]),  # 2 sequences of 4 and 2 tokens
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 1 / 20]),  # 2 sequences, length 10
        ("prompt-mean", [1 / 8, 1 / 8, 1 / 4]),
    ],
)
def test_weights_of_two_sequences_are_those_worked_out_by_hand(mode, expected):
    weights = loss_weights([1, 3, 2], ["a", "a", "b"], ["p", "p", "q"], mode, NORM_LENGTH)
    np.testing.assert_allclose(weights, expected, rtol=1e-15)
    assert weights.dtype == np.float64


def test_prompt_mean_weighs_prompts_and_not_sequences():
    # prompt p: sequences a (1 token) and b (3 tokens); prompt q: c (1 token). Per token: p 1/(2·4), q 1/(2·1)
    weights = loss_weights([1, 3, 1], ["a", "b", "c"], ["p", "p", "q"], "prompt-mean")
    np.testing.assert_allclose(weights, [1 / 8, 1 / 8, 1 / 2])


def test_every_mode_of_the_config_is_known_and_no_other():
    assert set(AGGREGATION_MODES) == set(get_args(get_type_hints(AlgorithmConfig)["loss_agg_mode"]))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_without_tokens_the_loss_is_zero_and_so_is_its_gradient(mode):
    """B10: everything truncated."""
    weights = loss_weights([0, 0], ["a", "b"], ["p", "p"], mode, NORM_LENGTH)
    assert weights.tolist() == [0.0, 0.0]
    token_losses = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = aggregate_loss(token_losses, torch.zeros(2, 3), weights)
    loss.backward()
    assert loss.item() == 0.0
    assert not token_losses.grad.any()
    assert loss_weights([], [], [], mode, NORM_LENGTH).shape == (0,)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_rows_without_tokens_count_nowhere(mode):
    """B10: padding rows and responses that were masked out do not shrink the loss."""
    alone = loss_weights([4, 2], ["a", "b"], ["p", "q"], mode, NORM_LENGTH)
    padded = loss_weights([4, 0, 2, 0], ["a", "c", "b", "d"], ["p", "r", "q", "s"], mode, NORM_LENGTH)
    np.testing.assert_array_equal(padded, [alone[0], 0, alone[1], 0])


def test_a_truncated_response_that_is_masked_out_leaves_the_mean_at_one():
    """B10: 4 finished tokens and 8 truncated ones, every loss 1: 4/4 = 1, not 4/12; the same with 3 padding rows; then nothing is left."""
    losses = torch.ones(5, 8)
    mask = torch.zeros(5, 8)
    mask[0, :4] = 1
    for num_rows in (2, 5):
        tokens = mask[:num_rows].sum(-1).numpy()
        ids = np.arange(num_rows)
        loss = aggregate_loss(losses[:num_rows], mask[:num_rows], loss_weights(tokens, ids, ids, "token-mean"))
        assert loss.item() == 1.0
    mask[0] = 0
    ids = np.arange(5)
    assert aggregate_loss(losses, mask, loss_weights(mask.sum(-1).numpy(), ids, ids, "token-mean")).item() == 0.0


def test_one_batch_two_micro_batches_and_two_ranks_have_the_same_loss_and_gradient():
    """B09: token losses [1] and [0, 0, 0] come to .25 each way (a mean of means gives .5)."""
    features = torch.tensor([[1.0, 7.0, 7.0], [0.0, 0.0, 0.0]])  # 7: padding
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    weights = loss_weights([1, 3], ["a", "b"], ["p", "p"], "token-mean")

    def run(parts):
        parameter = torch.tensor(1.0, requires_grad=True)
        losses = [aggregate_loss(parameter * features[part], mask[part], weights[part]) for part in parts]
        for loss in losses:
            loss.backward()
        return sum(loss.item() for loss in losses), parameter.grad.item()

    assert run([slice(0, 2)]) == (0.25, 0.25)
    assert run([slice(0, 1), slice(1, 2)]) == (0.25, 0.25)
    # two ranks: each multiplies by the world size 2, since the gradients are averaged over ranks
    by_rank = [run([part]) for part in (slice(0, 1), slice(1, 2))]
    assert np.mean([2 * gradient for _, gradient in by_rank]) == 0.25


token_losses = st.floats(-5, 5).map(lambda x: round(x, 3))
row = st.lists(token_losses, min_size=0, max_size=4)
batches = st.lists(st.tuples(row, st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(batch=batches, mode=st.sampled_from(AGGREGATION_MODES))
def test_weights_agree_with_plain_loops(batch, mode):
    rows, sequences, prompts = map(list, zip(*batch, strict=True))
    losses, mask = pad(rows)
    weights = loss_weights(mask.sum(-1).numpy(), sequences, prompts, mode, NORM_LENGTH)
    assert aggregate_loss(losses, mask, weights).item() == pytest.approx(slow_aggregate(rows, sequences, prompts, mode), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(batch=batches, mode=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_any_split_of_the_rows_into_ranks_and_micro_batches_gives_the_same_loss_and_gradient(batch, mode, data):
    rows, sequences, prompts = map(list, zip(*batch, strict=True))
    losses, mask = pad(rows)
    parts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)), label="part of each row"))
    weights = loss_weights(mask.sum(-1).numpy(), sequences, prompts, mode, NORM_LENGTH)

    def gradient_and_loss(chosen):
        parameter = torch.ones(mask.shape[1], dtype=torch.float64, requires_grad=True)  # one a position
        loss = aggregate_loss(losses[chosen].nan_to_num() * parameter, mask[chosen], weights[chosen])
        loss.backward()
        result = np.append(parameter.grad.numpy(), loss.item())
        assert np.isfinite(result).all()
        return result

    whole = gradient_and_loss(np.arange(len(rows)))
    split = sum(gradient_and_loss(np.flatnonzero(parts == part)) for part in range(4))
    np.testing.assert_allclose(split, whole, atol=1e-12)


def test_an_unknown_mode_and_a_missing_length_name_the_key():
    with pytest.raises(ValueError, match=r"rllm\.algorithm\.loss_agg_mode.*'mean'.*token-mean"):
        loss_weights([1], ["a"], ["p"], "mean")
    for length in (None, 0):
        with pytest.raises(ValueError, match=r"rllm\.algorithm\.loss_norm_length"):
            loss_weights([1], ["a"], ["p"], "seq-mean-token-sum-norm", length)


def test_weights_need_no_torch():
    code = "import sys, rllm_lightning.algorithms.aggregation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
