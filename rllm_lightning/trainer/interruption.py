"""Ctrl-C, SIGTERM and SIGUSR1 (SLURM's requeue): the rollout is cancelled at once, an update runs to its end, and the run is saved.

The handlers only set a flag and tell the other ranks. `StopSignal.wait` runs a coroutine while watching it. Ranks stop at the same
place, whichever of them got the signal: that is what `settle` and `check` are for, which all ranks reach at once. A second signal
of the same kind acts as it would without us.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from rllm_lightning.trainer.ranks import Ranks
from rllm_lightning.trainer.watch import RankWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")

REQUEUE_S = 60
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


def requeue() -> None:
    """Put this process's SLURM job into the queue again, where there is one."""
    if (job := os.environ.get("SLURM_JOB_ID")) is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=REQUEUE_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("job %s was saved but could not be requeued (%s); submit it again with rllm.trainer.resume=auto", job, error)


class StopSignal:
    """Whether, and by which signal, the run was asked to stop; on this rank, or on another that said so."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.signum: int | None = None
        self.ranks = Ranks()
        self.watch: RankWatch | None = None
        self._former: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def join(self, ranks: Ranks, watch: RankWatch) -> None:
        """The ranks have met: from now on they stop together."""
        self.ranks, self.watch = ranks, watch
        if self.signum is not None:
            watch.tell_signal(self.signum)

    @property
    def joined(self) -> bool:
        return self.watch is not None

    def request(self, signum: int = signal.SIGINT) -> None:
        """Ask the run to stop."""
        self.heard(signum)
        if self.watch is not None:
            self.watch.tell_signal(signum)

    def heard(self, signum: int) -> None:
        """Another rank was asked to stop."""
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
        self.request(signum)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            self.restore()

    def check(self) -> None:
        """Raise `Interrupted` on all ranks if any was asked to stop. All ranks call this at once."""
        self.settle(self.ranks.gather(self.signum))

    def settle(self, signums: Sequence[int | None]) -> None:
        """`check` for those that have gathered every rank's `signum` already."""
        if asked := [signum for signum in signums if signum is not None]:
            self.signum = asked[0]
            raise Interrupted(asked[0])

    async def wait(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`. It is cancelled when the run is asked to stop (None), or when another rank fails.

        Raises:
            RankFailed: another rank failed.
        """
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                if self.watch is not None and self.watch.failure is not None:
                    raise self.watch.failure
                if self:
                    return None
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
