import math

from rllm_lightning.tracking.distributions import distributions
from rllm_lightning.types import Episode, Step, Trajectory


def episode(reward, *steps):
    return Episode(id="a:0", trajectories=[Trajectory(steps=list(steps), reward=reward)])


def step(num_tokens, advantage=None):
    return Step(prompt_ids=[1], response_ids=[2] * num_tokens, logprobs=[-1.0] * num_tokens, advantage=advantage)


def test_rewards_are_counted_by_trajectory_advantages_and_lengths_by_model_call():
    """The second call's advantage is the mean over its tokens, (1 + 2) / 2."""
    assert distributions([episode(1.0, step(3, 0.5), step(2, [1.0, 2.0])), episode(0.0, step(1, -0.5))]) == {
        "distribution/reward": [1.0, 0.0],
        "distribution/advantage": [0.5, 1.5, -0.5],
        "distribution/response_length": [3.0, 2.0, 1.0],
    }


def test_what_is_missing_or_not_finite_is_left_out():
    """Validation has no advantages, and a failed scorer no reward; a reward of 0 is one."""
    assert distributions([episode(None, step(2)), episode(math.nan, step(0)), episode(0.0)]) == {
        "distribution/reward": [0.0],
        "distribution/response_length": [2.0, 0.0],
    }
    assert distributions([]) == {}
