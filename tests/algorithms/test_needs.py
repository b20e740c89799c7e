"""What estimators need beyond rewards: where it comes from, and one clear error where it is missing."""

import pytest

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.needs import GATHER, NEEDS, gather
from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup


def full_step(reward=0.5, tokens=2):
    info = {"state_key": ("room", 1), "values": [0.1] * tokens, "teacher_logprobs": [-0.5] * tokens}
    return Step(response_ids=[0] * tokens, logprobs=[-1.0] * tokens, reward=reward, info=info)


def full_trajectory(reward=1.0):
    steps = [full_step(tokens=2), full_step(tokens=1)]
    return Trajectory(name="solver", steps=steps, reward=reward, info={"rewards": {"format": 0.0, "answer": 1.0}, "greedy_reward": 0.25})


@pytest.fixture
def groups():
    return [TrajectoryGroup([full_trajectory(), full_trajectory(0.0)], "a:solver"), TrajectoryGroup([full_trajectory()], "b:solver")]


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        ("lengths", [[3, 3], [3]]),
        ("reward_components", {"answer": [[1, 1], [1]], "format": [[0, 0], [0]]}),
        ("greedy_rewards", [[0.25, 0.25], [0.25]]),
        ("step_rewards", [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]]]),
        ("state_keys", [[[("room", 1)] * 2] * 2, [[("room", 1)] * 2]]),
        ("values", [[[[0.1, 0.1], [0.1]]] * 2, [[[0.1, 0.1], [0.1]]]]),
        ("logprobs", [[[[-1, -1], [-1]]] * 2, [[[-1, -1], [-1]]]]),
        ("teacher_logprobs", [[[[-0.5, -0.5], [-0.5]]] * 2, [[[-0.5, -0.5], [-0.5]]]]),
    ],
)
def test_each_need_is_gathered_in_the_order_of_the_groups(groups, need, expected):
    assert plain(gather(need, groups, "solver", "x", None)) == expected


def test_all_needs_are_tested_above_and_used_by_an_estimator():
    used = {need for name in ESTIMATORS for need in ESTIMATORS.get(name).needs}
    assert used == set(NEEDS) == {*GATHER, "state"}


def spoil(groups, what):
    trajectory = groups[1].trajectories[0]
    step = trajectory.steps[1]
    match what:
        case "tokens":
            for group in groups:
                for t in group.trajectories:
                    for s in t.steps:
                        s.response_ids, s.logprobs = [], []
        case "step rewards":
            for s in trajectory.steps:
                s.reward = 0.0
        case "logprobs":
            step.logprobs = []
        case "short values":
            step.info["values"] = [0.1] * 3
        case "values by token":
            step.info["values"] = {0: 0.1}
        case "nan":
            step.info["teacher_logprobs"] = [float("nan")]
        case "no components":
            trajectory.info["rewards"] = {"format": 1.0}
        case "none component":
            trajectory.info["rewards"] = {"format": 1.0, "answer": None}
        case key:
            trajectory.info.pop(key, None)
            step.info.pop(key, None)


@pytest.mark.parametrize(
    ("estimator", "what", "message"),
    [
        ("opo", "tokens", "'lengths'.*completion_ids"),
        ("reinforce_plus_plus", "tokens", "'lengths'.*completion_ids"),
        ("turn_level", "step rewards", "'step_rewards'.*Step.reward"),
        ("gigpo", "step rewards", "'step_rewards'.*Step.reward"),
        ("gigpo", "state_key", "'state_keys'.*hashable"),
        ("gae", "values", "'values'.*critic"),
        ("gae", "short values", "'values'.*3 for 1 response tokens"),
        ("gae", "values by token", "'values'.*{0: 0.1}.*critic"),
        ("distill", "logprobs", "'logprobs'.*ModelOutput.logprobs"),
        ("distill", "teacher_logprobs", "'teacher_logprobs'.*teacher"),
        ("distill", "nan", "'teacher_logprobs'.*nan"),
        ("remax", "greedy_reward", "'greedy_rewards'.*greedy rollout"),
        ("gdpo", "rewards", "'reward_components'.*workflow"),
        ("gdpo", "no components", "'reward_components'.*same names"),
        ("gdpo", "none component", "'reward_components'.*None"),
    ],
)
def test_a_missing_need_names_estimator_role_and_what_to_do(groups, estimator, what, message):
    spoil(groups, what)
    with pytest.raises(ValueError, match=f"estimator '{estimator}', role 'solver': needs {message}"):
        collect_reward_and_advantage_from_trajectory_groups(groups, AlgorithmConfig(estimator=estimator))


def test_a_state_is_kept_by_role_in_plain_data_and_must_be_passed(groups):
    config = AlgorithmConfig(estimator="rae", estimator_kwargs={"decay": 0.5})
    with pytest.raises(ValueError, match=r"'rae', role 'solver': needs 'state'.*estimator_state"):
        collect_reward_and_advantage_from_trajectory_groups(groups, config)
    state = {}
    collect_reward_and_advantage_from_trajectory_groups(groups, config, estimator_state=state)
    assert state == {"solver": {"baseline": pytest.approx(1 / 3)}}  # rewards 1, 0, 1: .5 * 2/3
    collect_reward_and_advantage_from_trajectory_groups(groups, config, estimator_state=state)
    assert groups[1].trajectories[0].steps[0].advantage == pytest.approx(2 / 3)


def test_every_registered_estimator_runs_on_full_trajectories(groups):
    for name in ESTIMATORS:
        kwargs = {"k": 1} if name == "pass_at_k" else {}
        config = AlgorithmConfig(estimator=name, estimator_kwargs=kwargs)
        metrics = collect_reward_and_advantage_from_trajectory_groups(groups, config, estimator_state={})
        assert "advantage/solver/mean" in metrics
