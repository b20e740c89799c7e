"""The shipped environments: `retry` and `gridworld`, and the tasks of the latter."""

import asyncio

import pytest

from rllm_lightning.registry import ENVIRONMENTS, TASKS
from rllm_lightning.types import RewardOutput, TerminationReason
from rllm_lightning.workflows.environment import Environment
from rllm_lightning.workflows.gridworld import GridWorld, cell_of, good_moves, move, name_of, read_move
from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow

TASK = {"id": "t", "question": "2+2?", "answer": "4", "data_source": "sums"}
BOARD = {"id": "g", "question": "", "answer": 3, "data_source": "gridworld", "size": 3, "start": "a1", "goal": "b3"}
SCORES = {"4": 1.0, "3": 0.5, "0": 0.0}


def graded(task, response):
    return RewardOutput(SCORES[response], is_correct=response == "4")


@pytest.fixture
def retry(play):
    def run(replies, reward=graded, **arguments):
        return play(MultiTurnWorkflow, replies, TASK, environment="retry", reward_function=reward, **arguments)

    return run


@pytest.fixture
def walk(play):
    def run(replies, task=BOARD, **arguments):
        return play(MultiTurnWorkflow, replies, task, environment="gridworld", **arguments)

    return run


@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_every_shipped_environment_is_an_environment(name):
    made = ENVIRONMENTS.get(name)(**({"reward_function": graded} if name == "retry" else {}))
    assert isinstance(made, Environment)
    assert made.is_multithread_safe()


# -------------------------------------------------------------------------------------------------------------------- retry


def test_a_wrong_answer_is_met_with_feedback_and_a_right_one_ends_the_episode(retry):
    episode = retry("04")
    (trajectory,) = episode.trajectories
    said = [message["content"] for message in trajectory.steps[-1].chat_completions]
    assert said == ["2+2?", "0", "That is not right. Try again.", "4"]
    assert (episode.termination_reason, episode.is_correct) == (TerminationReason.ENV_DONE, True)
    assert episode.metrics == {"agent_acc": 1.0, "num_turns": 2.0, "first_answer_acc": 0.0}
    assert retry("4").metrics["first_answer_acc"] == 1.0


@pytest.mark.parametrize(
    ("replies", "rewards"),
    [("4", [1.0]), ("004", [0.0, 0.0, 1.0]), ("34", [0.5, 0.5]), ("303", [0.5, -0.5, 0.5]), ("000", [0.0, 0.0, 0.0])],
)
def test_rewards_are_what_an_answer_adds_and_sum_up_to_the_last_score(retry, replies, rewards):
    (trajectory,) = retry(replies, max_turns=3).trajectories
    assert [step.reward for step in trajectory.steps] == rewards
    assert trajectory.reward == SCORES[replies[-1]]


def test_partial_credit_does_not_make_an_episode_correct(retry):
    episode = retry("33", max_turns=2)
    assert (episode.trajectories[0].reward, episode.is_correct) == (0.5, False)
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED


def test_a_plain_score_is_right_from_one_on(retry):
    assert not retry("03", reward=lambda task, response: SCORES[response], max_turns=2).is_correct
    assert retry("34", reward=lambda task, response: SCORES[response]).metrics["num_turns"] == 2.0


def test_a_second_episode_begins_anew(executor, engine):
    workflow = MultiTurnWorkflow(engine, executor, reward_function=lambda task, response: 0.5, max_turns=1)
    rewards = [asyncio.run(workflow.run_with_termination_handling(TASK, "t:0")).trajectories[0].reward for _ in range(2)]
    assert rewards == [0.5, 0.5]  # not .5 and then 0 more


def test_the_reward_function_may_say_what_is_told(retry):
    def higher(task, response):
        return RewardOutput(float(response == "4"), metadata={"feedback": f"more than {response}"})

    (trajectory,) = retry("04", reward=higher).trajectories
    assert trajectory.steps[1].observation == "more than 0"
    (trajectory,) = retry("04", environment_args={"feedback": "No."}).trajectories
    assert trajectory.steps[1].observation == "No."


