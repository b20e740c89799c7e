"""One question, one answer, one reward."""

import asyncio
import math

import numpy as np
import pytest

from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import END, ScriptedEngine, encode
from rllm_lightning.types import RewardOutput, TerminationReason
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow, chat_of

TASK = {"id": "t1", "question": "1+1?", "answer": "2"}


@pytest.fixture
def ended(executor):
    def run(reward_function, task=TASK, answers=("2",), run_kwargs=None, **kwargs):
        engine = ScriptedEngine(EngineSetup(), answers=list(answers))
        workflow = SingleTurnWorkflow(engine, executor, reward_function=reward_function, **kwargs)
        return asyncio.run(workflow.run_with_termination_handling(task, f"{task.get('id')}:0", **(run_kwargs or {})))

    return run


def test_one_step_with_the_model_output_the_chat_and_the_reward(ended):
    episode = ended(lambda task, response: 0.5 if response == task["answer"] else 0.0)
    (trajectory,) = episode.trajectories
    (step,) = trajectory.steps
    assert (episode.id, episode.task, episode.termination_reason) == ("t1:0", TASK, TerminationReason.ENV_DONE)
    assert episode.is_correct
    assert episode.metrics == {"solver_acc": 0.5}
    assert (trajectory.name, trajectory.task, trajectory.reward) == ("solver", TASK, 0.5)
    assert step.chat_completions == [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert (step.action, step.reward, step.done, step.weight_version) == ("2", 0.5, True, 0)
    assert step.response_ids == [*encode("2"), END]
    assert step.logprobs == [0.0, 0.0]


def test_a_cut_answer_is_scored_and_ends_as_too_long(ended):
    """B26: cap 1, the answer has 2 tokens: cut, and never reported as stopped."""
    episode = ended(lambda task, response: float(response == "2"), run_kwargs={"max_tokens": 1})
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert episode.trajectories[0].reward == 1.0


def test_the_reward_function_may_be_async(ended):
    async def reward(task, response):
        await asyncio.sleep(0)
        return 1

    assert ended(reward).trajectories[0].reward == 1.0


def test_a_reward_output_decides_about_correctness_and_its_metadata_reach_the_trajectory(ended):
    vector = {"rewards": {"format": 1.0, "answer": 0.0}}
    episode = ended(lambda task, response: RewardOutput(0.5, is_correct=False, metadata=vector))
    assert not episode.is_correct  # the default rule would say correct: 0.5 > 0
    assert episode.trajectories[0].info == vector
    assert ended(lambda task, response: RewardOutput(0.0, is_correct=True)).is_correct
    assert ended(lambda task, response: RewardOutput(0.5)).is_correct


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (False, 0.0), (3, 3.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0)])
def test_booleans_and_numpy_numbers_are_rewards(ended, value, reward):
    result = ended(lambda task, response: value).trajectories[0].reward
    assert (result, type(result)) == (reward, float)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "1", [1.0], RewardOutput(math.nan), RewardOutput(None)])
def test_a_reward_that_is_no_finite_number_is_an_error_naming_the_task(ended, value):
    """B05: a failed scorer is never a silent zero, and its answer is never trained on."""
    episode = ended(lambda task, response: value)
    assert episode.termination_reason is TerminationReason.ERROR
    assert episode.info["error"]["error_message"].startswith("task 't1': the reward function returned")
    assert episode.trajectories == []


def test_a_reward_function_that_raises_is_an_error(ended):
    episode = ended(lambda task, response: 1 / 0)
    assert episode.info["error"]["error_type"] == "ZeroDivisionError"


def test_a_system_prompt_comes_first_unless_the_task_brings_its_own():
    question = {"question": "q"}
    own = {"question": "q", "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]}
    assert chat_of(question) == [{"role": "user", "content": "q"}]
    assert chat_of(question, "be brief") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert chat_of(own, "be brief") == own["messages"]


def test_the_tasks_own_messages_are_not_changed():
    task = {"messages": [{"role": "user", "content": "u"}]}
    chat_of(task, "be brief")
    assert task == {"messages": [{"role": "user", "content": "u"}]}


def test_a_task_without_a_question_is_an_error_naming_it(ended):
    episode = ended(lambda task, response: 1.0, task={"id": "t7", "problem": "?"})
    assert "task 't7' has neither `messages` nor a `question`" in episode.info["error"]["error_message"]


def test_a_reward_function_must_be_callable(ended):
    with pytest.raises(ValueError, match="reward_function must be a function"):
        ended("exact_match")


def test_a_prompt_over_the_limit_ends_the_episode_without_a_trajectory(executor):
    """B26: an explicit drop and reason, never a cut prompt."""
    engine = ScriptedEngine(EngineSetup(max_prompt_length=8), answers=["2"])
    workflow = SingleTurnWorkflow(engine, executor, reward_function=lambda task, response: 1.0)
    episode = asyncio.run(workflow.run_with_termination_handling(TASK, "t1:0"))
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert episode.trajectories == []
    assert not episode.is_correct
