"""`verifiers`: an environment of the package verifiers, with its own rules, state and rubric.

    setup_state -> get_prompt_messages -> the engine -> add_model_response --not completed--> get_prompt_messages (env_response) ...
                                                                   └------completed-----> rubric.score_rollout

The package's own rollout asks a model over HTTP and knows text. Here its steps are taken one by one with this library's engine, so
that every turn has the tokens that were sampled, and a later prompt goes on from them (`rollout/conversations.py`).
"""

from __future__ import annotations

import functools
import inspect
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rllm_lightning.registry import register_workflow
from rllm_lightning.rollout.engine import RolloutEngine
from rllm_lightning.types import Episode, ModelOutput, Step, TerminationEvent, TerminationReason, Trajectory
from rllm_lightning.workflows.reward import checked
from rllm_lightning.workflows.workflow import Workflow

INPUT_KEYS = ("prompt", "answer", "info", "task", "example_id")  # of a task: what the package calls a rollout's input

NO_TOOLS = "it offers tools, which the workflow verifiers does not; see multi_turn"

_ENVIRONMENTS: dict[str, Any] = {}  # by name and arguments: a run's workflows and tasks share one, with its data sets
_FAILURES: ContextVar[list[tuple[str, Exception]]] = ContextVar("rllm_lightning_reward_failures")


class EnvironmentFailed(RuntimeError):
    """Code of an environment raised; the message says which part, the cause is what it raised."""


@register_workflow("verifiers")
class VerifiersWorkflow(Workflow):
    """An environment of the package verifiers, of one turn or several; the episode holds one trajectory, `agent`, one step a turn.

    Args:
        env_id: name of an installed environment, for `verifiers.load_environment`.
        env_args: keywords for it.
        environment: from Python, a `verifiers.Environment` instead of `env_id`.

    Its tasks come from the same environment: `task.name=verifiers`. The trajectory's reward is the rubric's and stands on the last
    step; the unweighted value of each reward function is in `info["rewards"]`. All that the rubric measures (functions of
    weight 0, too) is among the episode's metrics. Keywords of `run` are sampling overrides; the environment's own sampling
    arguments are not used.

    | the episode ends                                                                  | as                               |
    |-----------------------------------------------------------------------------------|----------------------------------|
    | before a turn whose prompt is longer than `data.max_prompt_length`                | `MAX_PROMPT_LENGTH_EXCEEDED`     |
    | as the environment says, where a reply was cut                                    | `MAX_RESPONSE_LENGTH_EXCEEDED`   |
    | after the environment's `max_turns` (not the one turn of a `SingleTurnEnv`)       | `MAX_TURNS_EXCEEDED`             |
    | otherwise as the environment says                                                 | `ENV_DONE`                       |
    | after `timeout` seconds                                                           | `TIMEOUT`, without trajectories  |
    | where the environment or a reward function raises                                 | `ERROR`, without trajectories    |

    The package scores a reward function that raises as 0; here that is an error.

    Raises:
        ValueError: no such environment, or one that cannot be run turn by turn: of text completions, with tools, with rewards that
            compare rollouts, without rewards, or with a way of its own to ask the model.
    """

    provides = frozenset({"reward_components"})

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        env_id: str | None = None,
        env_args: Mapping[str, Any] | None = None,
        environment: Any = None,
        **kwargs: Any,
    ):
        super().__init__(rollout_engine, executor, **kwargs)
        self.environment = _chosen(env_id, env_args, environment)

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        _chosen(arguments.get("env_id"), arguments.get("env_args"), arguments.get("environment"))

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        environment = _of_task(self.environment, task)
        with _named("init_state"):
            state = await environment.init_state({key: task[key] for key in INPUT_KEYS if key in task}, None, "policy")
        trajectory = Trajectory(name="agent", task=task)
        try:
            await self._converse(environment, state, trajectory.steps, kwargs)
        except BaseException:
            await environment._cleanup(state)  # as the package does; an environment that completes has done so
            raise
        if not trajectory.steps:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        await _score(environment, state, trajectory)
        return self.postprocess_episode(Episode(trajectories=[trajectory], metrics=dict(state["metrics"])), _reason(environment, state))

    async def _converse(self, environment: Any, state: Any, steps: list[Step], sampling: dict[str, Any]) -> None:
        """Turn after turn, until the environment says that it is completed."""
        with _named("setup_state"):
            state = await environment.setup_state(state)
        if state["oai_tools"]:
            raise ValueError(f"rllm.workflow.workflow_args: the environment: {NO_TOOLS}")
        while True:
            with _named("a stop condition"):
                if await environment.is_completed(state):
                    break
            with _named("env_response"):
                messages = await environment.get_prompt_messages(state)
            if state["final_env_response"] is not None:
                continue
            try:
                output = await self.rollout_engine.get_model_response(messages, **sampling)
            except TerminationEvent as event:
                if event.reason is not TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED:
                    raise
                state["prompt_too_long"] = state["is_truncated"] = True
                continue
            step = Step.from_model_output(output, messages)
            step.action, step.observation = step.model_response, messages[-1]["content"]
            steps.append(step)
            with _named("add_model_response"):
                await environment.add_model_response(state, messages, _completion(output, step.model_response))
        with _named("render_completion"):
            await environment.render_completion(state)


# ------------------------------------------------------------------------------------------------------------ environments


