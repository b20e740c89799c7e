"""The oracle against closed forms, against its own slower ways, and against sampling."""

import itertools

import numpy as np
import pytest

from rllm_lightning.lab.objectives import log_likelihood, max_of, mean_reward
from rllm_lightning.lab.oracle import fit, from_rewards, gradient_moments, objective_gradient
from rllm_lightning.lab.policy import Prompt, TabularPolicy, binary_prompt, graded_prompt

BINARY = [binary_prompt(p) for p in (1 / 8, 1 / 2, 7 / 8)]
GRADED = [graded_prompt(p) for p in (1 / 8, 1 / 2, 7 / 8)]


def reinforce(rewards):
    return [r.copy() for r in rewards], None


def rloo(rewards):
    return [r - (r.sum() - r) / (len(r) - 1) for r in rewards], None


def centred(rewards):
    return [r - r.mean() for r in rewards], None


def grpo(rewards):
    return [(r - r.mean()) / (r.std() + 1e-6) for r in rewards], None


def batch_whitened(rewards):
    pooled = np.concatenate(rewards)
    return [(r - pooled.mean()) / (pooled.std() + 1e-6) for r in rewards], None


def maxrl(rewards):
    return [(r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r for r in rewards], None


def first_is_baseline(rewards):
    """Depends on the order within the group, on purpose."""
    return [np.concatenate([[0.0], r[1:] - r[0]]) for r in rewards], None


def pkpo(k):
    """PKPO from its definition, one subset at a time: the mean over k-subsets with i of their best minus their best without i,
    scaled so that k = 1 is REINFORCE with the mean of the others as baseline."""

    def estimator(rewards):
        advantages = []
        for r in rewards:
            subsets = list(itertools.combinations(range(len(r)), k))
            gain = [sum(max(r[list(s)]) - max([r[j] for j in s if j != i], default=0) for s in subsets if i in s) for i in range(len(r))]
            others = [r[[j for j in range(len(r)) if j != i]].mean() for i in range(len(r))] if k == 1 else 0
            advantages.append(np.array(gain) * len(r) / len(subsets) - others)
        return advantages, None

    return estimator


def bias(estimator, prompts, n, objective=None, **kwargs):
    moments = gradient_moments(from_rewards(estimator), prompts, n, **kwargs)
    assert moments.exact
    return np.abs(moments.mean_D - objective_gradient(objective or mean_reward(), prompts)).max()


@pytest.mark.parametrize("prompts", [BINARY, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("estimator", [reinforce, rloo])
def test_reinforce_and_rloo_are_unbiased(estimator, n, prompts):
    assert bias(estimator, prompts, n) < 1e-12


@pytest.mark.parametrize("prompts", [BINARY, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_centring_by_the_group_mean_shrinks_the_gradient_by_n_minus_1_over_n(n, prompts):
    moments = gradient_moments(from_rewards(centred), prompts, n)
    np.testing.assert_allclose(moments.mean_D, (n - 1) / n * objective_gradient(mean_reward(), prompts), atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("prompts", [BINARY, GRADED], ids=["binary", "graded"])
def test_pkpo_is_unbiased_for_pass_at_k_and_not_for_the_mean_reward(k, prompts):
    assert bias(pkpo(k), prompts, 4, max_of(k)) < 1e-12
    assert k == 1 or bias(pkpo(k), prompts, 4) > 0.01


@pytest.mark.parametrize("n", [2, 4, 8])
def test_maxrl_is_unbiased_for_the_log_likelihood_to_order_n_minus_1(n):
    # E[A|right] - E[A|wrong] = (1-(1-p)^(n-1)) / p, which is the sum of (1-p)^j over j < n-1
    assert bias(maxrl, BINARY, n, log_likelihood(n - 1)) < 1e-12


@pytest.mark.parametrize("p", [1 / 8, 1 / 2])
def test_grpo_scales_a_pair_by_one_and_a_foursome_by_its_closed_form(p):
    # n=2: only the mixed pair has spread: +-1, E[A|right] = (1-p), E[A|wrong] = -p, together 1.
    # n=4: w = sum_c C(4,c) p^c q^(4-c) sqrt(c (4-c)) / (4 p q), c the number of right answers.
    q = 1 - p
    foursome = sum(count * p**c * q ** (4 - c) * np.sqrt(c * (4 - c)) for c, count in ((1, 4), (2, 6), (3, 4))) / (4 * p * q)
    for n, expected in ((2, 1.0), (4, foursome)):
        prompts = [binary_prompt(p)]
        found = fit(gradient_moments(from_rewards(grpo), prompts, n), objective_gradient(mean_reward(), prompts))
        assert found.scale == pytest.approx(expected, abs=1e-5)  # epsilon is 1e-6 of a std of .43
        assert found.cosine == pytest.approx(1, abs=1e-12)  # one prompt with two rewards: only the length can be wrong


@pytest.mark.parametrize("prompts", [BINARY, GRADED], ids=["binary", "graded"])
def test_dividing_by_the_std_bends_the_direction(prompts):
    bent = fit(gradient_moments(from_rewards(grpo), prompts, 8), objective_gradient(mean_reward(), prompts))
    straight = fit(gradient_moments(from_rewards(centred), prompts, 8), objective_gradient(mean_reward(), prompts))
    assert 0.9 < bent.cosine < 0.999
    assert straight.cosine == pytest.approx(1, abs=1e-12)


def test_the_variance_of_a_single_reinforce_sample_by_hand():
    # bandit, p = .3: g = r (1-p) on logit 1, so Var = p (1-p)^2 - (p (1-p))^2 = .147 - .0441; twice that over both logits
    prompt = Prompt("bandit", TabularPolicy(np.array([[np.log(0.7), np.log(0.3)]]), 1), np.array([0.0, 1.0]))
    moments = gradient_moments(from_rewards(reinforce), [prompt], 1)
    np.testing.assert_allclose(moments.covariance_DD, 0.1029 * np.array([[1, -1], [-1, 1]]), rtol=1e-12)


@pytest.mark.parametrize("estimator", [reinforce, rloo, grpo])
def test_multisets_tuples_and_unmerged_sequences_agree(estimator):
    prompts = [binary_prompt(0.3), graded_prompt(0.6)]
    fast = gradient_moments(from_rewards(estimator), prompts, 4)
    for slow in ({"ordered": True}, {"by_reward": False}, {"ordered": True, "by_reward": False}):
        other = gradient_moments(from_rewards(estimator), prompts, 4, **slow)
        np.testing.assert_allclose(other.mean_D, fast.mean_D, atol=1e-13)
        np.testing.assert_allclose(other.covariance_DD, fast.covariance_DD, atol=1e-13)
        assert other.num_batches > fast.num_batches


def test_where_order_matters_tuples_see_it_and_multisets_do_not():
    # a baseline that another sample draws leaves the n-1 others unbiased: (n-1)/n of the gradient
    prompts, gradient = [binary_prompt(0.3)], objective_gradient(mean_reward(), [binary_prompt(0.3)])
    tuples = gradient_moments(from_rewards(first_is_baseline), prompts, 4, ordered=True)
    np.testing.assert_allclose(tuples.mean_D, 0.75 * gradient, atol=1e-13)
    multisets = gradient_moments(from_rewards(first_is_baseline), prompts, 4)
    assert np.abs(multisets.mean_D - tuples.mean_D).max() > 0.01


def test_a_group_estimator_gives_the_same_moments_batch_by_batch():
    alone = gradient_moments(from_rewards(grpo), BINARY, 4, scope="group")
    together = gradient_moments(from_rewards(grpo), BINARY, 4, scope="role-batch")
    np.testing.assert_allclose(together.mean_D, alone.mean_D, atol=1e-13)
    np.testing.assert_allclose(together.covariance_DD, alone.covariance_DD, atol=1e-13)


def test_whitening_over_the_batch_couples_the_prompts():
    moments = gradient_moments(from_rewards(batch_whitened), BINARY, 2, scope="role-batch")
    assert np.abs(moments.covariance_DD[:6, 6:12]).max() > 1e-4


def test_drawn_batches_agree_with_listed_ones_within_their_standard_error():
    exact = gradient_moments(from_rewards(batch_whitened), BINARY, 4, scope="role-batch")
    drawn = gradient_moments(from_rewards(batch_whitened), BINARY, 4, scope="role-batch", max_batches=100, seed=7)
    assert (exact.exact, exact.num_batches, drawn.exact, drawn.num_batches) == (True, 5**3, False, 100)
    assert np.all(np.abs(drawn.mean_D - exact.mean_D) < 4 * drawn.error_D + 1e-15)
    gradient = objective_gradient(mean_reward(), BINARY)
    assert abs(fit(drawn, gradient).scale - fit(exact, gradient).scale) < 4 * fit(drawn, gradient).scale_error
    assert np.trace(drawn.covariance_DD) == pytest.approx(np.trace(exact.covariance_DD), rel=0.25)


def test_moments_agree_with_a_plain_simulation():
    prompt, n, rng = graded_prompt(0.4), 4, np.random.default_rng(11)
    index = rng.choice(4, size=(40_000, n), p=prompt.policy.probs_Y)
    advantages = np.array(grpo(list(prompt.rewards_Y[index]))[0])
    gradients = np.einsum("bn,bnd->bd", advantages, prompt.policy.scores_YD[index]) / n
    exact = gradient_moments(from_rewards(grpo), [prompt], n)
    error_D = gradients.std(axis=0) / np.sqrt(len(gradients))
    assert np.all(np.abs(gradients.mean(axis=0) - exact.mean_D) < 4 * error_D)
    np.testing.assert_allclose(np.cov(gradients.T), exact.covariance_DD, atol=0.02 * np.trace(exact.covariance_DD))


def test_advantages_per_token_that_are_all_alike_equal_one_for_the_sequence():
    def per_token(groups):
        return [
            [np.full(len(prompt.policy.sequences[y]), a) for y, a in zip(index_n, advantages_n, strict=True)]
            for (prompt, index_n), advantages_n in zip(groups, from_rewards(rloo)(groups), strict=True)
        ]

    tokens = gradient_moments(per_token, GRADED, 3, by_reward=False)
    scalar = gradient_moments(from_rewards(rloo), GRADED, 3, by_reward=False)
    np.testing.assert_allclose(tokens.mean_D, scalar.mean_D, atol=1e-13)
    np.testing.assert_allclose(tokens.covariance_DD, scalar.covariance_DD, atol=1e-13)


def test_a_constant_baseline_changes_the_noise_and_not_the_mean():
    def baselined(rewards):
        return [r - 0.5 for r in rewards], None

    gradient = objective_gradient(mean_reward(), BINARY)
    plain, better = (fit(gradient_moments(from_rewards(e), BINARY, 4), gradient) for e in (reinforce, baselined))
    assert better.bias < 1e-12
    assert better.variance < plain.variance


def test_a_fit_of_the_zero_estimator_has_no_angle_and_no_noise():
    def zero(rewards):
        return [0 * r for r in rewards], None

    found = fit(gradient_moments(from_rewards(zero), BINARY, 4), objective_gradient(mean_reward(), BINARY))
    assert (found.bias, found.scale, found.cosine, found.variance, found.signal_to_noise) == (1, 0, None, 0, None)
