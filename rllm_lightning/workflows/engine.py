"""`UnifiedWorkflowEngine`: many tasks in, one episode for each out, in the order of the tasks.

    execute_tasks  ->  one asyncio task a rollout  ->  a workflow from the pool  ->  run_with_termination_handling  ->  Episode

Each run stands in a context of its own (`rollout.engine.REQUEST`), so that what the model samples depends on who asks and
not on which rollouts happen to run at the same time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.rollout.engine import REQUEST, RequestContext, RolloutEngine
from rllm_lightning.types import Episode, TerminationReason, to_plain
from rllm_lightning.workflows.workflow import Workflow

logger = logging.getLogger(__name__)


class EpisodeLogger(Protocol):
    def log(self, episodes: list[Episode], mode: str, step: int) -> Any: ...


class WorkflowError(RuntimeError):
    """A task whose workflow failed in every attempt; the workflow's own exception is the cause."""


def constructor_arguments(workflow_cls: type[Workflow]) -> dict[str, inspect.Parameter]:
    """The keywords that a workflow can be made with: those of its own `__init__` and, as long as each passes `**kwargs` on,
    those of its bases."""
    found: dict[str, inspect.Parameter] = {}
    for cls in workflow_cls.__mro__:
        if "__init__" not in vars(cls):
            continue
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        found = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} | found
        if cls is Workflow or not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def reward_argument(workflow_cls: type[Workflow], reward_function: Any) -> dict[str, Any]:
    """The keyword that hands the reward function of some tasks to a workflow; none where the workflow's constructor does not take it."""
    return {"reward_function": reward_function} if "reward_function" in constructor_arguments(workflow_cls) else {}


def check_workflow_args(workflow_cls: type[Workflow], given: Mapping[str, Any]) -> None:
    """Refuse keywords that a workflow's constructor does not have, and values that it would not take.

    Raises:
        ValueError: one line for each unknown keyword, with the closest match; else what `Workflow.check_arguments` says.
    """
    own = sorted(set(constructor_arguments(workflow_cls)) - {"rollout_engine", "executor"})
    problems = [
        schema.no_such_argument(f"rllm.workflow.workflow_args.{unknown}", workflow_cls.__name__, own)
        for unknown in sorted(set(given) - set(own))
    ]
    if problems:
        raise ValueError("\n".join(problems))
    workflow_cls.check_arguments(given)


