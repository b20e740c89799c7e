"""Several answers and a judge: roles, rewards, and credit of each role's own."""

import asyncio
import math

import pytest

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, TransformConfig
from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.types import RewardOutput, TerminationReason
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine, check_workflow_args
from rllm_lightning.workflows.solver_judge import SolverJudgeWorkflow, read_choice

TASK = {"id": "t", "question": "2+2?", "answer": "4", "data_source": "sums"}


def right(task, response):
    return float(response == task["answer"])


@pytest.fixture
def judged(play):
    def run(replies, reward_function=right, **arguments):
        return play(SolverJudgeWorkflow, replies, TASK, reward_function=reward_function, **arguments)

    return run


def test_each_role_has_trajectories_of_its_own(judged):
    """Answers 3 and 4; the judge takes the second."""
    episode = judged(["3", "4", "number 2"])
    assert [(t.name, t.reward, len(t.steps)) for t in episode.trajectories] == [("solver", 0.0, 1), ("solver", 1.0, 1), ("judge", 1.0, 1)]
    assert episode.metrics == {"solver_acc": 0.5, "judge_acc": 1.0, "best_solver_acc": 1.0, "judge_readable": 1.0}
    assert (episode.is_correct, episode.termination_reason) == (True, TerminationReason.ENV_DONE)
    assert episode.trajectories[2].steps[0].action == 1
    assert len({t.uid for t in episode.trajectories}) == 3


def test_solvers_are_asked_the_question_and_the_judge_sees_it_with_the_answers(judged):
    episode = judged(["3", "{question}", "1"], system_prompt="be brief", judge_prompt="{question} {answers}?")
    asked = [t.steps[0].chat_completions[:-1] for t in episode.trajectories]
    assert asked[0] == asked[1] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    assert asked[2] == [{"role": "user", "content": "2+2? 1: 3\n2: {question}?"}]  # an answer is not filled in again


@pytest.mark.parametrize(
    ("judge", "reward", "correct", "readable"),
    [("1", 0.0, False, 1.0), ("2", 1.0, True, 1.0), ("5", 0.0, False, 0.0), ("?", 0.0, False, 0.0)],
)
def test_the_judge_gets_the_score_of_what_it_chose_and_decides_about_the_episode(judged, judge, reward, correct, readable):
    episode = judged(["3", "4", judge])
    assert (episode.trajectories[2].reward, episode.is_correct) == (reward, correct)
    assert episode.metrics["judge_readable"] == readable


