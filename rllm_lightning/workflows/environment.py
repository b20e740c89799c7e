"""What a multi-turn agent acts on: `reset(task) -> observation`, then `step(action) -> (observation, reward, done, info)`.

    task --reset--> observation --the model's reply--> step --> observation, reward --> ... --> done

Both may be `async`; what blocks for long should be, since plain methods run on the event loop. An observation is text (the user's
next message), one chat message (a dict) or several (a list of dicts). None from `reset` stands for the task's own opening; None
with `done` says that nothing follows. Of `info` the workflow knows

    is_correct    whether the task counts as solved, as of this step (where none says so: a trajectory reward above 0)
    metrics       name -> number, for the episode's metrics; a later step's number replaces an earlier one

and keeps the rest in `step.info`. An environment with a method `state_key()` says what state it is in, as text that is equal for
equal states; estimators such as `gigpo` compare the steps that were taken in the same state. Without the method a state is the
whole conversation so far.

To add one, register a class (or a function that makes one) in a module of your own:

    @register_environment("x")
    class MyEnvironment: ...

and choose it with `rllm.workflow.workflow_args.environment=x`. The keyword-only parameters of its constructor are the keys of
`rllm.workflow.workflow_args.environment_args`, except `reward_function`, which is the task's own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rllm_lightning.registry import ENVIRONMENTS
from rllm_lightning.schema import hints_of, no_such_argument
from rllm_lightning.values import Mismatch, coerce
from rllm_lightning.workflows.reward import RewardFunction

AT = "rllm.workflow.workflow_args"
PLAIN = (str, int, float, list, tuple, dict)  # what comes from a config, whose types are guessed; other objects come from Python


@runtime_checkable
class Environment(Protocol):
    """Anything that an agent acts on; subclassing this is not needed. One object works on one task at a time."""

    def reset(self, task: dict[str, Any]) -> Any:
        """Begin `task`; the first observation."""

    def step(self, action: Any) -> Any:
        """Act; `(observation, reward, done, info)`."""

    def is_multithread_safe(self) -> bool:
        """Whether several objects of this class may be at work at the same time."""
        return True


MakeEnvironment = Callable[..., Any]


@dataclass
class Outcome:
    """What came of one action."""

    observation: Any
    reward: float
    done: bool
    info: dict[str, Any] = dataclass_field(default_factory=dict)


async def act(environment: Any, action: Any) -> Outcome:
    """Let `environment` answer to an action.

    Raises:
        ValueError: it returned no `(observation, reward, done, info)`, or a reward that is not a finite number (B05).
    """
    result = environment.step(action)
    if inspect.isawaitable(result):
        result = await result
    name = type(environment).__name__
    if not isinstance(result, tuple) or len(result) != 4:
        raise ValueError(f"{name}.step returned {result!r:.200}; expected (observation, reward, done, info)")
    observation, reward, done, info = result
    if not isinstance(reward, Real | np.bool_) or not math.isfinite(reward):
        raise ValueError(f"{name}.step gave the reward {reward!r}; expected a finite number")
    if observation is None and not done:
        raise ValueError(f"{name}.step gave no observation, and it is not done")
    return Outcome(observation, float(reward), bool(done), dict(info or {}))


def messages_of(observation: Any) -> list[dict[str, Any]]:
    """An observation as chat messages; none for None.

    Raises:
        ValueError: it is neither text nor chat messages.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(f"an observation must be text, a chat message or a list of them, got {observation!r:.200}")
    return messages


# --------------------------------------------------------------------------------------------------------- chosen by name


def environment_maker(
    environment: str | MakeEnvironment, environment_args: Mapping[str, Any] | None, reward_function: RewardFunction | None
) -> Callable[[], Any]:
    """A function that makes environments, all its arguments checked and typed.

    Args:
        environment: a registered name, or from Python a class or function.
        environment_args: keywords for it.
        reward_function: handed on where it takes one.

    Raises:
        ValueError: an unknown name, a keyword that it does not have or that has another type, or one that it needs and was not given.
    """
    maker = ENVIRONMENTS.get(environment) if isinstance(environment, str) else environment
    if not callable(maker):
        raise ValueError(f"{AT}.environment: expected a registered name, a class or a function, got {maker!r}")
    name = environment if isinstance(environment, str) else getattr(maker, "__name__", repr(maker))
    takes = _keywords(maker)
    given = dict(environment_args or {})
    known = sorted(set(takes) - {"reward_function"})
    problems = [no_such_argument(f"{AT}.environment_args.{key}", f"environment {name!r}", known) for key in given if key not in takes]
    for key in [key for key in given if takes.get(key, Any) is not Any and isinstance(given[key], PLAIN)]:
        try:
            given[key] = coerce(given[key], takes[key])
        except Mismatch as mismatch:
            problems.append(f"{AT}.environment_args.{key}: expected {mismatch}, got {given[key]!r}")
    if problems:
        raise ValueError("\n".join(sorted(problems)))
    if "reward_function" in takes:
        given.setdefault("reward_function", reward_function)
    try:
        inspect.signature(maker).bind(**given)
    except TypeError as error:
        raise ValueError(f"{AT}.environment_args: cannot make {name!r}: {error}") from error
    return lambda: maker(**given)


def _keywords(maker: MakeEnvironment) -> dict[str, Any]:
    """The keywords that an environment is made with, and their types."""
    target: Any = maker.__init__ if isinstance(maker, type) else maker  # type: ignore[misc]
    parameters = inspect.signature(maker).parameters.values()
    return {p.name: hints_of(target).get(p.name, Any) for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
