"""Every way a run can end, and the way from trajectories to a finished episode."""

import asyncio
import contextvars
import threading

import pytest

from rllm_lightning.types import Episode, ModelOutput, Step, TerminationEvent, TerminationReason, Trajectory
from rllm_lightning.workflows.workflow import Workflow

TASK = {"id": "t", "question": "?"}


def trajectory(*rewards, name="solver", **fields):
    return Trajectory(name=name, steps=[Step(model_response="x", reward=reward) for reward in rewards], **fields)


class Scripted(Workflow):
    """Runs the function it is given as its `run`."""

    def __init__(self, rollout_engine, executor, body=None, **kwargs):
        super().__init__(rollout_engine, executor, **kwargs)
        self.body = body

    async def run(self, task, uid, **kwargs):
        return await self.body(self, **kwargs)


@pytest.fixture
def make(engine, executor):
    return lambda body=None, **kwargs: Scripted(engine, executor, body, **kwargs)


def ended(workflow, **kwargs):
    return asyncio.run(workflow.run_with_termination_handling(TASK, "t:0", **kwargs))


# ------------------------------------------------------------------------------------------------------- how a run can end


def test_a_returned_episode_is_kept_and_what_is_missing_is_filled_in(make):
    async def body(workflow):
        return Episode(trajectories=[trajectory(1.0, 0.5), trajectory(1.0, reward=0.0)], is_correct=False, metrics={"own": 3})

    episode = ended(make(body))
    assert [t.reward for t in episode.trajectories] == [1.5, 0.0]  # the sum where it is missing; a reward of 0.0 is a reward
    assert episode.termination_reason is TerminationReason.UNKNOWN
    assert not episode.is_correct  # the workflow's own word
    assert episode.metrics == {"own": 3}


def test_a_run_that_returns_none_gives_what_it_committed(make):
    async def body(workflow):
        workflow.commit("solver", trajectory=trajectory(0.0, 1.0))
        workflow.commit("solver", trajectory=trajectory(0.0))
        workflow.commit("judge", trajectory=trajectory(0.5))

    episode = ended(make(body))
    assert episode.id == "t:0"
    assert episode.task == TASK
    assert [t.name for t in episode.trajectories] == ["solver", "solver", "judge"]
    assert episode.metrics == {"solver_acc": 0.5, "judge_acc": 0.5}  # (1 + 0) / 2 and 0.5
    assert episode.is_correct  # 1 + 0 + .5 > 0
    assert episode.termination_reason is TerminationReason.UNKNOWN


def test_a_run_that_gives_nothing_at_all_is_an_error(make):
    async def body(workflow):
        return None

    episode = ended(make(body))
    assert episode.termination_reason is TerminationReason.ERROR
    assert episode.info["error"]["error_message"] == "Scripted returned None for t:0 and committed no trajectory"


def test_a_run_that_returns_something_else_is_an_error(make):
    async def body(workflow):
        return trajectory(1.0)

    episode = ended(make(body))
    assert episode.info["error"]["error_message"] == "Scripted returned Trajectory for t:0; expected an Episode or None"


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_a_termination_event_ends_with_its_reason_and_what_was_committed(make, reason):
    async def body(workflow):
        workflow.commit(trajectory=trajectory(1.0))
        raise TerminationEvent(reason)

    episode = ended(make(body))
    assert episode.termination_reason is reason
    assert [t.reward for t in episode.trajectories] == [1.0]
    assert "error" not in episode.info


def test_a_termination_event_inside_a_task_group_keeps_its_reason(make):
    async def too_long():
        raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)

    async def body(workflow):
        async with asyncio.TaskGroup() as group:
            group.create_task(too_long())
            group.create_task(too_long())

    assert ended(make(body)).termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED


def test_a_run_over_its_time_is_a_timeout_with_what_was_committed(make):
    async def body(workflow):
        workflow.commit(trajectory=trajectory(0.0))
        await asyncio.Event().wait()

    episode = ended(make(body, timeout=0.01))
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert len(episode.trajectories) == 1
    assert not episode.is_correct
    assert ended(make(body), timeout=0.01).termination_reason is TerminationReason.TIMEOUT  # given for this run alone


