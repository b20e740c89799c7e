"""What a workflow is: one agent's way through one task, from the task to an `Episode`.

    run_with_termination_handling  ->  run (yours)  ->  commit ...  ->  collect_trajectories  ->  postprocess_episode

`run` either returns a finished `Episode`, or commits trajectories and returns None (or raises `TerminationEvent`). However it
ends, `run_with_termination_handling` turns the end into an episode:

| `run`                                              | episode                                                              |
|----------------------------------------------------|----------------------------------------------------------------------|
| returns an `Episode`                               | that one; missing trajectory rewards and reason are filled in        |
| returns None after `commit`                        | the committed trajectories, `UNKNOWN`                                |
| returns None and committed nothing                 | `ERROR`                                                              |
| returns anything else                              | `ERROR`                                                              |
| raises `TerminationEvent(reason)`                  | the committed trajectories (maybe none), `reason`                    |
| takes longer than `timeout`                        | the committed trajectories (maybe none), `TIMEOUT`                   |
| raises (also `SystemExit`, `KeyboardInterrupt`)    | the committed trajectories (maybe none), `ERROR`, `info["error"]`    |
| is cancelled from outside                          | none: the cancellation goes on                                       |

To add a workflow: subclass `Workflow` in a module of your own, register it with `@register_workflow("x")`, and choose it with
`rllm.workflow.name=x`; its constructor's keywords come from `rllm.workflow.workflow_args`.
"""

from __future__ import annotations

import asyncio
import contextvars
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from copy import deepcopy
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from rllm_lightning.rollout.engine import RolloutEngine
from rllm_lightning.types import Episode, Step, TerminationEvent, TerminationReason, Trajectory
from rllm_lightning.workflows.environment import Environment

T = TypeVar("T")


@runtime_checkable
class Agent(Protocol):
    """Anything that keeps a trajectory of its own. A workflow's public attributes of this kind are found and reset."""

    trajectory: Trajectory

    def reset(self) -> None: ...


