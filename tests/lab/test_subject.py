"""How an estimator under examination is called, and what counts as a failure."""

import numpy as np
import pytest

from rllm_lightning.lab.policy import binary_prompt
from rllm_lightning.lab.subject import EstimatorFailure, Subject, bare_trajectory


def test_an_unknown_name_lists_the_registered_ones():
    with pytest.raises(ValueError, match=r"unknown advantage estimator 'grpoo'; did you mean 'grpo'\?"):
        Subject("grpoo")


def test_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match="pass_at_k: no keyword 'kk'; it has: k, baseline"):
        Subject("pass_at_k", kk=3)


def test_a_keyword_without_default_must_be_given(register):
    def strict(rewards, alpha):
        return [alpha * r for r in rewards], rewards

    name = register(strict)
    with pytest.raises(ValueError, match=r"strict: needs a value for alpha: set .*\.estimator_kwargs\.alpha"):
        Subject(name)
    np.testing.assert_allclose(np.concatenate(Subject(name, alpha=2.0).on_rewards([[1, 0]])[0]), [2, 0])


def test_rewards_go_in_one_array_a_group_and_advantages_come_out_one_a_trajectory():
    rows = Subject("rloo").on_rewards([[1, 2, 6], [1, 0]])  # n/(n-1) (r - mean): mean 3 and 1/2
    np.testing.assert_allclose(np.concatenate(rows[0]), [-3, -1.5, 4.5])
    np.testing.assert_allclose(np.concatenate(rows[1]), [1, -1])


def test_the_switch_of_the_std_is_passed_on():
    (rows,) = Subject("grpo", norm_adv_by_std_in_grpo=False).on_rewards([[1, 0, 0, 0]])
    np.testing.assert_allclose(np.concatenate(rows), [0.75, -0.25, -0.25, -0.25])


def test_an_estimator_of_either_rllm_signature_gets_what_it_names(register):
    seen = {}

    def with_config(rewards, algorithm_config, **kwargs):
        seen["config"], seen["groups"] = algorithm_config, kwargs["traj_groups"]
        return rewards, rewards

    Subject(register(with_config)).on_rewards([[1, 0], [1, 1, 1]])
    assert seen["config"].estimator == "with_config"
    assert [len(group.trajectories) for group in seen["groups"]] == [2, 3]


def test_scale_and_offset_move_the_critic_and_the_greedy_answer_too():
    # remax: 10 r + 3 minus 10 * 1/2 + 3
    (rows,) = Subject("remax").on_rewards([[1, 0]], scale=10, offset=3)
    np.testing.assert_allclose(np.concatenate(rows), [5, -5])


def test_the_greedy_reward_of_a_prompt_is_that_of_its_greedy_sequence():
    # p = 1/8: the first token ends with .525, and (0) is wrong; p = 7/8: goes on, and ends right
    for p, greedy in ((1 / 8, 0), (7 / 8, 1)):
        prompt = binary_prompt(p)
        (advantages,) = Subject("remax").on_prompts([(prompt, np.arange(4))])
        np.testing.assert_allclose(advantages, prompt.rewards_Y - greedy)


def test_the_critic_of_a_prompt_is_exact():
    # gae with lambda 0 and gamma 1: r_t + V(next) - V(now); for the sequence (0): 0 - V(())
    prompt = binary_prompt(0.3)
    (advantages,) = Subject("gae", lam=0.0).on_prompts([(prompt, np.arange(4))])
    assert advantages[0].tolist() == pytest.approx([-0.3])
    assert advantages[1].tolist() == pytest.approx([prompt.value((1,)) - 0.3, 1 - prompt.value((1,))])


def test_an_estimator_of_steps_sees_one_token_a_step():
    prompt = binary_prompt(0.3)
    (advantages,) = Subject("turn_level").on_prompts([(prompt, np.arange(4))])
    assert [len(a) for a in advantages] == [len(y) for y in prompt.policy.sequences]


def test_a_state_has_settled_and_is_the_same_for_every_call():
    subject = Subject("rae")
    assert subject.state["baseline"] == pytest.approx(0.5 * (1 - 0.95**100))
    first, second = (np.concatenate(subject.on_rewards([[1, 0]])[0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_dropped_group_has_no_rows_and_no_gradient():
    subject = Subject("grpo", singleton="drop")
    assert subject.on_rewards([[1.0], [1, 0]])[0] is None
    (advantages,) = subject.on_prompts([(binary_prompt(0.3), np.array([1]))])
    assert advantages.tolist() == [0]


def test_an_estimator_whose_state_fails_is_still_examined(register):
    def broken(rewards, state):
        return state["never set"], rewards

    subject = Subject(register(broken))
    assert subject.state == {}
    with pytest.raises(EstimatorFailure, match="raises KeyError: 'never set'"):
        subject.on_rewards([[1, 0]])


@pytest.mark.parametrize(("key", "value"), [("objective", "meen_reward"), ("scope", "groups"), ("per", "turn")])
def test_an_unknown_declaration_is_refused_when_it_is_registered(register, key, value):
    with pytest.raises(ValueError, match=f"advantage estimator 'reinforce_too': {key} must be one of .*, got '{value}'"):
        register(lambda rewards: (rewards, rewards), name="reinforce_too", **{key: value})


def raises(rewards):
    raise RuntimeError("out of luck")


def not_a_pair(rewards):
    return rewards


def one_group_short(rewards):
    return rewards[1:], rewards


def one_number_a_group(rewards):
    return [r.mean() for r in rewards], rewards


def one_trajectory_short(rewards):
    return [r[1:] for r in rewards], rewards


def words(rewards):
    return [["good"] * len(r) for r in rewards], rewards


@pytest.mark.parametrize(
    ("function", "declared", "message"),
    [
        (raises, {}, "raises RuntimeError: out of luck"),
        (not_a_pair, {}, r"returns list, not a pair \(advantages, returns\)"),
        (one_group_short, {}, "returns 0 advantages for 1 groups"),
        (one_number_a_group, {}, r"returns advantages of shape \(\) for a group, expected \(2,\)"),
        (one_trajectory_short, {}, r"returns advantages of shape \(1,\) for a group, expected \(2,\)"),
        (words, {}, "returns something else than numbers for a group"),
        (one_number_a_group, {"per": "step"}, "returns float64 for 2 trajectories"),
        (one_trajectory_short, {"per": "token"}, "returns 1 advantages for 2 trajectories"),
    ],
)
def test_a_misshapen_result_is_named(register, function, declared, message):
    subject = Subject(register(function, **declared))
    with pytest.raises(EstimatorFailure, match=message):
        subject.on_rewards([[1, 0]])


def test_the_time_of_a_call_is_positive():
    assert Subject("grpo").seconds([[bare_trajectory(r, stepwise=False) for r in (1.0, 0.0)]]) > 0
