"""Many tasks in, one episode for each out: order, numbering, streams, retries, failures, cancellation."""

import asyncio
import contextvars
import logging
import traceback

import pytest

from rllm_lightning.config import Config
from rllm_lightning.rollout.engine import EngineSetup, current_request
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine, WorkflowError, constructor_arguments
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow
from rllm_lightning.workflows.workflow import Workflow


class Body(Workflow):
    """Calls `body(workflow, task, uid)`, commits a step, and counts how many of it exist and run."""

    def __init__(self, rollout_engine, executor, body=None, **kwargs):
        super().__init__(rollout_engine, executor, **kwargs)
        self.body = body
        self.body.made = getattr(body, "made", 0) + 1

    async def run(self, task, uid, **kwargs):
        await self.body(self, task, uid, **kwargs)
        self.commit("solver", trajectory=Trajectory(steps=[Step(model_response=task["question"], reward=1.0)]))


def tasks(count):
    return [{"id": f"t:{i}", "question": f"q{i}"} for i in range(count)]


@pytest.fixture
def make(engine):
    made = []

    def build(body, cls=Body, **kwargs):
        made.append(UnifiedWorkflowEngine(cls, {"body": body}, engine, **kwargs))
        return made[-1]

    yield build
    for workflow_engine in made:
        workflow_engine.shutdown()


async def nothing(workflow, task, uid):
    pass


# ------------------------------------------------------------------------------------------------------------------ running


def test_two_hundred_tasks_keep_their_order_and_seven_run_at_once(make):
    running = set()
    most = 0

    async def body(workflow, task, uid):
        nonlocal most
        running.add(uid)
        most = max(most, len(running))
        for _ in range(int(task["question"][1:]) * 7 % 5):  # ends out of order
            await asyncio.sleep(0)
        running.discard(uid)

    async def main():
        episodes = await make(body, n_parallel_tasks=7).execute_tasks(tasks(200))
        return episodes, len(asyncio.all_tasks())

    episodes, alive = asyncio.run(main())
    assert [episode.id for episode in episodes] == [f"t:{i}:0" for i in range(200)]
    assert [episode.task["question"] for episode in episodes] == [f"q{i}" for i in range(200)]
    assert most == 7
    assert alive == 1  # this test's own
    assert body.made <= 7


def test_the_ith_occurrence_of_a_task_is_its_rollout_i(make):
    """B21: 3 tasks, n=4: exactly 12 episodes, rollout indices 0 to 3. B07: ids may hold colons."""
    three = [task for task in tasks(3) for _ in range(4)]
    episodes = asyncio.run(make(nothing).execute_tasks(three))
    assert len(episodes) == 12
    assert [(episode.task_id, episode.rollout_idx) for episode in episodes] == [(f"t:{i}", str(k)) for i in range(3) for k in range(4)]


def test_given_task_ids_win_and_tasks_without_ids_are_numbered(make):
    engine = make(nothing)
    assert [e.id for e in asyncio.run(engine.execute_tasks(tasks(2), ["a", "b"]))] == ["a:0", "b:0"]
    assert [e.id for e in asyncio.run(engine.execute_tasks([{"question": "x"}, {"question": "y"}]))] == ["0:0", "1:0"]


def test_an_episode_gets_its_id_and_task_whatever_the_workflow_wrote(engine):
    class Own(Workflow):
        async def run(self, task, uid, **kwargs):
            return Episode(id="mine", task="other")

    made = UnifiedWorkflowEngine(Own, None, engine)
    (episode,) = asyncio.run(made.execute_tasks(tasks(1)))
    assert (episode.id, episode.task) == ("t:0:0", tasks(1)[0])
    made.shutdown()


def test_no_tasks_give_no_episodes(make):
    assert asyncio.run(make(nothing).execute_tasks([])) == []


def test_ids_that_do_not_fit_the_tasks_are_refused(make):
    with pytest.raises(ValueError, match="1 ids for 2 tasks"):
        asyncio.run(make(nothing).execute_tasks(tasks(2), ["a"]))


def test_one_id_for_two_tasks_is_refused(make):
    """B07: different tasks never share one baseline."""
    with pytest.raises(ValueError, match="task id 'a' stands for two different tasks"):
        asyncio.run(make(nothing).execute_tasks(tasks(2), ["a", "a"]))
    copies = [{"question": "same"}, {"question": "same"}]
    assert [e.id for e in asyncio.run(make(nothing).execute_tasks(copies, ["a", "a"]))] == ["a:0", "a:1"]


