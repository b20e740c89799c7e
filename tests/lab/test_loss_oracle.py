"""Every registered loss against the exact gradient."""

import numpy as np
import pytest
import torch

from rllm_lightning.algorithms.correction import rollout_correction_weights
from rllm_lightning.lab.loss_oracle import importance_gradient, loss_direction
from rllm_lightning.lab.objectives import closeness_to_teacher, mean_reward
from rllm_lightning.lab.policy import Prompt, TabularPolicy, graded_prompt
from rllm_lightning.registry import LOSSES

PROMPT = graded_prompt(0.3)
ADVANTAGES = PROMPT.rewards_Y - PROMPT.mean_reward  # of both signs, for the losses that treat them apart
EXACT = mean_reward().gradient(PROMPT)
BEHAVIOUR = graded_prompt(0.4).policy

ONE_TOKEN = Prompt("one token", TabularPolicy(np.array([[0.3, -0.2, 1.0]]), 1), np.array([1.0, 0.3, -0.5]))
ONE_TOKEN_BEHAVIOUR = TabularPolicy(np.array([[0.1, 0.1, 0.8]]), 1)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_at_ratio_one_every_loss_is_the_policy_gradient(name):
    np.testing.assert_allclose(loss_direction(LOSSES.get(name), PROMPT.policy, ADVANTAGES), EXACT, atol=1e-12)


def test_cross_entropy_on_the_teachers_data_closes_in_on_the_teacher():
    # -grad KL(teacher || pi) = sum_y teacher(y) score(y); on its own data the expected score is 0
    loss, teacher = LOSSES.get("cross_entropy"), PROMPT.teacher
    found = loss_direction(loss, PROMPT.policy, ADVANTAGES, teacher)
    np.testing.assert_allclose(found, teacher.probs_Y @ PROMPT.policy.scores_YD, atol=1e-12)
    np.testing.assert_allclose(loss_direction(loss, PROMPT.policy, ADVANTAGES), 0, atol=1e-12)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_off_policy_a_ratio_per_token_gives_its_own_exact_gradient(name):
    # ratios stay inside [.8, 1.2], so nothing is clipped
    behaviour = graded_prompt(0.32).policy
    found = loss_direction(LOSSES.get(name), PROMPT.policy, ADVANTAGES, behaviour)
    np.testing.assert_allclose(found, importance_gradient(PROMPT.policy, ADVANTAGES, behaviour), atol=1e-12)


@pytest.mark.parametrize("name", ["importance_sampling", "cispo"])
def test_off_policy_data_of_one_token_give_the_gradient_of_the_trained_policy(name):
    found = loss_direction(LOSSES.get(name), ONE_TOKEN.policy, ONE_TOKEN.rewards_Y, ONE_TOKEN_BEHAVIOUR)
    np.testing.assert_allclose(found, mean_reward().gradient(ONE_TOKEN), atol=1e-12)


def test_off_policy_a_ratio_per_token_misses_the_gradient_of_longer_responses():
    found = importance_gradient(PROMPT.policy, ADVANTAGES, BEHAVIOUR)
    assert np.abs(found - EXACT).max() > 0.01


def test_weights_per_sequence_recover_the_gradient_of_the_trained_policy():
    found = loss_direction(
        LOSSES.get("reinforce"), PROMPT.policy, ADVANTAGES, BEHAVIOUR, sequence_weights_Y=PROMPT.policy.probs_Y / BEHAVIOUR.probs_Y
    )
    np.testing.assert_allclose(found, EXACT, atol=1e-12)


def padded_logprobs(policy):
    """Log-probabilities of all tokens of all sequences, [Y, T], and their mask."""
    logprobs_YT = torch.zeros(len(policy.sequences), policy.max_length, dtype=torch.float64)
    for row, y in enumerate(policy.sequences):
        logprobs_YT[row, : len(y)] = torch.from_numpy(policy.token_logprobs(y))
    return logprobs_YT, torch.arange(policy.max_length) < torch.tensor([len(y) for y in policy.sequences])[:, None]


