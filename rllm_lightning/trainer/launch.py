"""The processes of a run on this machine, where nobody else (torchrun, SLURM) has started them.

    strategy ddp, fsdp2           the command line once more for each further process (`Children`); this one is rank 0
    ddp_spawn, ddp_notebook, ...  all of them as processes of `torch.multiprocessing` (`fit_in_processes`); this one waits

Lightning's strategies do the rest: they read rank and address from the environment, as under torchrun. Its own launchers are
not used, since they answer any process's end, an orderly one after Ctrl-C too, by killing all others.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch.strategies import ParallelStrategy

from rllm_lightning.trainer.interruption import Interrupted, StopSignal
from rllm_lightning.trainer.watch import CLOSING_S, GRACE_S, RankFailed

logger = logging.getLogger(__name__)

PARENT = "RLLM_LIGHTNING_PARENT"  # the read end of a pipe that breaks when the process that started this one is gone
POLL_S = 0.2
LEAVE_S = 10.0  # for the other processes, when this one ends


def start_method(trainer: L.Trainer) -> str | None:
    """How the processes of a run are to be started here: `"popen"`, `"spawn"`, `"fork"`; None: there is one, or they are there."""
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, ParallelStrategy) or strategy.cluster_environment is None:
        return None
    if strategy.cluster_environment.creates_processes_externally:
        return None
    return getattr(strategy, "_start_method", "popen")


def environment_of(trainer: L.Trainer, local_rank: int) -> dict[str, str]:
    """What a process has to find in its environment to be `local_rank` of this machine."""
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    return {
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
        "NODE_RANK": str(environment.node_rank()),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(trainer.world_size),
    }


def share_threads(trainer: L.Trainer) -> None:
    """Leave every process of this machine its part of the cores, unless the user has said how many (OMP_NUM_THREADS)."""
    if trainer.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(_suggested_max_num_threads(trainer.num_devices))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class Children:
    """The other processes of this machine: each runs this process's command line anew and joins it in `fit`.

    They live as long as the script, so that a second `fit` finds them again. `joined` says whether all ranks have met; until
    then a child that ends is noticed here, and this process, which would wait for it, is ended after `emergency`.
    """

    def __init__(self, trainer: L.Trainer, joined: Callable[[], bool], emergency: Callable[[], None]):
        self._joined, self._emergency = joined, emergency
        os.environ.update(environment_of(trainer, 0))
        read_end, self._write_end = os.pipe()
        command = _own_command()
        self.processes = [
            subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(local_rank), PARENT: str(read_end)}, pass_fds=[read_end])
            for local_rank in range(1, trainer.num_devices)
        ]
        os.close(read_end)
        atexit.register(self._leave)
        threading.Thread(target=self._observe, name="children", daemon=True).start()

    def _observe(self) -> None:
        while not self._joined():
            for process in self.processes:
                if process.poll():
                    time.sleep(GRACE_S)  # this process most likely fails for the same reason
                    logger.error("a process of the run ended with code %s before the run began", process.returncode)
                    closing = threading.Thread(target=self._emergency, daemon=True)
                    closing.start()
                    closing.join(CLOSING_S)
                    self.kill()
                    os._exit(1)
            time.sleep(POLL_S)

    def _leave(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def end_with_parent(joined: Callable[[], bool]) -> None:
    """In a process that `Children` started: end it when the one that started it is gone before the ranks have met."""
    if (read_end := os.environ.pop(PARENT, None)) is None:
        return

    def watch() -> None:
        os.read(int(read_end), 1)
        if not joined():
            os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _own_command() -> list[str]:
    import __main__

    spec = getattr(__main__, "__spec__", None)
    start = [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, *start, *sys.argv[1:]]


# ------------------------------------------------------------------------------------------------ torch.multiprocessing


def fit_in_processes(trainer: L.Trainer, method: str, fit: Callable[..., str], arguments: Mapping[str, Any], stop: StopSignal) -> str:
    """Run `fit(**arguments)` in a process for every device; returns what it returned on rank 0.

    Raises:
        Interrupted: the processes were asked to stop, or this one was and passed it on.
        ValueError: what one of them refused.
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: one of them failed or died.
    """
    environments = [environment_of(trainer, local_rank) for local_rank in range(trainer.num_devices)]
    outcomes = torch.multiprocessing.get_context(method).SimpleQueue()
    processes = torch.multiprocessing.start_processes(
        _run, (environments, fit, dict(arguments), outcomes), nprocs=trainer.num_devices, join=False, start_method=method
    )
    told = False
    while not processes.join(timeout=POLL_S, grace_period=LEAVE_S):
        if stop and not told:
            told = True
            for pid in processes.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, stop.signum or signal.SIGTERM)
    answer: Any = ""
    while not outcomes.empty():
        kind, value = outcomes.get()
        if kind == "interrupted":
            raise Interrupted(value)
        if kind == "refused":
            raise value
        answer = value
    return str(answer)


def _run(local_rank: int, environments: list[dict[str, str]], fit: Callable[..., str], arguments: dict[str, Any], outcomes: Any) -> None:
    os.environ.update(environments[local_rank])
    try:
        answer = fit(**arguments)
    except Interrupted as interrupted:
        outcomes.put(("interrupted", interrupted.signum))
    except ValueError as error:
        outcomes.put(("refused", error))
    except RankFailed:
        return  # another process has said it
    else:
        if local_rank == 0:
            outcomes.put(("done", answer))
