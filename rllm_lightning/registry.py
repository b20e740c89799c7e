"""Registries: how a name in a config becomes code.

A `Registry` maps names to entries of one kind (estimators, losses, tasks, scorers, workflows, environments, rollout engines, trackers).
The library's own entries live in the registry's `home` modules, which are imported on the first look-up, so that
importing the library costs nothing for what is not used. A user's entries live in modules of their own, named in the
config key `plugins` and imported by `load_plugins`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Named entries of one kind.

    Args:
        kind: what an entry is, in words for error messages ("advantage estimator").
        key: the config key under which a name of this kind is chosen.
        home: modules of this library that register its own entries; imported on the first look-up.
    """

    def __init__(self, kind: str, key: str, home: Iterable[str] = ()):
        self.kind = kind
        self.key = key
        self._home = list(home)
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register `entry` under `name`.

        Registering the same definition again (a module imported twice) replaces it.

        Raises:
            ValueError: the name is not a non-empty string, or another definition has it already.
        """
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"the name of a {self.kind} must be a non-empty string, got {name!r}")
        known = self._entries.get(name)
        if known is not None and known is not entry and _origin(known) != _origin(entry):
            raise ValueError(f"{self.kind} {name!r} is registered twice, by {_origin(known)} and by {_origin(entry)}; rename one")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator form of `add`."""

        def decorate(entry: F) -> F:
            self.add(name, entry)  # type: ignore[arg-type]
            return entry

        return decorate

    def get(self, name: str) -> T:
        """The entry called `name`.

        Raises:
            ValueError: no such entry; the message lists the registered names and the closest match.
        """
        self.load_home()
        if name not in self._entries:
            raise ValueError(self.unknown(name))
        return self._entries[name]

    def unknown(self, name: object, key: str | None = None) -> str:
        """The message for a name that is not registered, chosen under `key` (default: the registry's own)."""
        names = self.names()
        close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        return (
            f"{key or self.key}: unknown {self.kind} {name!r}{hint} Registered: {', '.join(names) or 'none'} "
            f"(your own: name its module in `plugins`)"
        )

    def load_home(self) -> None:
        for module in self._home:
            importlib.import_module(module)
        self._home = []

    def names(self) -> list[str]:
        self.load_home()
        return sorted(self._entries)

    def items(self) -> list[tuple[str, T]]:
        return [(name, self._entries[name]) for name in self.names()]

    def __contains__(self, name: object) -> bool:
        self.load_home()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())


def _origin(entry: object) -> str:
    target = inspect.unwrap(entry) if callable(entry) else entry
    target = getattr(target, "function", target)
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def load_plugins(modules: Iterable[str]) -> None:
    """Import the user's own modules, so that what they register is found.

    The working directory is importable, as it is for `python -m`.

    Raises:
        ValueError: a module is missing or fails to import; the message names it and the key `plugins`.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):  # itself, or a package that it would lie in
                raise ValueError(f"plugins: no module {name!r} on the Python path; it is searched from {here}") from error
            reason = f"needs the module {error.name!r}, which is not installed" if error.name else f"cannot be imported: {error}"
            raise ValueError(f"plugins: {name!r} {reason}") from error
        except (Exception, SystemExit) as error:
            raise ValueError(f"plugins: importing {name!r} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class PolicyLoss:
    """An entry of `LOSSES`: a per-token policy loss, and what `--help`, the config check and the trainer need to know of it.

    `function` is called by `algorithms.losses.compute_policy_loss`, whose module says what it takes and returns.
    """

    function: Callable[..., Any]
    formula: str  # one line
    source: str  # paper or library
    needs_old_logprobs: bool  # false: nobody has to compute them
    scope: Literal["token", "row", "call"]  # what else in a call the loss of one token depends on: nothing, its row, all of it

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keywords that `loss_kwargs` may hold, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def register_policy_loss(
    name: str,
    *,
    formula: str = "",
    source: str = "",
    needs_old_logprobs: bool = True,
    scope: Literal["token", "row", "call"] = "token",
) -> Callable[[F], F]:
    """Decorator that registers a policy loss and returns the function itself. Without `formula` the docstring's first line is shown."""

    def decorate(function: F) -> F:
        summary = formula or (inspect.getdoc(function) or "").partition("\n")[0]
        LOSSES.add(name, PolicyLoss(function, summary, source, needs_old_logprobs, scope))
        return function

    return decorate


# One registry a kind. They stand here, and not beside their entries, so that a config can be checked without importing torch.
ESTIMATORS: Registry[Any] = Registry("advantage estimator", "rllm.algorithm.adv_estimator", ["rllm_lightning.algorithms.advantage"])
LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", "rllm.algorithm.loss_fn", ["rllm_lightning.algorithms.losses", "rllm_lightning.algorithms.joint_losses"]
)
TASKS: Registry[Any] = Registry(
    "task",
    "task.name",
    [
        f"rllm_lightning.tasks.{name}"
        for name in ("reasoning_gym", "mixture", "jsonl", "parquet", "huggingface", "gridworld", "verifiers_environment")
    ],
)
SCORERS: Registry[Any] = Registry(
    "scorer", "task.scorer", [f"rllm_lightning.tasks.{name}" for name in ("scorers", "math_scorer", "python_scorer", "composite_scorer")]
)
WORKFLOWS: Registry[Any] = Registry(
    "workflow",
    "rllm.workflow.name",
    [f"rllm_lightning.workflows.{name}" for name in ("single_turn", "multi_turn", "solver_judge", "distill", "verifiers_environment")],
)
ENVIRONMENTS: Registry[Any] = Registry(
    "environment", "rllm.workflow.workflow_args.environment", ["rllm_lightning.workflows.retry", "rllm_lightning.workflows.gridworld"]
)
ENGINES: Registry[Any] = Registry(
    "rollout engine", "rollout_engine.name", [f"rllm_lightning.rollout.{name}" for name in ("scripted", "hf", "openai", "vllm")]
)
TRACKERS: Registry[Any] = Registry("tracker", "rllm.trainer.logger", ["rllm_lightning.tracking.trackers"])

register_task = TASKS.register
register_scorer = SCORERS.register
register_workflow = WORKFLOWS.register
register_environment = ENVIRONMENTS.register
register_rollout_engine = ENGINES.register
register_tracker = TRACKERS.register