@pytest.mark.parametrize(("cap", "low", "high"), [(100.0, 0, 1e-12), (1.0, 0.001, 1)])
def test_the_rollout_correction_per_sequence_recovers_it_too_unless_it_is_truncated(cap, low, high):
    (train_YT, mask_YT), (rollout_YT, _) = padded_logprobs(PROMPT.policy), padded_logprobs(BEHAVIOUR)
    weights_YT, _ = rollout_correction_weights(train_YT, rollout_YT, mask_YT, "tis", "sequence", cap)
    loss = LOSSES.get("reinforce")
    found = loss_direction(loss, PROMPT.policy, ADVANTAGES, BEHAVIOUR, sequence_weights_Y=weights_YT[:, 0].numpy())
    assert low <= np.abs(found - EXACT).max() < high


def test_reinforce_on_stale_data_is_biased():
    found = loss_direction(LOSSES.get("reinforce"), PROMPT.policy, ADVANTAGES, BEHAVIOUR)
    assert np.abs(found - EXACT).max() > 0.01


def test_ppo_stops_where_the_ratio_has_left_the_clip_range_on_the_side_of_its_advantage():
    # policy .9 / .1 against behaviour .5 / .5: ratios 1.8 and .2. A = (1, -1): both moved as asked, beyond the clip: no gradient.
    # A = (-1, 1): both moved the wrong way: the full gradient.
    policy = TabularPolicy(np.log([[0.9, 0.1]]), 1)
    behaviour = TabularPolicy(np.zeros((1, 2)), 1)
    np.testing.assert_allclose(loss_direction(LOSSES.get("ppo"), policy, np.array([1.0, -1.0]), behaviour), 0, atol=1e-15)
    back = loss_direction(LOSSES.get("ppo"), policy, np.array([-1.0, 1.0]), behaviour)
    np.testing.assert_allclose(back, mean_reward().gradient(Prompt("", policy, np.array([-1.0, 1.0]))), atol=1e-12)


def test_dro_pulls_back_to_the_behaviour():
    # with A = 0 only -beta (logpi - logmu) score is left, per token
    found = loss_direction(LOSSES.get("dro"), PROMPT.policy, np.zeros(4), BEHAVIOUR, beta=0.5)
    expected = sum(
        mu * -0.5 * (PROMPT.policy.token_logprobs(y) - BEHAVIOUR.token_logprobs(y)) @ score_TD
        for y, mu, score_TD in zip(PROMPT.policy.sequences, BEHAVIOUR.probs_Y, PROMPT.policy.token_scores, strict=True)
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_mean_over_tokens_favours_short_answers():
    # sum_y pi(y) A(y) / T(y) score(y): bent, unlike the sum over tokens
    found = loss_direction(LOSSES.get("reinforce"), PROMPT.policy, ADVANTAGES, reduction="mean")
    lengths_Y = np.array([len(y) for y in PROMPT.policy.sequences])
    np.testing.assert_allclose(found, (PROMPT.policy.probs_Y * ADVANTAGES / lengths_Y) @ PROMPT.policy.scores_YD, atol=1e-12)
    cosine = found @ EXACT / np.linalg.norm(found) / np.linalg.norm(EXACT)
    assert cosine < 0.99


def test_a_reward_of_closeness_to_the_teacher_distils():
    # sequence reward log(teacher/pi) through the reinforce loss climbs -KL(pi || teacher)
    advantages_Y = np.log(PROMPT.teacher.probs_Y / PROMPT.policy.probs_Y)
    found = loss_direction(LOSSES.get("reinforce"), PROMPT.policy, advantages_Y)
    np.testing.assert_allclose(found, closeness_to_teacher().gradient(PROMPT), atol=1e-12)