def test_keywords_reach_the_workflow_and_the_timeout_its_frame(make):
    seen = []

    async def body(workflow, task, uid, speed=None):
        seen.append(speed)
        await asyncio.sleep(0 if speed else 10)

    engine = make(body)
    asyncio.run(engine.execute_tasks(tasks(1), speed=3))
    (slow,) = asyncio.run(engine.execute_tasks(tasks(1), timeout=0.01))
    assert seen == [3, None]
    assert slow.termination_reason is TerminationReason.TIMEOUT


# ------------------------------------------------------------------------------------------------------------------ requests


def test_each_run_stands_in_its_own_request(make):
    seen = {}

    async def body(workflow, task, uid):
        await asyncio.sleep(0)
        request = current_request()
        seen[uid] = (request.seed, request.global_step, request.mode, request.task_id, request.rollout_idx, request.num_calls)

    engine = make(body, config=Config(seed=5))
    engine.set_training_step(3)
    asyncio.run(engine.execute_tasks([tasks(1)[0]] * 2))
    assert seen == {"t:0:0": (5, 3, "train", "t:0", "0", 0), "t:0:1": (5, 3, "train", "t:0", "1", 0)}
    asyncio.run(engine.execute_tasks(tasks(1), is_validation=True))
    assert seen["t:0:0"][2] == "val"
    asyncio.run(engine.execute_tasks(tasks(1), mode="greedy", global_step=8))
    assert seen["t:0:0"][1:3] == (8, "greedy")


def test_what_is_sampled_does_not_depend_on_how_many_run_at_once():
    """B22: members of a group differ, a rerun reproduces them."""
    engine = ScriptedEngine(EngineSetup(), answers=[str(i) for i in range(50)])
    batch = [task for task in tasks(5) for _ in range(4)]

    def texts(n_parallel_tasks, order):
        workflow_engine = UnifiedWorkflowEngine(
            SingleTurnWorkflow, {"reward_function": lambda task, response: 1.0}, engine, n_parallel_tasks=n_parallel_tasks
        )
        episodes = asyncio.run(workflow_engine.execute_tasks(batch[::order]))
        workflow_engine.shutdown()
        return {episode.id: episode.trajectories[0].steps[0].model_response for episode in episodes}

    one, many, again = texts(1, 1), texts(20, 1), texts(3, -1)
    assert one == many == again
    assert len(set(one.values())) > 10


def test_context_variables_of_one_run_do_not_reach_another(make):
    variable = contextvars.ContextVar("variable", default=None)

    async def body(workflow, task, uid):
        assert variable.get() is None
        variable.set(uid)
        await asyncio.sleep(0)
        assert await workflow.run_in_executor(variable.get) == uid

    episodes = asyncio.run(make(body, n_parallel_tasks=2).execute_tasks(tasks(10)))
    assert {e.termination_reason for e in episodes} == {TerminationReason.UNKNOWN}


def test_it_works_on_one_event_loop_after_another(make):
    async def body(workflow, task, uid):
        await asyncio.sleep(0)

    engine = make(body, n_parallel_tasks=2)
    for _ in range(3):
        assert len(asyncio.run(engine.execute_tasks(tasks(10)))) == 10


def test_two_calls_at_once_share_the_pool(make):
    running, most = 0, 0

    async def body(workflow, task, uid):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    async def main():
        engine = make(body, n_parallel_tasks=3)
        return await asyncio.gather(engine.execute_tasks(tasks(10)), engine.execute_tasks(tasks(10)))

    first, second = asyncio.run(main())
    assert (len(first), len(second), most) == (10, 10, 3)


# ----------------------------------------------------------------------------------------------------------------- failures


def failing_first(times):
    """A body that fails `times` times for each task, then works; each run asks for its first random number."""
    draws = {}

    async def body(workflow, task, uid):
        draws.setdefault(uid, []).append(current_request().next_stream().random())
        if len(draws[uid]) <= times:
            raise OSError(f"failure {len(draws[uid])} of {uid}")

    body.draws = draws
    return body