def test_a_reward_output_decides_about_correctness(judged):
    episode = judged(["3", "1"], n_solvers=1, reward_function=lambda task, response: RewardOutput(0.9, is_correct=False))
    assert (episode.trajectories[1].reward, episode.is_correct) == (0.9, False)


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("2", 1),
        ("1 or 3: 3", 2),
        ("answer 1.", 0),
        ("001", 0),
        (" up\n", 0),  # repeated
        ("7", 1),  # there is no seventh answer, but one that says 7
        ("0", None),
        ("4", None),
        ("updown", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_a_choice_is_the_last_number_else_the_answer_that_is_repeated(reply, choice):
    assert read_choice(reply, ["up", "7", "up"]) == choice


def test_nothing_is_no_choice_even_where_an_answer_is_empty():
    assert read_choice(" ", ["", "4"]) is None


def test_a_cut_reply_is_named(judged):
    """B26: cap 2, the second answer has 3 tokens with its END."""
    assert judged(["3", "44", "1"], max_tokens=2).termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


def test_where_the_judge_cannot_be_asked_the_solvers_remain_and_the_episode_is_not_correct(judged):
    """B26: the prompt of the solvers has 10 + 1 + 11 = 22 tokens, that of the judge far more."""
    episode = judged(["4", "4", "1"], max_prompt_length=22)
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert [t.name for t in episode.trajectories] == ["solver", "solver"]
    assert not episode.is_correct


def test_an_answer_that_cannot_be_scored_is_an_error(judged):
    """B05: never a silent zero."""
    episode = judged(["3", "4", "1"], reward_function=lambda task, response: math.nan)
    assert (episode.termination_reason, episode.trajectories) == (TerminationReason.ERROR, [])


def test_a_judges_own_advantage_is_what_it_gains_over_a_blind_choice(judged):
    """Scores 0, 1, 0: a blind choice gets 1/3."""
    for judge, advantage in (("2", 2 / 3), ("1", -1 / 3), ("none", -1 / 3)):
        episode = judged(["3", "4", "5", judge], n_solvers=3, judge_advantage=True)
        assert episode.trajectories[3].steps[0].advantage == pytest.approx(advantage)
        assert [t.steps[0].advantage for t in episode.trajectories[:3]] == [None] * 3
    assert judged(["3", "4", "1"]).trajectories[2].steps[0].advantage is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_solvers": 0}, "n_solvers: must be at least 1"),
        ({"judge_prompt": "{question}"}, "judge_prompt: lacks {answers}"),
        ({"reward_function": "exact"}, "reward_function must be a function"),
        ({"n_solver": 2}, "did you mean n_solvers"),
    ],
)
def test_a_mistake_in_the_arguments_is_found_before_there_is_a_model(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_workflow_args(SolverJudgeWorkflow, {"reward_function": right, **arguments})


# ------------------------------------------------------------------------------------------------------------------- credit


def groups_of(n, **arguments):
    """n rollouts of one task with answers drawn among 3 and 4 and choices among 1 and 2."""
    engine = ScriptedEngine(
        EngineSetup(), answers=lambda messages, request: ["3", "4"] if messages[-1]["content"] == "2+2?" else ["1", "2"]
    )
    workflows = UnifiedWorkflowEngine(SolverJudgeWorkflow, {"reward_function": right, **arguments}, engine)
    episodes = asyncio.run(workflows.execute_tasks([TASK] * n))
    return transform_episodes_to_trajectory_groups(episodes, TransformConfig())[0]


def advantages(group):
    return [trajectory.steps[0].advantage for trajectory in group.trajectories]


def test_roles_form_groups_of_their_own():
    solver, judge = groups_of(4)
    assert (solver.group_role, len(solver.trajectories)) == ("solver", 8)
    assert (judge.group_role, len(judge.trajectories)) == ("judge", 4)


def test_each_role_goes_through_its_own_estimator():
    """solver: reinforce, the reward itself; judge: dr_grpo, the reward minus the group's mean."""
    solver, judge = groups_of(4)
    config = AlgorithmConfig(estimator="grpo", estimator_map={"solver": "reinforce", "judge": ("dr_grpo", "ppo")})
    metrics = collect_reward_and_advantage_from_trajectory_groups([solver, judge], config)
    assert advantages(solver) == [t.reward for t in solver.trajectories]
    mean = sum(t.reward for t in judge.trajectories) / 4
    assert advantages(judge) == pytest.approx([t.reward - mean for t in judge.trajectories])
    assert {"reward/solver/mean", "reward/judge/mean", "advantage/solver/std", "advantage/judge/std"} <= set(metrics)
    assert (config.loss_of("solver"), config.loss_of("judge")) == ("importance_sampling", "ppo")


def test_a_judge_with_its_own_advantages_stands_beside_solvers_that_go_through_grpo():
    solver, judge = groups_of(4, judge_advantage=True)
    own = advantages(judge)
    assert len(set(own)) > 1
    collect_reward_and_advantage_from_trajectory_groups([solver, judge], AlgorithmConfig(use_precomputed_advantage=True))
    assert advantages(judge) == [[value] * len(t.steps[0].response_ids) for value, t in zip(own, judge.trajectories, strict=True)]
    rewards = [t.reward for t in solver.trajectories]
    mean = sum(rewards) / 8
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 8)
    assert advantages(solver) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])
