"""Scorer `python`: a function of your own, `(task, answer) -> float | RewardOutput`, or an `async` one.

task.scorer=python task.scorer_args.function=my_module:my_function           a module, also in the working directory
task.scorer=python task.scorer_args.function=path/to/my_file.py:my_function  a file
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rllm_lightning.registry import register_scorer
from rllm_lightning.tasks.scoring import Extract, extract_answer
from rllm_lightning.types import RewardOutput
from rllm_lightning.workflows.reward import RewardFunction, checked, raised


@dataclass(frozen=True)
class PythonReward:
    """What the function called `path` says of the answer in a response; 0 where there is none.

    It holds the function's path and not the function, so that it can be sent to another process.

    Raises:
        ValueError: the function raised something, or returned neither a finite number nor a `RewardOutput`; it is named.
    """

    checks_every_task: ClassVar[bool] = False
    path: str
    extract: Extract

    def __call__(self, task: dict[str, Any], response: str) -> RewardOutput | Awaitable[RewardOutput]:
        answer = extract_answer(response, self.extract)
        if answer is None:
            return RewardOutput(0.0, is_correct=False)
        function = load_function(self.path)
        try:
            result = function(task, answer)
        except Exception as error:
            raise self._failure(task, error) from error
        return self._awaited(task, result) if inspect.isawaitable(result) else checked(result, self._name(task))

    async def _awaited(self, task: dict[str, Any], result: Awaitable[Any]) -> RewardOutput:
        try:
            value = await result
        except Exception as error:
            raise self._failure(task, error) from error
        return checked(value, self._name(task))

    def _failure(self, task: dict[str, Any], error: Exception) -> ValueError:
        return ValueError(f"{self._name(task)} {raised(error)}")

    def _name(self, task: dict[str, Any]) -> str:
        return f"task {task.get('id')!r}: the scorer {self.path}"

    def check(self, task: dict[str, Any], solution: str) -> None:
        """Call the function once, unless it is async: what it holds on to may belong to the event loop of the training."""
        if not inspect.iscoroutinefunction(load_function(self.path)):
            self(task, solution)


@register_scorer("python")
def python(extract: Extract, *, function: str) -> RewardFunction:
    """A function of your own, `module:function` or `file.py:function`, called with the task and the answer; maybe async."""
    found = load_function(function)
    try:
        inspect.signature(found).bind({}, "")
    except TypeError as error:
        raise ValueError(f"function: {function} must take (task, answer): {error}") from error
    return PythonReward(function, extract)


def load_function(path: str) -> Callable[..., Any]:
    """The function at an import path or in a file.

    Raises:
        ValueError: there is none, or its module fails to import.
    """
    module, colon, name = path.rpartition(":")
    if not (colon and module and name):
        raise ValueError(f"function: {path!r} is no path of a function; write my_module:my_function or my_file.py:my_function")
    try:
        found = getattr(_from_file(module) if module.endswith(".py") else _from_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"function: importing {module!r} failed: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"function: there is no function {name!r} in {module}")
    return found


def _from_module(name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _from_file(path: str) -> Any:
    """The module of a file, loaded once."""
    file = Path(path).expanduser().resolve()
    name = f"_scorer_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None, "it ends in .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
