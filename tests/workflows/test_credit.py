"""Credit for steps, from the shipped environments through the workflow engine to the advantages."""

import asyncio

import pytest

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, TransformConfig
from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine
from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow

BOARD = {"id": "g", "question": "", "answer": 2, "data_source": "gridworld", "size": 2, "start": "a1", "goal": "b2"}
SUM = {"id": "s", "question": "2+2?", "answer": "4", "data_source": "sums"}


def credited(task, plays, estimator, estimator_kwargs=None, **arguments):
    """The advantages of each rollout's steps, where rollout i gives the replies `plays[i]`."""

    def reply(messages, request):
        turn = sum(message["role"] == "assistant" for message in messages)
        return plays[int(request.rollout_idx)][turn]

    engine = ScriptedEngine(EngineSetup(), answers=reply)
    workflows = UnifiedWorkflowEngine(MultiTurnWorkflow, arguments, engine)
    episodes = asyncio.run(workflows.execute_tasks([task] * len(plays)))
    groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig())
    config = AlgorithmConfig(estimator=estimator, estimator_kwargs=estimator_kwargs or {})
    collect_reward_and_advantage_from_trajectory_groups(groups, config)
    return [[step.advantage for step in trajectory.steps] for trajectory in groups[0].trajectories]


def test_broadcast_gives_every_step_the_trajectorys_advantage():
    """Rewards 1 and 0: +-.5 / (.5 + 1e-6) = +-.999998."""
    plays = [["up", "right"], ["up", "up", "up"]]
    found = credited(BOARD, plays, "grpo", environment="gridworld", max_turns=3)
    assert found == [pytest.approx([0.999998] * 2, abs=1e-9), pytest.approx([-0.999998] * 3, abs=1e-9)]


def test_turn_level_compares_the_same_turn_of_different_rollouts():
    """Retry on a sum, rewards 0, 1 / 1 / 0, 0, rewards-to-go at gamma .5: turn 0 has .5, 1, 0; turn 1 has 1 and 0. Less the mean:
    0, .5, -.5 and .5, -.5."""
    kwargs = {"gamma": 0.5, "scale": "none"}
    reward = {"reward_function": lambda task, response: float(response == "4")}
    found = credited(SUM, [["0", "4"], ["4"], ["0", "0"]], "turn_level", kwargs, environment="retry", max_turns=2, **reward)
    assert found == [pytest.approx([0.0, 0.5]), pytest.approx([0.5]), pytest.approx([-0.5, -0.5])]


def test_gigpo_compares_steps_in_the_same_cell_of_the_board():
    """Three ways from a1 to b2 on four cells, gamma .5, omega 1:

        i    a1 up -> a2 right -> b2           rewards-to-go a1 .5, a2 1           reward 1
        ii   a1 left -> a1 up -> a2 right      a1 .25, a1 .5, a2 1                 reward 1
        iii  a1 up -> a2 up -> a2 up           a1 0, a2 0, a2 0                    reward 0

    a1: .5, .25, .5, 0: mean .3125, std .2072890. a2: 1, 1, 0, 0: mean .5, std .5. Trajectories 1, 1, 0: mean 2/3, std .4714045.
    """
    plays = [["up", "right"], ["left", "up", "right"], ["up", "up", "up"]]
    found = credited(BOARD, plays, "gigpo", {"gamma": 0.5, "epsilon": 1e-9}, environment="gridworld", max_turns=3)
    won, lost = 0.3333333 / 0.4714045, -0.6666667 / 0.4714045
    a1 = {reward: (reward - 0.3125) / 0.2072890 for reward in (0.0, 0.25, 0.5)}
    assert found[0] == pytest.approx([won + a1[0.5], won + 1.0], abs=1e-5)
    assert found[1] == pytest.approx([won + a1[0.25], won + a1[0.5], won + 1.0], abs=1e-5)
    assert found[2] == pytest.approx([lost + a1[0.0], lost - 1.0, lost - 1.0], abs=1e-5)


def test_gigpo_on_retry_compares_answers_after_the_same_wrong_ones():
    """After the wrong answer 0: 4 and then 1 that is wrong, too. Rewards-to-go there 1 and 0, so +-1; the first turn, one state for
    all at gamma 1: 1, 0, 1 of three rollouts. The third answered 1 first, and its second state is its own: no comparison."""
    reward = {"reward_function": lambda task, response: float(response == "4")}
    plays = [["0", "4"], ["0", "1"], ["1", "4"]]
    found = credited(SUM, plays, "gigpo", {"gamma": 1.0, "epsilon": 1e-9}, environment="retry", max_turns=2, **reward)
    won, lost = 0.3333333 / 0.4714045, -0.6666667 / 0.4714045
    assert found[0] == pytest.approx([won + won, won + 1.0], abs=1e-5)
    assert found[1] == pytest.approx([lost + lost, lost - 1.0], abs=1e-5)
    assert found[2] == pytest.approx([won + won, won], abs=1e-5)