def load_environment(env_id: str, env_args: Mapping[str, Any] | None, at: str) -> Any:
    """The environment of this name and these arguments; a second call gives the same object.

    Raises:
        ValueError: the package, the environment or one of its arguments is not there; the message begins with a key below `at`.
    """
    try:
        import verifiers
    except ImportError as error:
        raise ValueError(f"{at}.env_id: needs the package verifiers: pip install 'rllm-lightning[verifiers]'") from error
    key = json.dumps([env_id, dict(env_args or {})], sort_keys=True, default=repr)
    if key not in _ENVIRONMENTS:
        with _signals_kept():
            try:
                _ENVIRONMENTS[key] = verifiers.load_environment(env_id, **(env_args or {}))
            except (ValueError, RuntimeError) as error:  # what the package makes of anything that goes wrong
                raise ValueError(f"{at}.env_id: cannot load {env_id!r}: {error}") from error
    return _ENVIRONMENTS[key]


def _chosen(env_id: str | None, env_args: Mapping[str, Any] | None, environment: Any) -> Any:
    at = "rllm.workflow.workflow_args"
    if (env_id is None) == (environment is None):
        raise ValueError(f"{at}.env_id: the workflow verifiers needs the name of an environment (from Python: that, or `environment`)")
    if environment is None:
        environment = load_environment(str(env_id), env_args, at)
    elif env_args:
        raise ValueError(f"{at}.env_args: they go with env_id; the `environment` that was given is made already")
    for member in getattr(environment, "envs", [environment]):
        if problem := _problem(member):
            raise ValueError(f"{at}: environment {env_id or type(member).__name__!r}: {problem}")
        _watch(member.rubric)
    return environment


def _problem(environment: Any) -> str | None:
    """Why an environment cannot be run turn by turn."""
    import verifiers

    if not isinstance(environment, verifiers.MultiTurnEnv):
        return f"expected a verifiers.MultiTurnEnv or SingleTurnEnv, got {type(environment).__name__}"
    if environment.message_type != "chat":
        return f"message_type must be 'chat', got {environment.message_type!r}"
    if environment.oai_tools:
        return NO_TOOLS
    if type(environment).get_model_response is not verifiers.Environment.get_model_response:
        return "it asks the model in a way of its own (get_model_response), which would bypass the rollout engine"
    functions = [(rubric, function) for rubric in _rubrics(environment.rubric) for function in rubric.funcs]
    if comparing := [getattr(function, "__name__", function) for rubric, function in functions if rubric._is_group_func(function)]:
        return f"its reward function {comparing[0]} compares rollouts with each other; only functions of one rollout can be used"
    if not any(weight for rubric in _rubrics(environment.rubric) for weight in rubric.weights):
        return "its rubric has no reward function of a weight other than 0"
    return None


def _of_task(environment: Any, task: Mapping[str, Any]) -> Any:
    """The environment itself, or the one of a group that a task is of."""
    if missing := [key for key in ("prompt", "example_id", "task") if key not in task]:
        raise ValueError(f"task {task.get('id')!r} has no {missing[0]!r}; the workflow verifiers takes the tasks of task.name=verifiers")
    return environment.get_env_for_task(task["task"]) if hasattr(environment, "envs") else environment


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Making an environment takes over Ctrl-C and SIGTERM, with which a run ends in order: give them back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Say which part of the environment an exception comes from."""
    try:
        yield
    except Exception as error:
        raise EnvironmentFailed(f"{part} of the verifiers environment raised {type(error).__name__}: {error}") from error


# ----------------------------------------------------------------------------------------------------------------- replies


def _completion(output: ModelOutput, text: str) -> Any:
    """A reply as the package knows it."""
    from verifiers.types import ChatCompletion

    reason = "length" if output.finish_reason == "length" else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    return ChatCompletion.model_validate(
        {"id": "reply", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice | {"logprobs": None}]}
    )


def _reason(environment: Any, state: Any) -> TerminationReason:
    import verifiers

    if state.get("prompt_too_long"):
        return TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    if any(turn["is_truncated"] for turn in state["trajectory"]):
        return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    if state["stop_condition"] == "max_turns_reached" and not isinstance(environment, verifiers.SingleTurnEnv):
        return TerminationReason.MAX_TURNS_EXCEEDED
    return TerminationReason.ENV_DONE


# ----------------------------------------------------------------------------------------------------------------- rewards


async def _score(environment: Any, state: Any, trajectory: Trajectory) -> None:
    """Let the rubric score a completed rollout.

    Raises:
        EnvironmentFailed: a reward function raised, or returned no number.
        ValueError: the reward is not finite.
    """
    failures: list[tuple[str, Exception]] = []
    _FAILURES.set(failures)
    with _named("the rubric"):
        await environment.rubric.score_rollout(state)
    for name, error in failures:
        raise EnvironmentFailed(f"reward function {name} of the verifiers environment raised {type(error).__name__}: {error}") from error
    trajectory.reward = checked(state["reward"], f"task {state['task']!r}: the rubric").reward
    last = trajectory.steps[-1]
    last.reward, last.done = trajectory.reward, True
    trajectory.info["rewards"] = {
        function.__name__: state["metrics"][function.__name__]
        for rubric in _rubrics(environment.rubric)
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
        if weight
    }


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric, or those that a group of rubrics is made of."""
    return [part for member in rubric.rubrics for part in _rubrics(member)] if hasattr(rubric, "rubrics") else [rubric]


def _watch(rubric: Any) -> None:
    """Let the reward functions note what they raise, which the rubric would score as 0."""
    for part in _rubrics(rubric):
        part.funcs = [function if hasattr(function, "notes_failures") else _watched(function) for function in part.funcs]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # its signature says what the rubric hands it
    async def watched(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            if (failures := _FAILURES.get(None)) is not None:
                failures.append((watched.__name__, error))
            raise

    watched.notes_failures = True  # type: ignore[attr-defined]
    return watched