def test_an_error_is_retried_with_the_same_random_stream(make):
    body = failing_first(2)
    (episode,) = asyncio.run(make(body, retry_limit=3).execute_tasks(tasks(1)))
    assert episode.termination_reason is TerminationReason.UNKNOWN
    draws = body.draws["t:0:0"]
    assert len(draws) == 3
    assert len(set(draws)) == 1


def test_after_the_last_run_the_failure_is_raised_with_its_cause(make):
    body = failing_first(5)
    with pytest.raises(WorkflowError, match="t:0:0: run 2 of 2 failed: OSError: failure 2 of t:0:0") as error:
        asyncio.run(make(body, retry_limit=2).execute_tasks(tasks(1)))
    assert isinstance(error.value.__cause__, OSError)
    assert "body" in [frame.name for frame in traceback.extract_tb(error.value.__cause__.__traceback__)]
    assert len(body.draws["t:0:0"]) == 2


def test_or_the_failed_episode_is_kept_in_its_place(make, caplog):
    """B54: a crashed episode stays among the episodes, and is not correct."""

    async def body(workflow, task, uid):
        if uid == "t:1:0":
            raise ValueError("bad")

    with caplog.at_level(logging.WARNING):
        episodes = asyncio.run(make(body, raise_on_error=False).execute_tasks(tasks(3)))
    assert [e.termination_reason.value for e in episodes] == ["unknown", "error", "unknown"]
    assert [e.is_correct for e in episodes] == [True, False, True]
    assert (episodes[1].id, episodes[1].task) == ("t:1:0", tasks(2)[1])
    assert episodes[1].info["error"]["error_message"] == "bad"
    assert "t:1:0: run 1 of 1 failed: ValueError: bad" in caplog.text


def test_a_timeout_is_no_error_and_is_not_retried(make):
    runs = []

    async def body(workflow, task, uid):
        runs.append(uid)
        await asyncio.sleep(10)

    (episode,) = asyncio.run(make(body, retry_limit=3).execute_tasks(tasks(1), timeout=0.01))
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert len(runs) == 1


def test_a_failure_cancels_the_others_and_leaves_no_task_running(make):
    cancelled = []

    async def body(workflow, task, uid):
        if uid == "t:3:0":
            await asyncio.sleep(0)
            raise ValueError("bad")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(uid)
            raise

    async def main():
        engine = make(body, n_parallel_tasks=7)
        with pytest.raises(WorkflowError):
            await engine.execute_tasks(tasks(50))
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    # those that ran beside it, and the one that began in the slot it freed; the other 42 never began
    assert sorted(cancelled) == [f"t:{i}:0" for i in (0, 1, 2, 4, 5, 6, 7)]


def test_several_failures_at_once_raise_the_first_alone(make):
    async def body(workflow, task, uid):
        raise ValueError(uid)

    with pytest.raises(WorkflowError, match="t:0:0"):
        asyncio.run(make(body).execute_tasks(tasks(5)))


def test_cancelling_the_call_cancels_the_workflows(make):
    cancelled = []

    async def body(workflow, task, uid):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(uid)
            raise

    async def main():
        call = asyncio.create_task(make(body).execute_tasks(tasks(3)))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert len(cancelled) == 3


def test_system_exit_in_a_workflow_is_an_error_like_any_other(make):
    async def body(workflow, task, uid):
        raise SystemExit(3)

    (episode,) = asyncio.run(make(body, raise_on_error=False).execute_tasks(tasks(1)))
    assert episode.info["error"]["error_type"] == "SystemExit"


def test_a_workflow_that_failed_is_replaced(make):
    """A thread of it may still be at work, and would commit to the next task's episode."""
    seen = []

    async def body(workflow, task, uid):
        seen.append(workflow)
        if uid == "t:0:0":
            raise ValueError

    asyncio.run(make(body, n_parallel_tasks=1, raise_on_error=False).execute_tasks(tasks(3)))
    assert seen[1] is not seen[0]
    assert seen[2] is seen[1]


def test_an_error_episode_of_the_workflows_own_is_a_failure(engine):
    class Own(Workflow):
        async def run(self, task, uid, **kwargs):
            return Episode(termination_reason=TerminationReason.ERROR)

    made = UnifiedWorkflowEngine(Own, None, engine)
    with pytest.raises(WorkflowError, match="the workflow gave no reason"):
        asyncio.run(made.execute_tasks(tasks(1)))
    made.shutdown()