def test_a_timeout_error_of_its_own_is_an_error_and_no_timeout(make):
    async def body(workflow):
        raise TimeoutError("the tool did not answer")

    episode = ended(make(body))
    assert episode.termination_reason is TerminationReason.ERROR
    assert episode.info["error"]["error_message"] == "the tool did not answer"


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit("bad"), KeyboardInterrupt("bad")])
def test_an_exception_is_an_error_episode_with_its_traceback(make, error):
    async def body(workflow):
        workflow.commit(trajectory=trajectory(0.0))
        raise error

    workflow = make(body)
    episode = ended(workflow)
    details = episode.info["error"]
    assert episode.termination_reason is TerminationReason.ERROR
    assert (details["error_message"], details["error_type"]) == ("bad", type(error).__name__)
    assert "in body" in details["traceback"]
    assert len(episode.trajectories) == 1
    assert workflow.failure is error


def test_a_step_reward_that_cannot_be_summed_is_an_error_episode(make):
    async def body(workflow):
        workflow.commit(trajectory=trajectory(1.0, None))

    episode = ended(make(body))
    assert episode.termination_reason is TerminationReason.ERROR
    assert episode.info["error"]["error_type"] == "TypeError"
    assert episode.trajectories == []


def test_cancelling_a_run_cancels_it(make):
    async def body(workflow):
        await asyncio.Event().wait()

    async def main():
        run = asyncio.create_task(make(body).run_with_termination_handling(TASK, "t:0"))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())


def test_awaiting_a_cancelled_task_is_an_error_and_cancels_nothing(make):
    async def body(workflow):
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner

    assert ended(make(body)).info["error"]["error_type"] == "CancelledError"


def test_nothing_of_an_earlier_run_is_left_in_the_next(make):
    async def body(workflow, fail):
        workflow.commit(trajectory=trajectory(1.0))
        if fail:
            raise ValueError

    workflow = make(body)
    assert len(ended(workflow, fail=True).trajectories) == 1
    assert len(ended(workflow, fail=False).trajectories) == 1
    assert workflow.failure is None


# ------------------------------------------------------------------------------------------------ agents and environments


class Clerk:
    def __init__(self):
        self.trajectory = Trajectory(name="clerk")

    def reset(self):
        self.trajectory = Trajectory(name="clerk")


class Room:
    def __init__(self, safe=True):
        self.safe, self.resets = safe, []

    def reset(self, task):
        self.resets.append(task)

    def step(self, action):
        return None

    def is_multithread_safe(self):
        return self.safe


def test_agents_are_collected_once_whether_committed_or_not(make):
    async def body(workflow):
        workflow.clerk.trajectory.steps.append(Step(model_response="x", reward=1.0))
        workflow.other.trajectory.steps.append(Step(model_response="x", reward=1.0))
        workflow.commit("first", agent=workflow.clerk)

    workflow = make(body)
    workflow.clerk, workflow.other, workflow.idle = Clerk(), Clerk(), Clerk()
    episode = ended(workflow)
    assert [t.name for t in episode.trajectories] == ["first", "clerk"]
    assert [t.name for t in ended(workflow).trajectories] == ["first", "clerk"]  # agents begin anew in the next run


def test_commit_copies_and_can_reset_the_agent(make):
    workflow, clerk = make(), Clerk()
    clerk.trajectory.steps.append(Step(reward=1.0))
    workflow.commit(agent=clerk, reset=True)
    assert clerk.trajectory.steps == []
    original = trajectory(1.0)
    workflow.commit(trajectory=original)
    original.steps[0].reward = 9.0
    workflow.commit(trajectory=Trajectory())  # without steps: left out
    assert [t.steps[0].reward for t in workflow.collect_trajectories().trajectories] == [1.0, 1.0]


def test_commit_needs_an_agent_or_a_trajectory(make):
    with pytest.raises(ValueError, match="either an agent or a trajectory"):
        make().commit("x")
    with pytest.raises(ValueError, match="either an agent or a trajectory"):
        make().commit("x", agent=Clerk(), trajectory=Trajectory())


def test_reset_resets_environments_and_agents(make):
    workflow = make()
    workflow.room, workflow.clerk = Room(), Clerk()
    workflow.clerk.trajectory.steps.append(Step())
    workflow.commit(trajectory=trajectory(1.0))
    workflow.reset(TASK, "t:3")
    assert workflow.room.resets == [TASK]
    assert (workflow.task, workflow.uid) == (TASK, "t:3")
    assert workflow.clerk.trajectory.steps == []
    assert workflow.clerk.trajectory.task == TASK
    assert workflow.collect_trajectories().trajectories == []


def test_a_workflow_is_multithread_safe_when_its_environments_are(make):
    workflow = make()
    assert workflow.is_multithread_safe()
    workflow.room = Room(safe=False)
    assert not workflow.is_multithread_safe()


# ------------------------------------------------------------------------------------------------------------------ threads


