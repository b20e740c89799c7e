"""Estimators that give one number a step or a token, by hand, and what `collect_...` writes of them."""

import numpy as np
import pytest

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup


def call(name, rewards, **keywords):
    advantages, _ = ESTIMATORS.get(name)([np.array(group, dtype=float) for group in rewards], **keywords)
    return [[[x.tolist() if isinstance(x, np.ndarray) else x for x in t] for t in group] for group in advantages]


def flat(nested):
    return np.concatenate([np.ravel(x) for group in nested for trajectory in group for x in trajectory])


# -------------------------------------------------------------------------------------------------------- turn_level


def test_turn_level_compares_the_reward_to_go_of_equal_turns():
    """gamma .5. To go: [1 + .5 * 2, 2] = [2, 2] and [0, 0]. Turn 0: 2 and 0; turn 1: 2 and 0: +-1 over the mean 1."""
    steps = [[[1, 2], [0, 0]]]
    assert call("turn_level", [[3, 0]], step_rewards=steps, gamma=0.5, norm_adv_by_std_in_grpo=False) == [[[1, 1], [-1, -1]]]
    normalised = call("turn_level", [[3, 0]], step_rewards=steps, gamma=0.5)
    assert flat(normalised) == pytest.approx([1, 1, -1, -1], abs=1e-5)


def test_turn_level_without_discount_sums_what_is_still_to_come():
    """To go 3, 2 and 1, 1: turn means 2 and 1.5."""
    assert call("turn_level", [[3, 1]], step_rewards=[[[1, 2], [0, 1]]], norm_adv_by_std_in_grpo=False) == [[[1, 0.5], [-1, -0.5]]]


def test_a_turn_that_one_trajectory_reached_alone_is_a_group_of_one():
    steps = [[[0, 4], [1]], [[2]]]
    options = {"step_rewards": steps, "norm_adv_by_std_in_grpo": False}
    assert call("turn_level", [[4, 1], [2]], **options) == [[[1.5, 4], [-1.5]], [[2]]]
    assert call("turn_level", [[4, 1], [2]], **options, singleton="zero") == [[[1.5, 0], [-1.5]], [[0]]]


def test_turn_level_keeps_groups_apart():
    alone = call("turn_level", [[1, 0]], step_rewards=[[[1], [0]]])
    beside = call("turn_level", [[1, 0], [9, 9]], step_rewards=[[[1], [0]], [[9], [9]]])
    assert beside == [*alone, [[0], [0]]]


# ------------------------------------------------------------------------------------------------------------- gigpo


def test_gigpo_adds_the_advantage_among_equal_states():
    """Rewards 1, 0 -> .5, -.5. gamma .5, to go: [.5, 1] and [0, 0]. State s: .5, 0 -> +-.25; states u and v are met once: 0."""
    keys = [[["s", "u"], ["s", "v"]]]
    options = {"step_rewards": [[[0, 1], [0, 0]]], "state_keys": keys, "gamma": 0.5, "norm_adv_by_std_in_grpo": False}
    assert call("gigpo", [[1, 0]], **options) == [[[0.75, 0.5], [-0.75, -0.5]]]
    assert call("gigpo", [[1, 0]], **options, omega=2) == [[[1, 0.5], [-1, -0.5]]]


def test_gigpo_compares_a_state_met_twice_in_one_trajectory_with_itself():
    """One state everywhere, gamma 1, to go 1, 1, 0: mean 2/3."""
    options = {"step_rewards": [[[0, 1], [0]]], "state_keys": [[["s", "s"], ["s"]]], "gamma": 1.0, "norm_adv_by_std_in_grpo": False}
    assert flat(call("gigpo", [[1, 0]], **options)) == pytest.approx([0.5 + 1 / 3, 0.5 + 1 / 3, -0.5 - 2 / 3])


def test_gigpo_does_not_compare_equal_states_of_different_groups():
    options = {"step_rewards": [[[1]], [[0]]], "state_keys": [[["s"]], [["s"]]], "norm_adv_by_std_in_grpo": False}
    assert call("gigpo", [[1], [0]], **options) == [[[1]], [[0]]]


def test_gigpo_normalises_both_levels_by_the_std():
    options = {"step_rewards": [[[1], [0]]], "state_keys": [[[0], [0]]]}
    assert flat(call("gigpo", [[1, 0]], **options)) == pytest.approx([2 * 0.5 / (0.5 + 1e-6), -2 * 0.5 / (0.5 + 1e-6)])


# --------------------------------------------------------------------------------------------------------------- gae


