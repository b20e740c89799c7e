"""Tools: plain Python functions that a model may call.

    "my_pkg.my_mod:add" or the function  --load_tool-->  Tool  --schema-->  the prompt
                                                          |
    a call, read from the model's reply (`tool_format.py`) --> Tool.call --> text for the model

A tool is a function, maybe `async`, with type hints and a docstring that says what it does and, under `Args:`, what each argument is:

    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: the first.
            b: the second.
        \"\"\"
        return a + b

What goes wrong in a call, also in the function itself, is told to the model as text that begins with `Error:`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rllm_lightning.schema import hints_of
from rllm_lightning.types import to_plain
from rllm_lightning.values import Mismatch, coerce

AT = "rllm.workflow.workflow_args.tools"
ERROR = "Error: "


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, and its JSON schema as chat templates take it."""

    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    async def call(self, arguments: Mapping[str, Any], timeout: float) -> str:
        """The function's result as text: text as it is, anything else as JSON.

        Arguments are converted to the types of the function's hints where that is safe (`"5"` to 5). A function that is not
        `async` runs in a thread of its own. Python cannot stop a thread: one that runs into the time limit goes on in the
        background, so a tool that may never end should start a process, and end it.

        Args:
            timeout: seconds. The result of a call that takes longer is an error.
        """
        try:
            given = self._typed(arguments)
            async with asyncio.timeout(timeout) as limit:
                result = await (self.function(**given) if inspect.iscoroutinefunction(self.function) else _in_thread(self.function, given))
            return result if isinstance(result, str) else json.dumps(to_plain(result))
        except TimeoutError as error:
            return f"{ERROR}{self.name} took longer than {timeout:g} s" if limit.expired() else f"{ERROR}{_describe(error)}"
        except Exception as error:  # the model's to learn of, whatever it is
            return f"{ERROR}{_describe(error)}"

    def _typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(self.function).bind(**arguments).arguments
        hints = hints_of(self.function)
        return {key: _as_hinted(key, value, hints.get(key, Any)) for key, value in bound.items()}


class ToolBox:
    """The tools of a workflow.

    Args:
        tools: functions, or their import paths (`"my_pkg.my_mod:my_function"`).
        timeout: seconds that one call may take.

    Raises:
        ValueError: a path leads to no function, a function lacks type hints or descriptions, two have one name, or the time limit
            is not above 0.
    """

    def __init__(self, tools: Sequence[str | Callable[..., Any]], timeout: float):
        if timeout <= 0:
            raise ValueError(f"rllm.workflow.workflow_args.tool_timeout: must be above 0 seconds, got {timeout}")
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise ValueError(f"{AT}: expected a list of functions or import paths, got {tools!r}")
        loaded = [load_tool(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in loaded}
        self.timeout = timeout
        if len(self.tools) < len(loaded):
            raise ValueError(f"{AT}: two tools have the same name; there are {', '.join(tool.name for tool in loaded)}")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What to tell the model of its call."""
        if name not in self.tools:
            return f"{ERROR}there is no tool {name!r}; there are: {', '.join(self.tools)}"
        return await self.tools[name].call(arguments, self.timeout)


def load_tool(tool: str | Callable[..., Any]) -> Tool:
    """A function, or the import path of one, as a tool.

    Raises:
        ValueError: it is not to be found or not callable, or has arguments without type hints or descriptions.
    """
    function = _import(tool) if isinstance(tool, str) else tool
    if not callable(function):
        raise ValueError(f"{AT}: {tool!r} is no function")
    return Tool(function, _schema_of(function))


def _import(path: str) -> Any:
    module, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and colon and name):
        raise ValueError(f"{AT}: {path!r} is no import path; write my_module:my_function")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{AT}: cannot import {path!r}: {error}") from error


@cache
def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"{AT}: {name}: {' '.join(str(error).split())} (each argument needs a type hint and a line under Args:)"
        ) from error


def _as_hinted(key: str, value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    try:
        return coerce(value, hint)
    except Mismatch as mismatch:
        raise ValueError(f"{key}: expected {mismatch}, got {value!r}") from None


async def _in_thread(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call in a thread that does not keep the process alive, with the context of the caller."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # given up meanwhile
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(RuntimeError(_describe(error)) if isinstance(error, StopIteration | SystemExit) else error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, **given)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
    return await done


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
