"""The inverse CDF, at chosen uniform numbers."""

import math

import pytest
import torch

from rllm_lightning.rollout.engine import SamplingParams
from rllm_lightning.rollout.sampling import BatchSampling, sample

LAST = 1 - 2**-53  # the largest float64 below 1


def draw(logits, uniforms, **params):
    """Tokens and log-probs of one distribution at several uniform numbers."""
    logits_BV = torch.as_tensor(logits).expand(len(uniforms), -1)
    sampling = BatchSampling.of([SamplingParams(**params)] * len(uniforms), logits_BV.device)
    tokens_B, logprobs_B = sample(logits_BV, torch.tensor(uniforms, dtype=torch.float64), sampling)
    return tokens_B.tolist(), logprobs_B.tolist()


def log(*probabilities):
    return torch.tensor(probabilities).log()


def test_each_token_owns_the_interval_of_its_probability():
    """B20: cumulative .5, .75, .875, 1; a number on an edge belongs to the token that begins there."""
    edge = 1e-6  # of float32 probabilities
    uniforms = [0, 0.5 - edge, 0.5 + edge, 0.75 - edge, 0.75 + edge, 0.875 - edge, 0.875 + edge, LAST]
    tokens, logprobs = draw(log(0.5, 0.25, 0.125, 0.125), uniforms)
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)], abs=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000, 49_152])
def test_a_vocabulary_of_any_size_is_cut_into_blocks_without_loss(vocab_size):
    """Uniform over V: the number (i + .5) / V belongs to token i."""
    chosen = sorted({0, vocab_size // 3, vocab_size // 2, 255 % vocab_size, 256 % vocab_size, vocab_size - 1})
    tokens, logprobs = draw(torch.zeros(vocab_size), [(i + 0.5) / vocab_size for i in chosen])
    assert tokens == chosen
    assert logprobs == pytest.approx([-math.log(vocab_size)] * len(chosen), abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, 0.9999999, LAST])
def test_a_token_without_probability_is_never_drawn(u):
    """Weight only on tokens 3 and 700 of 1,000: zeros before, between, after, and whole blocks of them."""
    logits = torch.full((1000,), -math.inf)
    logits[3] = logits[700] = 0.0
    tokens, logprobs = draw(logits, [u])
    assert tokens == [3 if u < 0.5 else 700]
    assert logprobs == pytest.approx([math.log(0.5)], abs=1e-6)


def test_rounding_at_the_end_of_the_cumulative_sum_stays_inside():
    """Random logits whose float sums are not 1; the last number belongs to the last token that has probability."""
    generator = torch.Generator().manual_seed(0)
    for size in (7, 300, 5000):
        logits = torch.randn(size, generator=generator) * 5
        logits[-2:] = -math.inf
        assert draw(logits, [LAST])[0] == [size - 3]
        assert draw(logits, [1.0])[0] == [size - 3]  # beyond what a generator gives


def test_the_distribution_is_softmax_of_logits_over_temperature():
    """B12: logits [2, 0] at T = .5 are log-softmax [4, 0]: token 0 has log-prob -.018150, probability .982014."""
    tokens, logprobs = draw([2.0, 0.0], [0.982, 0.9821], temperature=0.5)
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([-0.018150, -4.018150], abs=1e-6)


def test_temperature_zero_takes_the_most_likely_token_with_its_log_prob_at_temperature_one():
    """B12: no division by 0; log-softmax [0, 2, 2]: -.758591 for the winners (2 - log(1 + 2e^2)), the first of equals wins."""
    tokens, logprobs = draw([0.0, 2.0, 2.0], [0.0, LAST], temperature=0.0)
    assert tokens == [1, 1]
    assert logprobs == pytest.approx([2 - math.log(1 + 2 * math.e**2)] * 2, abs=1e-6)


def test_top_k_keeps_the_most_likely_and_reports_the_renormalised_log_prob():
    """Of .1, .4, .2, .3 the two best are tokens 1 and 3: renormalised 4/7 and 3/7, in the order of the vocabulary."""
    tokens, logprobs = draw(log(0.1, 0.4, 0.2, 0.3), [0, 4 / 7 - 1e-6, 4 / 7 + 1e-6, LAST], top_k=2)
    assert tokens == [1, 1, 3, 3]
    assert logprobs == pytest.approx([math.log(p) for p in (4 / 7, 4 / 7, 3 / 7, 3 / 7)], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_holds_it():
    """Of .1, .4, .2, .3: .65 needs .4 + .3; .75 needs .2 as well; anything keeps one token."""
    for top_p, kept in ((1e-9, [1]), (0.4, [1]), (0.65, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        tokens, _ = draw(log(0.1, 0.4, 0.2, 0.3), [i / 1000 for i in range(1000)], top_p=top_p)
        assert sorted(set(tokens)) == kept
    tokens, _ = draw(torch.zeros(4), [0, 0.5, LAST], top_p=0.5)
    assert set(tokens) == {0, 1}  # two of four equal tokens hold exactly half


def test_top_p_counts_within_what_top_k_left():
    """top_k 2 leaves 4/7 and 3/7; top_p .5 of that is the first alone (of the whole it would be .4 < .5: both)."""
    assert set(draw(log(0.1, 0.4, 0.2, 0.3), [0, 0.5, LAST], top_k=2, top_p=0.5)[0]) == {1}


def test_rows_of_one_batch_keep_their_own_parameters():
    logits_BV = log(0.1, 0.4, 0.2, 0.3).expand(4, -1)
    rows = [SamplingParams(), SamplingParams(temperature=0.0, top_k=1), SamplingParams(top_k=2), SamplingParams(temperature=2.0)]
    tokens_B, logprobs_B = sample(logits_BV, torch.full((4,), LAST, dtype=torch.float64), BatchSampling.of(rows, logits_BV.device))
    assert tokens_B.tolist() == [3, 1, 3, 3]
    roots = [math.sqrt(p) for p in (0.1, 0.4, 0.2, 0.3)]  # temperature 2 takes the square root of odds
    expected = [math.log(0.3), math.log(0.4), math.log(3 / 7), math.log(roots[3] / sum(roots))]
    assert logprobs_B.tolist() == pytest.approx(expected, abs=1e-6)


def test_neutral_parameters_cost_no_tensors():
    assert BatchSampling.of([SamplingParams(max_tokens=3)], torch.device("cpu")) == BatchSampling(None, None, None)


def test_logits_that_are_no_numbers_give_a_log_prob_that_is_none():
    assert math.isnan(draw([0.0, math.nan], [0.5])[1][0])


def test_low_precision_logits_are_sampled_in_float32():
    """A bfloat16 sum of 49,152 probabilities would stall at 1/256 of its true value."""
    tokens, logprobs = draw(torch.zeros(49_152, dtype=torch.bfloat16), [0.5])
    assert tokens == [24_576]
    assert logprobs == pytest.approx([-math.log(49_152)], abs=1e-6)
