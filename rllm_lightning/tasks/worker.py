"""Functions of a module, called in a process of their own.

    worker.call("score", *args)   parent --request--> child: module.score(*args) --reply--> parent

For code that may never come back, ends its process, prints, or needs a fixed hash seed. The child ignores Ctrl-C (whether to stop
is the parent's to decide), ends with its parent, and is started again by the next call when it has died. A call may have a time limit:

    CPU time     a timer of the operating system ends the child, whatever it computes, also inside C code
    a clock      `WALL_LIMIT_S` later the parent kills it, in case it waits for something instead of computing
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

WALL_LIMIT_S = 60.0  # seconds of a clock on top of a limit of CPU time; long, since a busy machine gives the child little of it


class WorkerError(RuntimeError):
    """The child died, or something unexpected was raised there. The next call works again."""


# -------------------------------------------------------------------------------------------------------- the parent's side


class Worker:
    """The functions of `module`. One call at a time; a forked process gets a child of its own."""

    def __init__(self, module: str):
        self.module = module
        self._lock = threading.Lock()
        self._child: _Child | None = None
        atexit.register(self._end)

    def call(self, function: str, *args: Any, limit_s: float | None = None) -> Any:
        """What `module.function(*args)` returns; arguments and result are pickled.

        Args:
            limit_s: seconds of CPU time that the call may take (None: any).

        Raises:
            ValueError: the function raised it: the user's mistake.
            WorkerError: anything else that went wrong there, the time limit included.
        """
        with self._lock:
            if self._child is None or self._child.owner != os.getpid():
                self._child = _Child(self.module)
            child = self._child
            try:
                child.pipe.send((function, args, limit_s))
                if limit_s is not None and not child.pipe.poll(limit_s + WALL_LIMIT_S):
                    raise TimeoutError
                kind, value = child.pipe.recv()
            except BaseException as error:  # also an interrupt: the reply under way would be taken for that of the next call
                self._child, code = None, child.end()
                if not isinstance(error, EOFError | OSError):
                    raise
                raise WorkerError(f"{function} {_what_happened(error, code, limit_s)}") from error
        if kind == "invalid":
            raise ValueError(value)
        if kind == "failed":
            raise WorkerError(value)
        return value

    def _end(self) -> None:
        if self._child is not None and self._child.owner == os.getpid():  # a forked process must not end its parent's child
            self._child.end()


class _Child:
    """A running child and the pipe to it."""

    def __init__(self, module: str):
        self.owner = os.getpid()
        self.pipe, theirs = Pipe()
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {module!r})"
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], env=environment, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def end(self) -> int:
        """Stop the child, where it has not ended by itself, and return its exit code."""
        self.pipe.close()
        self.process.kill()
        return self.process.wait()


def _what_happened(error: BaseException, code: int, limit_s: float | None) -> str:
    if isinstance(error, TimeoutError):
        return f"gave no answer within {(limit_s or 0) + WALL_LIMIT_S:g} s"
    if code == -signal.SIGPROF:
        return f"took more than {limit_s:g} s of CPU time"
    return f"ended its process (exit code {code})"


# --------------------------------------------------------------------------------------------------------- the child's side


def serve(descriptor: int, module: str) -> None:
    """Answer requests until the parent is gone."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # a whole process group may get them
        signal.signal(stop, signal.SIG_IGN)
    pipe = Connection(descriptor)
    functions = importlib.import_module(module)
    while True:
        try:
            name, args, limit_s = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(getattr(functions, name), args, limit_s))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], limit_s: float | None) -> tuple[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, limit_s or 0)  # SIGPROF, which nobody handles, ends the process
    try:
        return "done", function(*args)
    except ValueError as error:
        return "invalid", str(error)
    except WorkerError as error:
        return "failed", str(error)
    except Exception:
        return "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