def test_gae_per_token():
    """gamma .5, lam .5, reward 1, values .2, .4 | .6 over two steps. delta: .5 * .4 - .2 = 0, .5 * .6 - .4 = -.1, 1 - .6 = .4.
    A_2 = .4, A_1 = -.1 + .25 * .4 = 0, A_0 = 0 + .25 * 0 = 0."""
    advantages, returns = ESTIMATORS.get("gae")([np.array([1.0])], values=[[[[0.2, 0.4], [0.6]]]], gamma=0.5, lam=0.5)
    assert flat(advantages) == pytest.approx([0, 0, 0.4], abs=1e-15)
    assert flat(returns) == pytest.approx([0.2, 0.4, 1.0])
    assert [len(step) for step in advantages[0][0]] == [2, 1]


def test_gae_with_lam_1_is_the_reward_minus_the_value():
    values = [[[[0.5, 0.25], [0.75]], [[1.0]]], [[[0.1]]]]
    advantages = call("gae", [[1, 0], [2]], values=values, lam=1.0)
    assert flat(advantages) == pytest.approx([0.5, 0.75, 0.25, -1.0, 1.9])


def test_gae_per_turn_shares_an_advantage_among_the_tokens_of_a_step():
    """Turn values are those of the first tokens, .2 and .6: delta .6 - .2 = .4 and 1 - .6 = .4; lam .5: .4 + .5 * .4 = .6."""
    advantages = call("gae", [[1]], values=[[[[0.2, 9.0], [0.6]]]], lam=0.5, level="turn")
    assert flat(advantages) == pytest.approx([0.6, 0.6, 0.4])


def test_gae_passes_over_steps_and_trajectories_without_tokens():
    values = [[[[0.5], [], [0.5]], [[]]], [], [[[0.5]]]]
    for level in ("token", "turn"):
        advantages = call("gae", [[1, 1], [], [0]], values=values, lam=1.0, level=level)
        assert advantages == [[[[0.5], [], [0.5]], [[]]], [], [[[-0.5]]]]
    with pytest.raises(ValueError, match="level"):
        call("gae", [[1]], values=[[[[1.0]]]], level="episode")


# ----------------------------------------------------------------------------------------------------------- distill


def test_distill_is_how_much_likelier_the_teacher_finds_each_token():
    student, teacher = [[[[-1.0, -2.0], [-3.0]]]], [[[[-0.5, -3.0], [-1.0]]]]
    assert call("distill", [[0]], logprobs=student, teacher_logprobs=teacher) == [[[[0.5, -1.0], [2.0]]]]
    # gamma .5: 2; -1 + .5 * 2 = 0; .5 + .5 * 0 = .5
    assert call("distill", [[0]], logprobs=student, teacher_logprobs=teacher, gamma=0.5) == [[[[0.5, 0.0], [2.0]]]]


# ------------------------------------------------------------------------------------------------- written to steps


@pytest.fixture
def group():
    """Two trajectories of two steps with 2 and 1 tokens."""

    def trajectory(reward):
        steps = [
            Step(
                response_ids=[0] * n,
                logprobs=[-1.0] * n,
                reward=r,
                info={"state_key": key, "values": [0.5] * n, "teacher_logprobs": [-0.5] * n},
            )
            for n, r, key in ((2, 0.0, "start"), (1, reward, "end"))
        ]
        return Trajectory(name="solver", steps=steps, reward=reward)

    return TrajectoryGroup([trajectory(1.0), trajectory(0.0)], "task:solver")


@pytest.mark.parametrize("name", ["turn_level", "gigpo"])
def test_an_advantage_a_step_is_written_as_a_float(group, name):
    collect_reward_and_advantage_from_trajectory_groups([group], AlgorithmConfig(estimator=name, estimator_kwargs={"gamma": 1.0}))
    first, second = group.trajectories
    assert all(type(step.advantage) is float for step in first.steps + second.steps)
    assert first.steps[0].advantage == -second.steps[0].advantage > 0.99


@pytest.mark.parametrize("name", ["gae", "distill"])
def test_advantages_of_tokens_are_written_as_a_list_for_each_step(group, name):
    metrics = collect_reward_and_advantage_from_trajectory_groups([group], AlgorithmConfig(estimator=name))
    written = [step.advantage for trajectory in group.trajectories for step in trajectory.steps]
    assert [len(of_step) for of_step in written] == [2, 1, 2, 1]
    assert all(type(value) is float for of_step in written for value in of_step)
    assert metrics["advantage/solver/mean"] == pytest.approx(np.mean(np.concatenate(written)))


@pytest.mark.parametrize("name", ["turn_level", "gigpo", "gae", "distill"])
def test_no_groups_are_two_empty_lists(name):
    keywords = {need: [] for need in ESTIMATORS.get(name).needs}
    assert ESTIMATORS.get(name)([], **keywords) == ([], [])