def test_the_executor_runs_in_another_thread_with_the_context_of_the_run(make):
    variable = contextvars.ContextVar("variable", default="unset")

    def blocking(a, b):
        return a + b, variable.get(), threading.current_thread() is threading.main_thread()

    async def body(workflow):
        variable.set("mine")
        workflow.seen = await workflow.run_in_executor(blocking, 1, b=2)
        workflow.commit(trajectory=trajectory(1.0))

    workflow = make(body)
    ended(workflow)
    assert workflow.seen == (3, "mine", False)


@pytest.mark.parametrize("error", [ValueError, SystemExit, StopIteration])
def test_an_exception_in_the_executor_is_an_error_episode(make, error):
    """A future cannot carry StopIteration; without care the run would wait for ever."""

    def blocking():
        raise error("bad")

    async def body(workflow):
        await workflow.run_in_executor(blocking)

    assert ended(make(body, timeout=5)).termination_reason is TerminationReason.ERROR


# ------------------------------------------------------------------------------------------------- rewards and post-processing


def test_a_trajectory_reward_is_the_sum_of_its_step_rewards(make):
    one, empty = trajectory(0.25, 0.5, reward=9.0), Trajectory()
    make().compute_trajectory_reward(one)
    make().compute_trajectory_reward(empty)
    assert (one.reward, empty.reward) == (0.75, 0.0)


def test_a_trajectory_reward_that_is_set_stays(make):
    """B05: a reward of 0.0 is a reward, also where the last step's is 1.0."""

    async def body(workflow):
        workflow.commit(trajectory=trajectory(0.0, 1.0, reward=0.0))

    episode = ended(make(body))
    assert episode.trajectories[0].reward == 0.0
    assert not episode.is_correct


def test_the_bonus_adds_the_change_of_the_raw_rewards(make):
    one = trajectory(1.0, 0.0, 0.5)
    make(reward_bonus_coeff=0.5).adjust_step_rewards(one)
    # 1; 0 + .5·(0-1) = -.5; .5 + .5·(.5-0) = .75
    assert [step.reward for step in one.steps] == [1.0, -0.5, 0.75]


def test_gamma_turns_step_rewards_into_discounted_returns(make):
    one = trajectory(1.0, 0.0, 2.0)
    make(gamma=0.5).adjust_step_rewards(one)
    # from the end: 2; 0 + .5·2 = 1; 1 + .5·1 = 1.5
    assert [step.reward for step in one.steps] == [1.5, 1.0, 2.0]
    assert [step.mc_return for step in one.steps] == [1.5, 1.0, 2.0]


def test_the_bonus_comes_before_the_discount_and_the_trajectory_reward_before_both(make):
    async def body(workflow):
        workflow.commit(trajectory=trajectory(0.0, 1.0))

    episode = ended(make(body, gamma=0.5, reward_bonus_coeff=1.0))
    # shaped: 0; 1 + 1·(1-0) = 2. returns: 2; 0 + .5·2 = 1. trajectory: 0 + 1
    assert [step.reward for step in episode.trajectories[0].steps] == [1.0, 2.0]
    assert episode.trajectories[0].reward == 1.0


def test_neither_bonus_nor_gamma_leaves_step_rewards_as_they_are(make):
    one = trajectory(1.0, 0.0)
    make().adjust_step_rewards(one)
    assert [step.reward for step in one.steps] == [1.0, 0.0]
    assert [step.mc_return for step in one.steps] == [0.0, 0.0]


@pytest.mark.parametrize(("rewards", "correct"), [([1.0, -1.0], False), ([0.1], True), ([], False), ([-1.0, 0.5], False)])
def test_an_episode_is_correct_when_its_rewards_sum_to_more_than_zero(make, rewards, correct):
    episode = Episode(trajectories=[Trajectory(reward=reward) for reward in rewards])
    make().assign_episode_correctness(episode)
    assert episode.is_correct is correct


def test_a_last_step_is_dropped_only_where_it_holds_nothing(make):
    workflow = make()
    begun = Trajectory(steps=[Step(response_ids=[1], reward=1.0), Step(observation="the next question")])
    full = Trajectory(steps=[Step(model_output=ModelOutput(text=""), reward=1.0)])
    episode = workflow.postprocess_episode(Episode(trajectories=[begun, full]))
    assert [len(t.steps) for t in episode.trajectories] == [1, 1]


def test_an_unknown_argument_is_refused(make):
    with pytest.raises(TypeError, match="Scripted: unknown arguments time_out"):
        make(time_out=3)


def test_a_timeout_must_be_positive(make):
    with pytest.raises(ValueError, match="timeout must be above 0 seconds, got 0"):
        make(timeout=0)
