"""The package `reasoning_gym` in a process of its own.

    call("draw", ...)    parent --request--> child: make a data set, draw entries     --reply--> entries
    call("score", ...)   parent --request--> child: the data set's scorer, one answer --reply--> score

Three reasons for the process. Some data sets draw from sets of text, whose order differs between processes unless the hash
seed is fixed, as it is in the child: all ranks and all reruns see the same tasks. Some scorers evaluate the answer as
arithmetic, and `9**9**9**9` would never return: the child ends itself after `SCORE_LIMIT_S`, and the next call starts another.
And some generators print, or reseed the process's random states.
"""

from __future__ import annotations

import atexit
import datetime
import difflib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from rllm_lightning.values import Mismatch, coerce

SCORE_LIMIT_S = 5.0  # seconds of CPU time that one answer may take to score; not of a clock, which a busy machine would outrun
ISO_PARSERS: dict[Any, Callable[[str], Any]] = {datetime.date: datetime.date.fromisoformat, datetime.time: datetime.time.fromisoformat}


class WorkerError(RuntimeError):
    """The child died, or something unexpected was raised there. The next call works again."""


# -------------------------------------------------------------------------------------------------------- the parent's side


class _Worker:
    """A running child and the pipe to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(theirs.fileno())]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def end(self) -> int:
        """Stop the child, where it has not ended by itself, and return its exit code."""
        self.pipe.close()
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
_worker: _Worker | None = None


@atexit.register
def _end_worker() -> None:
    if _worker is not None and _worker.owner == os.getpid():  # a forked process must not end its parent's child
        _worker.end()


def call(function: str, *args: Any) -> Any:
    """Call `draw` or `score` in the child; one is started where none is alive.

    Raises:
        ValueError: the user's mistake, as `draw` found it.
        WorkerError: anything else that went wrong there.
    """
    global _worker
    with _lock:
        if _worker is None or _worker.owner != os.getpid():
            _worker = _Worker()
        worker = _worker
        try:
            worker.pipe.send((function, args))
            kind, value = worker.pipe.recv()
        except BaseException as error:  # also an interrupt: the reply under way would be taken for that of the next call
            _worker, code = None, worker.end()
            if not isinstance(error, EOFError | OSError):
                raise
            reason = (
                f"took more than {SCORE_LIMIT_S:g} s of CPU time" if code == -signal.SIGPROF else f"ended its process (exit code {code})"
            )
            raise WorkerError(f"{function} {reason}") from error
    if kind == "invalid":
        raise ValueError(value)
    if kind == "failed":
        raise WorkerError(value)
    return value


# --------------------------------------------------------------------------------------------------------- the child's side


def draw(dataset: str, params: Mapping[str, Any], seed: int, count: int) -> list[dict[str, Any]]:
    """The first `count` entries with distinct questions of a data set.

    Raises:
        ValueError: no such data set or parameter, a value that does not fit, or too few distinct questions.
    """
    random.seed(seed)  # a few data sets draw from the global states
    np.random.seed(seed)
    found: dict[str, dict[str, Any]] = {}
    repeats = 0
    for entry in _entries(dataset, params, seed, count):
        repeats = repeats + 1 if entry["question"] in found else 0
        found.setdefault(entry["question"], entry)
        if len(found) == count or repeats > 100 + 10 * len(found):
            break
    if len(found) < count:
        raise ValueError(
            f"task.train_size, task.val_size: {count} distinct questions are needed, but {dataset!r} has only about {len(found)} "
            f"with these task.params; lower the sizes or widen the parameters"
        )
    return list(found.values())


def _entries(dataset: str, params: Mapping[str, Any], seed: int, size: int) -> Iterable[dict[str, Any]]:
    """Entries without end: one data set of `size` entries after the other. Most data sets seed entry i by seed + i."""
    for start in itertools.count(step=size):
        source = make(dataset, params, seed + start, size)
        for index in range(size):
            try:
                yield source[index]
            except Exception as error:
                raise ValueError(f"task.params: {dataset!r} cannot make an entry with them: {_describe(error)}") from error


_scorers: dict[str, Any] = {}


def score(dataset: str, params: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float:
    """The score that the data set's own scorer gives `answer`. Past the limit the process ends (SIGPROF)."""
    key = f"{dataset} {params!r}"
    if key not in _scorers:
        _scorers[key] = make(dataset, params, seed=0, size=1)
    signal.setitimer(signal.ITIMER_PROF, SCORE_LIMIT_S)
    try:
        return float(_scorers[key].score_answer(answer, entry))
    except Exception as error:
        raise WorkerError(_describe(error)) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def make(dataset: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    """A data set of the package. Parameters are typed by the data set's own config class.

    Raises:
        ValueError: no such data set or parameter, or a value that does not fit.
    """
    import reasoning_gym  # takes a second
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ValueError(f"task.dataset: reasoning_gym {reasoning_gym.__version__} has no data set {_unknown(dataset, DATASETS)}")
    dataset_cls, config_cls = DATASETS[dataset]
    typed = _typed_fields(config_cls, params, "task.params", f"data set {dataset!r}", ours=("seed", "size"))
    try:
        return dataset_cls(config=config_cls(seed=seed, size=size, **typed))
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"task.params: {dataset!r} does not take them: {_describe(error)}") from error


def _typed_fields(cls: type, given: Any, path: str, owner: str, ours: Sequence[str] = ()) -> dict[str, Any]:
    """`given` as keywords of the dataclass `cls`, except those that are `ours` to set."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: expected a mapping, got {given!r}")
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.name not in ours]
    typed = {}
    for name, value in given.items():
        if name in ours:
            raise ValueError(f"{path}.{name}: the {name} is not yours to set here; use data.seed, task.train_size and task.val_size")
        if name not in names:
            raise ValueError(f"{path}.{name}: {owner} has no parameter {_unknown(name, names)}")
        typed[name] = _typed(value, hints[name], f"{path}.{name}")
    return typed


def _typed(value: Any, kind: Any, path: str) -> Any:
    """Plain data as the `kind` that a config class declares; beyond what our own configs know: dates, times, dataclasses."""
    item_kind = next(iter(get_args(kind)), Any)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**_typed_fields(kind, value, path, kind.__name__))
    if is_dataclass(item_kind) and isinstance(value, list):
        return [_typed(item, item_kind, f"{path}.{index}") for index, item in enumerate(value)]
    if get_origin(kind) is Sequence:
        kind = list[item_kind]  # type: ignore[valid-type]
    try:
        return ISO_PARSERS[kind](str(value)) if kind in ISO_PARSERS else coerce(value, kind)
    except Mismatch as mismatch:
        raise ValueError(f"{path}: expected {mismatch}, got {value!r}") from mismatch
    except ValueError as error:
        raise ValueError(f"{path}: expected an ISO date or time, got {value!r}") from error


def _unknown(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ";"
    return f"{name!r}{hint} there are: {', '.join(known) or 'none'}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _serve(pipe: Connection) -> None:
    """Answer requests until the parent is gone."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # a whole process group may get them; whether to stop is the parent's to decide
        signal.signal(stop, signal.SIG_IGN)
    functions: dict[str, Callable[..., Any]] = {"draw": draw, "score": score}
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            reply: tuple[str, Any] = ("done", functions[name](*args))
        except ValueError as error:
            reply = ("invalid", str(error))
        except WorkerError as error:
            reply = ("failed", str(error))
        except Exception:
            reply = ("failed", traceback.format_exc())
        pipe.send(reply)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
