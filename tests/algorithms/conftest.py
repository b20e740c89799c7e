"""Small makers of trajectories and groups, and a strategy for ragged groups of rewards."""

from types import SimpleNamespace

import numpy as np
import pytest

from rllm_lightning.types import Episode, Step, Trajectory, TrajectoryGroup


def make_trajectory(reward, step_rewards=(0.0,), tokens=2, name="solver", **info):
    steps = [Step(response_ids=list(range(tokens)), logprobs=[-1.0] * tokens, reward=r) for r in step_rewards]
    return Trajectory(name=name, steps=steps, reward=reward, info=info)


def make_group(rewards, group_id="task:solver", tokens=None):
    counts = tokens or [2] * len(rewards)
    return TrajectoryGroup([make_trajectory(r, tokens=n) for r, n in zip(rewards, counts, strict=True)], group_id)


def make_episode(episode_id, reward=0.0, is_correct=False, reason=None, names=("solver",), **fields):
    trajectories = [make_trajectory(reward, name=name) for name in names]
    return Episode(id=episode_id, is_correct=is_correct, termination_reason=reason, trajectories=trajectories, **fields)


@pytest.fixture
def make():
    """`make.trajectory`, `make.group`, `make.episode`."""
    return SimpleNamespace(trajectory=make_trajectory, group=make_group, episode=make_episode)


@pytest.fixture
def arrays():
    """Lists of numbers -> what an estimator is given."""
    return lambda *groups: [np.array(group, dtype=float) for group in groups]


@pytest.fixture
def advantages_of():
    """The advantages that were written to the first step of each trajectory of each group."""
    return lambda groups: [[trajectory.steps[0].advantage for trajectory in group.trajectories] for group in groups]