def test_two_rollouts_are_in_the_same_state_where_they_were_wrong_in_the_same_way(retry):
    one, same, other = ([s.info["state_key"] for s in retry(r).trajectories[0].steps] for r in ("034", "004", "304"))
    assert one[:2] == same[:2]
    assert one[0] == other[0]
    assert len({one[1], other[1], one[2], same[2]}) == 4


# ---------------------------------------------------------------------------------------------------------------- gridworld


def test_a_way_to_the_goal(walk):
    """a1 -> right b1 -> up b2 -> up b3."""
    episode = walk(["right", "up", "Up!"])
    (trajectory,) = episode.trajectories
    assert [step.info["state_key"] for step in trajectory.steps] == ["a1", "b1", "b2"]
    assert [step.observation for step in trajectory.steps] == [f"at {cell}, go to b3" for cell in ("a1", "b1", "b2")]
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 1.0]
    assert (episode.termination_reason, episode.is_correct, trajectory.reward) == (TerminationReason.ENV_DONE, True, 1.0)


def test_a_reply_without_a_direction_and_one_against_the_edge_change_nothing(walk):
    episode = walk(["left", "upwards", "down", "I go up"], max_turns=4)
    assert [step.info["state_key"] for step in episode.trajectories[0].steps] == ["a1"] * 4
    assert [step.info["direction"] for step in episode.trajectories[0].steps] == ["left", None, "down", "up"]
    assert (episode.termination_reason, episode.is_correct) == (TerminationReason.MAX_TURNS_EXCEEDED, False)


@pytest.mark.parametrize(
    ("at", "direction", "to"),
    [("a1", "up", "a2"), ("a3", "up", "a3"), ("b2", "down", "b1"), ("a1", "down", "a1"), ("b2", "left", "a2"), ("c2", "right", "c2")],
)
def test_moves_stop_at_the_edge(at, direction, to):
    assert name_of(move(cell_of(at), direction, 3)) == to


@pytest.mark.parametrize(
    ("at", "goal", "moves"), [("a1", "b3", ["up", "right"]), ("c2", "a2", ["left"]), ("b3", "b1", ["down"]), ("a1", "a1", [])]
)
def test_good_moves_lead_nearer(at, goal, moves):
    assert good_moves(cell_of(at), cell_of(goal)) == moves


@pytest.mark.parametrize(("reply", "direction"), [("up", "up"), ("go LEFT, then up", "left"), ("upper", None), ("", None)])
def test_a_move_is_the_first_direction_in_a_reply(reply, direction):
    assert read_move(reply) == direction


def test_a_task_of_another_kind_is_refused_by_name(walk):
    episode = walk(["up"], task=TASK)
    assert "task 't' has no size, start, goal; choose task.name=gridworld" in episode.info["error"]["error_message"]


def test_its_tasks_share_no_pair_and_their_solutions_are_good_first_moves():
    tasks = TASKS.get("gridworld")(3, size=3, train_size=52, val_size=20)  # 9 * 8 = 72 pairs: all of them
    pairs = {(task["start"], task["goal"]) for task in [*tasks.train, *tasks.val]}
    assert len(pairs) == 72
    for task in [*tasks.train, *tasks.val]:
        start, goal = cell_of(task["start"]), cell_of(task["goal"])
        assert tasks.reward_function(task, task["solution"]) == 1.0
        assert task["answer"] == abs(start[0] - goal[0]) + abs(start[1] - goal[1]) >= 1
        assert task["question"] == GridWorld().reset(task)  # what a warm start teaches is what the environment asks


def test_its_tasks_follow_from_the_seed():
    draw = TASKS.get("gridworld")
    assert draw(1).train == draw(1).train
    assert draw(1).train != draw(2).train


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": 1}, "task.size: must be in"),
        ({"size": 27}, "task.size: must be in"),
        ({"size": 2, "train_size": 10, "val_size": 3}, "has 12 pairs"),
        ({"train_size": 0}, "task.train_size must be at least 1"),
        ({"val_size": -1}, "task.val_size at least 0"),
    ],
)
def test_impossible_boards_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        TASKS.get("gridworld")(0, **keys)
