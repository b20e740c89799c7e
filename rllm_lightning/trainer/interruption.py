"""Ctrl-C and SIGTERM: the rollout is cancelled at once, an update runs to its end, and the run is saved.

The handlers only set a flag. `StopSignal.wait` runs a coroutine while watching it; the loop looks at it between batches. A second
signal of the same kind acts as it would without us.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.1  # how often a waiting rollout looks at the flag


class Interrupted(BaseException):
    """The run was asked to stop by signal `signum`; what had been finished is saved. Exit code: 128 + signum.

    A `BaseException`, as `KeyboardInterrupt` is: no `except Exception` of a user's code takes it for a failure.
    """

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class StopSignal:
    """Whether, and by which signal, the run was asked to stop."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._former: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def request(self, signum: int = signal.SIGINT) -> None:
        """Ask the run to stop."""
        self.signum = signum

    def install(self) -> None:
        """Take the handlers (again: Lightning sets its own when it starts). Only the main thread can have handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.SIGNALS:
            former = signal.signal(number, self._handle)
            self._former.setdefault(number, former)

    def restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._former.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._former.clear()

    def _handle(self, signum: int, frame: Any) -> None:
        if self.signum == signum:
            self.restore()
            signal.raise_signal(signum)
        self.signum = signum

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            self.restore()

    def check(self) -> None:
        """Raise `Interrupted` if the run was asked to stop."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; when the run is asked to stop, `work` is cancelled and `Interrupted` raised."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                self.check()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