class UnifiedWorkflowEngine:
    """Runs workflows on tasks, at most `n_parallel_tasks` at once.

    Args:
        workflow_cls: a subclass of `Workflow`.
        workflow_args: keywords of its constructor, beside those in `config.rllm.workflow.workflow_args`; these win.
        rollout_engine: answers the model calls.
        config: a full config, typed or not (None: all defaults). `timeout`, `gamma` and `reward_bonus_coeff` of
            `rllm.workflow` go to the workflow unless `workflow_args` holds them; `seed` keys the random streams.
        n_parallel_tasks, retry_limit, raise_on_error: replace the config's own (None: as in `config.rllm.workflow`).
        episode_logger: its `log(episodes, mode, step)` gets the episodes of each call.

    A task whose episode is an `ERROR` is run again, up to `retry_limit` runs in all. Every run of a rollout begins with the
    same random stream: a passing fault (a network) does not change what is sampled, and an answer that makes the workflow fail
    is not replaced by a luckier one, which would be drawn from another distribution than the one trained. After the last run
    `raise_on_error` decides: raise `WorkflowError` and cancel all others, or keep the failed episode.

    A workflow object whose run failed, timed out or was cancelled is not used again: a thread of it may still be at work.

    Raises:
        ValueError: an argument the workflow's constructor does not have, one it needs and was not given, a class that is no
            `Workflow`, environments that cannot run side by side, or a count below 1.
    """

    def __init__(
        self,
        workflow_cls: type[Workflow],
        workflow_args: dict[str, Any] | None,
        rollout_engine: RolloutEngine,
        config: Config | Any = None,
        n_parallel_tasks: int | None = None,
        retry_limit: int | None = None,
        raise_on_error: bool | None = None,
        episode_logger: EpisodeLogger | None = None,
    ):
        config = Config() if config is None else Config.from_config(config)
        settings = config.rllm.workflow
        self.workflow_cls = workflow_cls
        self.rollout_engine = rollout_engine
        self.seed = config.seed
        self.n_parallel_tasks = settings.n_parallel_tasks if n_parallel_tasks is None else n_parallel_tasks
        self.retry_limit = settings.retry_limit if retry_limit is None else retry_limit
        self.raise_on_error = settings.raise_on_error if raise_on_error is None else raise_on_error
        self.episode_logger = episode_logger
        for name in ("n_parallel_tasks", "retry_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"rllm.workflow.{name}: must be at least 1, got {getattr(self, name)}")
        if not (isinstance(workflow_cls, type) and issubclass(workflow_cls, Workflow)):
            raise ValueError(f"workflow_cls: expected a subclass of Workflow, got {workflow_cls!r}")

        known = constructor_arguments(workflow_cls)
        frame = {name: getattr(settings, name) for name in ("timeout", "gamma", "reward_bonus_coeff") if name in known}
        self.workflow_args = frame | settings.workflow_args | (workflow_args or {})
        self.set_training_step(0)
        self.executor = ThreadPoolExecutor(self.n_parallel_tasks, thread_name_prefix="workflow")
        self._closed = False
        self._pool: _Pool | None = None
        self._first = self._first_workflow()

    def set_training_step(self, step: int, mode: str = "train") -> None:
        """The step and mode of the calls of `execute_tasks` from now on."""
        self.global_step, self.mode = step, mode

    async def execute_tasks(
        self,
        tasks: Sequence[dict[str, Any]],
        task_ids: Sequence[str] | None = None,
        is_validation: bool = False,
        *,
        mode: str | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Episode]:
        """Run every task and return the episodes in the order of `tasks`.

        Args:
            tasks: one entry a rollout; a task that is to be sampled n times stands n times. No tasks give no episodes.
            task_ids: which task each entry is (None: its `"id"`, else its position). The i-th entry of an id is rollout i.
            is_validation: the mode is `"val"`.
            mode: `"train"`, `"val"` or `"greedy"` (None: `"val"` in validation, else as last set by `set_training_step`).
            global_step: the batch counted from 1 (None: as last set).
            kwargs: handed to each workflow's `run`; `timeout` replaces the workflow's own.

        Raises:
            ValueError: ids and tasks differ in number, or one id stands for two different tasks.
            WorkflowError: with `raise_on_error`, the first task that failed for good. All others were cancelled and have ended.
        """
        if self._closed:
            raise ValueError("this workflow engine was shut down")
        mode = mode or ("val" if is_validation else self.mode)
        step = self.global_step if global_step is None else global_step
        requests = [
            RequestContext(self.seed, step, mode, task_id, rollout_idx) for task_id, rollout_idx in _number_rollouts(tasks, task_ids)
        ]
        pool = self._pool_of_this_loop()
        try:
            async with asyncio.TaskGroup() as group:
                runs = [
                    group.create_task(self._run(pool, task, request, kwargs), name=f"{request.task_id}:{request.rollout_idx}")
                    for task, request in zip(tasks, requests, strict=True)
                ]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        episodes = [run.result() for run in runs]
        if self.episode_logger is not None:
            self.episode_logger.log(episodes, mode, step)
        return episodes

    def shutdown(self) -> None:
        """Close the threads; running ones are not waited for. Idempotent."""
        self._closed = True
        self.executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _run(self, pool: _Pool, task: dict[str, Any], request: RequestContext, kwargs: dict[str, Any]) -> Episode:
        """One rollout, with its retries."""
        uid = f"{request.task_id}:{request.rollout_idx}"
        for attempt in range(1, self.retry_limit + 1):
            async with pool.slots:
                workflow = pool.idle.pop() if pool.idle else self._build()
                REQUEST.set(dataclasses.replace(request, num_calls=0))
                episode = await workflow.run_with_termination_handling(task, uid, **kwargs)
                if episode.termination_reason not in (TerminationReason.ERROR, TerminationReason.TIMEOUT):
                    pool.idle.append(workflow)
            episode.id, episode.task = uid, task
            for index, trajectory in enumerate(episode.trajectories):
                trajectory.uid = _trajectory_uid(request, index)
            if episode.termination_reason is not TerminationReason.ERROR:
                return episode
            error = episode.info.get("error") or {"error_type": "ERROR", "error_message": "the workflow gave no reason"}
            message = f"{uid}: run {attempt} of {self.retry_limit} failed: {error['error_type']}: {error['error_message']}"
            logger.warning(message)
        if self.raise_on_error:
            raise WorkflowError(message) from workflow.failure
        return episode

    def _pool_of_this_loop(self) -> _Pool:
        loop = asyncio.get_running_loop()
        if self._pool is None or self._pool.loop is not loop:
            idle = [self._first] if self._pool is None else []
            self._pool = _Pool(loop, asyncio.Semaphore(self.n_parallel_tasks), idle)
        return self._pool

    def _build(self) -> Workflow:
        return self.workflow_cls(rollout_engine=self.rollout_engine, executor=self.executor, **self.workflow_args)

    def _first_workflow(self) -> Workflow:
        """Check the arguments by making the pool's first workflow, before anything expensive begins."""
        name = self.workflow_cls.__name__
        check_workflow_args(self.workflow_cls, self.workflow_args)
        try:
            workflow = self._build()
        except TypeError as error:
            raise ValueError(f"rllm.workflow.workflow_args: cannot make a {name}: {error}") from error
        if not workflow.is_multithread_safe():
            raise ValueError(f"{name}: an environment of it is not multithread-safe, so its workflows cannot run side by side")
        return workflow


@dataclass
class _Pool:
    """What belongs to one event loop: the slots of running workflows, and the workflow objects that are free.

    A semaphore is bound to a loop, and so may be what a workflow holds (an HTTP client): another loop gets another pool.
    """

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    idle: list[Workflow]


def _trajectory_uid(request: RequestContext, index: int) -> str:
    """As unique as a random one, and the same in a rerun."""
    key = (request.seed, request.global_step, request.mode, request.task_id, request.rollout_idx, index)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, repr(key)))


def _number_rollouts(tasks: Sequence[dict[str, Any]], task_ids: Sequence[str] | None) -> list[tuple[str, str]]:
    """`(task_id, rollout_idx)` of every entry: the i-th occurrence of an id is rollout i."""
    if task_ids is None:
        task_ids = [str(task.get("id", position)) for position, task in enumerate(tasks)]
    if len(task_ids) != len(tasks):
        raise ValueError(f"task_ids: {len(task_ids)} ids for {len(tasks)} tasks; give one a task")
    seen: dict[str, dict[str, Any]] = {}
    count: Counter[str] = Counter()
    numbered = []
    for task, task_id in zip(tasks, task_ids, strict=True):
        known = seen.setdefault(task_id, task)
        if known is not task and to_plain(known) != to_plain(task):
            raise ValueError(
                f"task id {task_id!r} stands for two different tasks; they would share one baseline. Give each an id of its own"
            )
        numbered.append((task_id, str(count[task_id])))
        count[task_id] += 1
    return numbered
