"""Exact values and gradients of objectives."""

import dataclasses

import numpy as np
import pytest

from rllm_lightning.lab.objectives import closeness_to_teacher, log_likelihood, max_of, mean_reward, parse_objective
from rllm_lightning.lab.policy import Prompt, TabularPolicy, binary_prompt, graded_prompt


def bandit(p: float) -> Prompt:
    """Two sequences of one token; the second is right with probability p."""
    return Prompt("bandit", TabularPolicy(np.array([[np.log(1 - p), np.log(p)]]), 1), np.array([0.0, 1.0]))


def test_the_bernoulli_gradient_is_p_times_one_minus_p():
    # d p / d logit_1 = p (1-p), by logit_0 the negative
    np.testing.assert_allclose(mean_reward().gradient(bandit(0.3)), [-0.21, 0.21], rtol=1e-14)


def test_pass_at_k_of_a_bandit():
    # 1 - .7^3 = .657; gradient 3 * .7^2 * .21 = .3087
    assert max_of(3).value(bandit(0.3)) == pytest.approx(0.657)
    np.testing.assert_allclose(max_of(3).gradient(bandit(0.3)), [-0.3087, 0.3087], rtol=1e-13)


def test_the_log_likelihood_to_a_high_order_is_log_p():
    # d log p / d logit = 1-p
    assert log_likelihood(400).value(bandit(0.3)) == pytest.approx(np.log(0.3))
    np.testing.assert_allclose(log_likelihood(400).gradient(bandit(0.3)), [-0.7, 0.7], rtol=1e-12)


def test_the_log_likelihood_to_order_one_climbs_the_mean_reward():
    prompt = binary_prompt(0.3)
    np.testing.assert_allclose(log_likelihood(1).gradient(prompt), mean_reward().gradient(prompt), rtol=1e-13)


def test_the_log_likelihood_refuses_graded_rewards():
    with pytest.raises(ValueError, match="needs rewards 0 and 1"):
        log_likelihood(3).gradient(graded_prompt(0.3))


def test_the_best_of_one_is_the_mean_reward():
    prompt = graded_prompt(0.3)
    assert max_of(1).value(prompt) == pytest.approx(mean_reward().value(prompt))
    np.testing.assert_allclose(max_of(1).gradient(prompt), mean_reward().gradient(prompt))


def test_the_best_of_two_graded_rewards_is_the_double_sum():
    prompt = graded_prompt(0.3)
    q, r = prompt.policy.probs_Y, prompt.rewards_Y
    assert max_of(2).value(prompt) == pytest.approx(sum(q[i] * q[j] * max(r[i], r[j]) for i in range(4) for j in range(4)))


ANY_REWARD = [mean_reward(), max_of(2), max_of(5), closeness_to_teacher()]


@pytest.mark.parametrize(
    ("objective", "make"),
    [*((objective, make) for objective in ANY_REWARD for make in (binary_prompt, graded_prompt)), (log_likelihood(4), binary_prompt)],
    ids=lambda part: getattr(part, "name", getattr(part, "__name__", "")),
)
def test_every_gradient_is_the_derivative_of_its_value(objective, make):
    prompt = make(0.3)
    policy, h = prompt.policy, 1e-6
    numeric = []
    for d in range(policy.logits_SV.size):
        bump = np.zeros(policy.logits_SV.size)
        bump[d] = h
        shifted = [TabularPolicy(policy.logits_SV + s * bump.reshape(policy.logits_SV.shape), policy.max_length) for s in (1, -1)]
        up, down = (objective.value(dataclasses.replace(prompt, policy=p)) for p in shifted)
        numeric.append((up - down) / (2 * h))
    np.testing.assert_allclose(objective.gradient(prompt), numeric, atol=1e-8)


def test_a_prompt_without_teacher_cannot_be_distilled():
    with pytest.raises(ValueError, match="no teacher"):
        closeness_to_teacher().gradient(bandit(0.3))


def test_an_unknown_objective_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown 'mean'; known: mean_reward, pass_at_k"):
        parse_objective("mean", n=4, k=2)


@pytest.mark.parametrize("k", [0, 1.5, None])
def test_pass_at_k_needs_a_k(k):
    with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
        max_of(k)