class Workflow(ABC):
    """Base of all workflows. One object runs one task at a time, and many after each other.

    Args:
        rollout_engine: answers the workflow's model calls.
        executor: threads for `run_in_executor`.
        timeout: seconds that one run may take.
        gamma: discount of step rewards; 0 leaves them as they are.
        reward_bonus_coeff: weight of the change from one step's reward to the next, added to the step rewards.
        kwargs: none are known here; subclasses may take their own.

    Raises:
        TypeError: an argument that no class on the way here took (a misspelt one would be lost otherwise).
        ValueError: `timeout` is not above 0.

    `provides` names what its trajectories carry for estimators that need more than a reward (`algorithms.needs.FROM_WORKFLOW`).
    A reward function that puts it into `RewardOutput.metadata` says so by an attribute of the same name.
    """

    provides: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        **kwargs: Any,
    ):
        if kwargs:
            raise TypeError(f"{type(self).__name__}: unknown arguments {', '.join(sorted(kwargs))}")
        if timeout <= 0:
            raise ValueError(f"{type(self).__name__}: timeout must be above 0 seconds, got {timeout}")
        self.rollout_engine = rollout_engine
        self.executor = executor
        self.timeout = timeout
        self.gamma = gamma
        self.reward_bonus_coeff = reward_bonus_coeff
        self.task: dict[str, Any] | None = None
        self.uid: str | None = None
        self.failure: BaseException | None = None  # what made the last run an ERROR
        self._committed: list[Trajectory] = []

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """Raise a `ValueError` where these keywords of the constructor cannot be meant. Called before a model is loaded."""

    @abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        """Work on `task`; `uid` is `"{task_id}:{rollout_idx}"`. See the module's docstring for how it may end."""

    # -------------------------------------------------------------------------------------------------------- the frame

    async def run_with_termination_handling(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        """Run the workflow on `task` and return an episode however it ends (the table at the top of the module).

        A run that blocks the event loop cannot be interrupted: put such work into `run_in_executor`. A thread started there
        goes on after a timeout, since Python cannot stop threads.

        Args:
            kwargs: handed to `run`, except `timeout` (seconds), which replaces the workflow's own for this run.

        Raises:
            asyncio.CancelledError: the surrounding asyncio task was cancelled.
        """
        deadline = asyncio.timeout(kwargs.pop("timeout", self.timeout))
        self._forget(task, uid)
        try:
            async with deadline:
                episode = await self.run(task, uid, **kwargs)
            return self._finished(episode)
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise
            cause = _single(error)
            if isinstance(error, TimeoutError) and deadline.expired():
                return self._ended(TerminationReason.TIMEOUT)
            if isinstance(cause, TerminationEvent):
                return self._ended(cause.reason)
            return self._failed(error)

    def _forget(self, task: dict[str, Any], uid: str) -> None:
        """Drop what an earlier run left behind."""
        self.task, self.uid, self.failure, self._committed = task, uid, None, []
        for agent in self._attributes(Agent):
            agent.reset()
            agent.trajectory.task = task

    def _finished(self, episode: Any) -> Episode:
        """Complete what `run` returned: an episode, or None when the committed trajectories are the result."""
        if episode is None:
            if not (collected := self.collect_trajectories()).trajectories:
                raise ValueError(f"{type(self).__name__} returned None for {self.uid} and committed no trajectory")
            return self.postprocess_episode(collected, TerminationReason.UNKNOWN)
        if not isinstance(episode, Episode):
            raise TypeError(f"{type(self).__name__} returned {type(episode).__name__} for {self.uid}; expected an Episode or None")
        for trajectory in episode.trajectories:
            if trajectory.reward is None:
                self.compute_trajectory_reward(trajectory)
        episode.termination_reason = episode.termination_reason or TerminationReason.UNKNOWN
        return episode

    def _ended(self, reason: TerminationReason) -> Episode:
        try:
            return self.postprocess_episode(self.collect_trajectories(), reason)
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> Episode:
        self.failure, cause = error, _single(error)
        details = {
            "error_message": str(cause),
            "error_type": type(cause).__name__,
            "traceback": "".join(traceback.format_exception(error)),
        }
        try:
            return self.postprocess_episode(self.collect_trajectories(), TerminationReason.ERROR, error=details)
        except Exception:  # half-built trajectories cannot always be processed; the first error is the one to report
            return Episode(self.uid or "", self.task, TerminationReason.ERROR, info={"error": details})

    # --------------------------------------------------------------------------------------------- for use inside of `run`

    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> None:
        """Begin anew with `task`: forget committed trajectories, reset agents and environments.

        Every run begins with the forgetting; only a workflow with environments needs to call this itself.
        """
        self._forget(task or {}, uid or "")
        for environment in self._attributes(Environment):
            environment.reset(task=task)

    def commit(
        self, name: str | None = None, agent: Agent | None = None, trajectory: Trajectory | None = None, reset: bool = False
    ) -> None:
        """Add a copy of a trajectory to the episode. One without steps is left out.

        Args:
            name: the trajectory's role; None keeps the name it has.
            agent: whose trajectory it is; give this or `trajectory`.
            reset: reset the agent afterwards, so that it can begin another trajectory.
        """
        if (agent is None) == (trajectory is None):
            raise ValueError("commit: give either an agent or a trajectory")
        source = agent.trajectory if agent is not None else trajectory
        assert source is not None
        if name:
            source.name = name
        if source.steps:
            self._committed.append(deepcopy(source))
        if agent is not None and reset:
            agent.reset()

    async def run_in_executor(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call blocking `fn` in a thread, with the context variables of this run."""
        context = contextvars.copy_context()

        def call() -> T:
            try:
                return context.run(fn, *args, **kwargs)
            except StopIteration as error:  # a future cannot carry it: the run would wait for ever
                raise RuntimeError(f"{getattr(fn, '__name__', fn)} raised StopIteration") from error

        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    def is_multithread_safe(self) -> bool:
        """Whether all environments of this workflow may run beside those of others."""
        return all(environment.is_multithread_safe() for environment in self._attributes(Environment))

    def _attributes(self, kind: type[Any]) -> list[Any]:
        return [value for name, value in vars(self).items() if not name.startswith("_") and isinstance(value, kind)]

    # ------------------------------------------------------------------------------------- from trajectories to an episode

    def collect_trajectories(self) -> Episode:
        """An episode of the committed trajectories, then those of agents that hold steps and were not committed."""
        episode = Episode(trajectories=list(self._committed))
        known = {trajectory.uid for trajectory in self._committed}
        for agent in self._attributes(Agent):
            if agent.trajectory.steps and agent.trajectory.uid not in known:
                episode.trajectories.append(deepcopy(agent.trajectory))
        return episode

    def postprocess_episode(
        self, episode: Episode, termination_reason: TerminationReason | None = None, error: dict[str, str] | None = None
    ) -> Episode:
        """Turn collected trajectories into a finished episode, in place: identity, rewards, correctness, metrics, reason.

        Deliberate differences from rLLM: a trajectory reward that is set already stays (rLLM overwrites it by the sum of step
        rewards); a last step is dropped only where it holds nothing at all (rLLM drops it for having no chat).
        """
        episode.id, episode.task = self.uid or "", self.task
        for trajectory in episode.trajectories:
            if trajectory.steps and _is_blank(trajectory.steps[-1]):
                trajectory.steps.pop()
            if trajectory.reward is None:
                self.compute_trajectory_reward(trajectory)
            self.adjust_step_rewards(trajectory)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        if error is not None:
            episode.info["error"] = error
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN
        return episode

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        """The trajectory's reward: the sum of its steps' rewards as they were given (0.0 without steps)."""
        trajectory.reward = float(sum(step.reward for step in trajectory.steps))

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        """Shape and discount step rewards in place; the trajectory's reward stays what it is.

        With c = `reward_bonus_coeff`, g = `gamma` and raw rewards r: first s_i = r_i + c·(r_i - r_{i-1}), s_0 = r_0; then, for
        g > 0, each becomes the return G_i = s_i + g·G_{i+1}, also kept as `mc_return`.
        """
        rewards = [step.reward for step in trajectory.steps]
        for i in range(1, len(rewards)):
            trajectory.steps[i].reward += self.reward_bonus_coeff * (rewards[i] - rewards[i - 1])
        if self.gamma > 0:
            total = 0.0
            for step in reversed(trajectory.steps):
                total = step.reward + self.gamma * total
                step.reward = step.mc_return = total

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Correct where the trajectory rewards sum to more than 0 (no trajectories: not correct)."""
        episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def collect_metrics(self, episode: Episode) -> None:
        """Adds `{name}_acc`, the mean reward of the trajectories called `name`."""
        rewards = defaultdict(list)
        for trajectory in episode.trajectories:
            rewards[trajectory.name].append(trajectory.reward or 0.0)
        episode.metrics |= {f"{name}_acc": float(sum(values) / len(values)) for name, values in rewards.items()}


def _is_blank(step: Step) -> bool:
    """Whether the step was begun (an observation arrived) but the model never answered."""
    return not (step.chat_completions or step.response_ids or step.model_response or step.model_output)


def _being_cancelled() -> bool:
    """Whether somebody cancelled the current task. Awaiting a task that was cancelled raises the same error without that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _single(error: BaseException) -> BaseException:
    """The error inside of an `ExceptionGroup`, such as `asyncio.TaskGroup` raises: the first that is no `TerminationEvent`."""
    while isinstance(error, BaseExceptionGroup):
        errors = [e for e in error.exceptions if not isinstance(e, TerminationEvent)]
        error = (errors or error.exceptions)[0]
    return error