# ------------------------------------------------------------------------------------------------------- logging and settings


def test_episodes_are_logged_with_their_mode_and_step(make):
    calls = []

    class Log:
        def log(self, episodes, mode, step):
            calls.append(([e.id for e in episodes], mode, step))

    engine = make(nothing, episode_logger=Log())
    engine.set_training_step(4)
    asyncio.run(engine.execute_tasks(tasks(2)))
    asyncio.run(engine.execute_tasks(tasks(1), is_validation=True))
    assert calls == [(["t:0:0", "t:1:0"], "train", 4), (["t:0:0"], "val", 4)]


def test_the_config_sets_the_frame_and_workflow_args_win(engine):
    config = Config()
    config.rllm.workflow.timeout, config.rllm.workflow.gamma, config.rllm.workflow.reward_bonus_coeff = 7.0, 0.5, 0.25
    config.rllm.workflow.n_parallel_tasks, config.rllm.workflow.retry_limit, config.rllm.workflow.raise_on_error = 3, 2, False
    config.rllm.workflow.workflow_args = {"system_prompt": "brief"}
    made = UnifiedWorkflowEngine(SingleTurnWorkflow, {"reward_function": len, "gamma": 0.9}, engine, config)
    workflow = made._first
    assert (workflow.timeout, workflow.gamma, workflow.reward_bonus_coeff, workflow.system_prompt) == (7.0, 0.9, 0.25, "brief")
    assert (made.n_parallel_tasks, made.retry_limit, made.raise_on_error) == (3, 2, False)
    made.shutdown()


def test_a_workflow_with_a_closed_constructor_gets_only_what_it_takes(engine):
    class Closed(Workflow):
        def __init__(self, rollout_engine, executor, depth):
            super().__init__(rollout_engine, executor)

        async def run(self, task, uid, **kwargs):
            return None

    assert list(constructor_arguments(Closed)) == ["rollout_engine", "executor", "depth"]
    UnifiedWorkflowEngine(Closed, {"depth": 3}, engine).shutdown()
    with pytest.raises(ValueError, match=r"rllm\.workflow\.workflow_args\.timeout: Closed has no such argument"):
        UnifiedWorkflowEngine(Closed, {"depth": 3, "timeout": 5}, engine)


def test_an_unknown_argument_is_one_clear_error(engine):
    with pytest.raises(ValueError) as error:
        UnifiedWorkflowEngine(SingleTurnWorkflow, {"reward_fn": len}, engine)
    assert str(error.value) == (
        "rllm.workflow.workflow_args.reward_fn: SingleTurnWorkflow has no such argument; did you mean reward_function? "
        "it has: gamma, reward_bonus_coeff, reward_function, system_prompt, timeout"
    )


def test_a_missing_argument_is_one_clear_error(engine):
    with pytest.raises(ValueError, match=r"rllm\.workflow\.workflow_args: cannot make a SingleTurnWorkflow: .*'reward_function'"):
        UnifiedWorkflowEngine(SingleTurnWorkflow, {}, engine)


def test_environments_that_are_not_thread_safe_are_refused(engine):
    class Unsafe(Workflow):
        async def run(self, task, uid, **kwargs):
            return None

        def is_multithread_safe(self):
            return False

    with pytest.raises(ValueError, match="Unsafe: an environment of it is not multithread-safe"):
        UnifiedWorkflowEngine(Unsafe, None, engine)


@pytest.mark.parametrize("wrong", [{"n_parallel_tasks": 0}, {"retry_limit": 0}])
def test_counts_must_be_at_least_one(make, wrong):
    with pytest.raises(ValueError, match=f"rllm.workflow.{next(iter(wrong))}: must be at least 1, got 0"):
        make(nothing, **wrong)


def test_the_class_must_be_a_workflow(engine):
    with pytest.raises(ValueError, match="expected a subclass of Workflow"):
        UnifiedWorkflowEngine(dict, {}, engine)


def test_shutdown_closes_the_threads_and_may_be_called_twice(make):
    engine = make(nothing)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RuntimeError):
        engine.executor.submit(print)
    with pytest.raises(ValueError, match="was shut down"):
        asyncio.run(engine.execute_tasks(tasks(1)))
