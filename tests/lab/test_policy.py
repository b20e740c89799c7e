"""The enumerable policy against numbers worked out by hand and against finite differences."""

import numpy as np
import pytest

from rllm_lightning.lab.policy import Prompt, TabularPolicy, binary_prompt, graded_prompt, prefixes, sequences


@pytest.fixture
def policy():
    rng = np.random.default_rng(3)
    return TabularPolicy(rng.normal(size=(3, 3)), max_length=2)


def test_three_tokens_and_two_positions_make_seven_sequences():
    # () and one non-end token: 1 + 2 prefixes; one sequence of length 1, then 2 prefixes x 3 tokens
    assert prefixes(3, 2) == [(), (1,), (2,)]
    assert sequences(3, 2) == [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_sequence_probabilities_sum_to_one(policy):
    assert policy.probs_Y.sum() == pytest.approx(1, abs=1e-15)


def test_a_sequence_probability_is_the_product_of_its_softmaxes():
    # logits (0, ln 3) after the empty prefix: 1/4, 3/4; then (ln 2, 0): 2/3, 1/3
    policy = TabularPolicy(np.array([[0, np.log(3)], [np.log(2), 0]]), max_length=2)
    np.testing.assert_allclose(policy.probs_Y, [1 / 4, 1 / 2, 1 / 4], rtol=1e-15)


def test_token_scores_are_one_hot_minus_softmax():
    # (1, 0): first token in row 0 is [-1/4, 1-3/4], second token in row 1 is [1-2/3, -1/3]
    policy = TabularPolicy(np.array([[0, np.log(3)], [np.log(2), 0]]), max_length=2)
    np.testing.assert_allclose(policy.token_scores[1], [[-1 / 4, 1 / 4, 0, 0], [0, 0, 1 / 3, -1 / 3]], atol=1e-15)


def test_scores_are_the_gradient_of_the_log_probability(policy):
    h = 1e-6
    for d in range(policy.logits_SV.size):
        bump = np.zeros(policy.logits_SV.size)
        bump[d] = h
        up, down = (TabularPolicy(policy.logits_SV + sign * bump.reshape(policy.logits_SV.shape), 2) for sign in (1, -1))
        slope_Y = (np.log(up.probs_Y) - np.log(down.probs_Y)) / (2 * h)
        np.testing.assert_allclose(policy.scores_YD[:, d], slope_Y, atol=1e-8)


def test_the_expected_score_is_zero(policy):
    np.testing.assert_allclose(policy.probs_Y @ policy.scores_YD, 0, atol=1e-15)


def test_from_probabilities_gives_those_probabilities():
    probs_Y = np.array([0.1, 0.2, 0.05, 0.15, 0.1, 0.3, 0.1])
    np.testing.assert_allclose(TabularPolicy.from_probabilities(probs_Y, 3, 2).probs_Y, probs_Y, rtol=1e-14)


@pytest.mark.parametrize("probs", [[0.5, 0.5], [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
def test_from_probabilities_refuses_zeros_and_wrong_numbers(probs):
    with pytest.raises(ValueError, match="probs_Y: expected 7 numbers above 0"):
        TabularPolicy.from_probabilities(np.array(probs), 3, 2)


def test_rows_must_match_the_prefixes():
    with pytest.raises(ValueError, match="2 rows for 3 prefixes"):
        TabularPolicy(np.zeros((2, 3)), max_length=2)


def test_greedy_takes_the_likeliest_token_not_the_likeliest_sequence():
    # first token 1 has mass .6, but its best sequence (1, 0) has .35 and (0) has .4
    policy = TabularPolicy.from_probabilities(np.array([0.4, 0.35, 0.25]), 2, 2)
    assert policy.sequences[policy.greedy] == (1, 0)


@pytest.mark.parametrize("p", [1 / 8, 1 / 2, 7 / 8])
def test_a_binary_prompt_has_exactly_its_pass_rate(p):
    assert binary_prompt(p).mean_reward == pytest.approx(p, abs=1e-15)


def test_a_pass_rate_of_one_is_refused():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        binary_prompt(1.0)


def test_the_exact_critic_is_the_mean_of_what_may_follow():
    prompt = graded_prompt(0.5)  # probabilities .3, .35, .2, .15; rewards 0, 1, .25, .5
    assert prompt.value(()) == pytest.approx(0.35 + 0.05 + 0.075)
    assert prompt.value((1, 1)) == pytest.approx((0.2 * 0.25 + 0.15 * 0.5) / 0.35)
    assert prompt.value((1, 0)) == 1


def test_a_prompt_is_named_after_its_pass_rate():
    assert isinstance(binary_prompt(0.125), Prompt)
    assert binary_prompt(0.125).name == "p=0.125"
