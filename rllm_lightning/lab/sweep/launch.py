"""A trial as a process: its share of the machine, its start, its end.

A trial is a process group of its own. It is asked to end by SIGTERM to its first process, as W&B's agent does, upon which a run
saves itself; what is left of the group after that, or after `KILL_DELAY_S`, is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rllm_lightning.config_sources import parse_argv
from rllm_lightning.lab.sweep import leash
from rllm_lightning.lab.sweep.trial import State, Trial

KILL_DELAY_S = 30.0  # as W&B's agent
# exit codes of a run that was interrupted, terminated, or told by SLURM that its time is up
ENDED_FROM_OUTSIDE = tuple(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))


# ---------------------------------------------------------------------------------------------------------------- machine


@dataclass(frozen=True)
class Machine:
    """What there is to share out: CPU cores, and the names of GPUs as CUDA_VISIBLE_DEVICES takes them."""

    cores: int
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        """What this process may use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, _gpus())

    def share(self, slot: int, jobs: int, num_processes: int = 1) -> dict[str, str]:
        """The environment of a trial in one of `jobs` slots: its threads (for each of its processes), and its GPUs."""
        environment = {"OMP_NUM_THREADS": str(max(1, self.cores // jobs // num_processes))}
        if self.gpus and jobs > 1:
            gpus = self.gpus[slot::jobs] or (self.gpus[slot % len(self.gpus)],)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return environment


def _gpus() -> tuple[str, ...]:
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    try:  # asked for without torch, whose import takes seconds
        answer = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def num_processes(command: Sequence[str]) -> int:
    """The processes on this machine that a command line asks of Lightning; 1 where it does not say."""
    devices = [str(value) for key, value in parse_argv(command, [])[1] if key == "lightning.devices"]
    return max(1, int(devices[-1])) if devices and devices[-1].isdecimal() else 1


# ---------------------------------------------------------------------------------------------------------------- process


def environment_of(trial: Trial, group: str, share: Mapping[str, str]) -> dict[str, str]:
    """What W&B's agent sets, but for the sweep's id, which no server knows: the runs of a sweep are a group instead. Offline unless
    WANDB_MODE says otherwise. OMP_NUM_THREADS stays where the user has set it."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("WANDB_SWEEP_ID", "WANDB_SERVICE")}
    defaults = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": share["OMP_NUM_THREADS"]}
    ours = {name: value for name, value in share.items() if name not in defaults} | {
        "WANDB_RUN_ID": trial.run_id,
        "WANDB_RUN_GROUP": group,
        "WANDB_SWEEP_PARAM_PATH": str(trial.values_yaml),
        # `python` in the command is the one that runs this
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)]),
    }
    return defaults | inherited | ours


class Process:
    """A running trial. It has to be started from the thread that lives longest: the trial ends with it."""

    def __init__(self, trial: Trial, slot: int, command: Sequence[str], environment: Mapping[str, str]):
        self.trial, self.slot = trial, slot
        self.becomes: State | None = None  # what the trial was asked to end as
        self._started, self._seconds_before = time.monotonic(), trial.seconds
        self._asked: float | None = None
        with trial.log.open("a", encoding="utf-8") as log:
            print("$", shlex.join(command), file=log, flush=True)
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(trial.lock), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code once the trial has ended (128 + signal, where one ended it); nothing of it is left then."""
        self.trial.seconds = self._seconds_before + time.monotonic() - self._started
        if self._asked is not None and time.monotonic() > self._asked + KILL_DELAY_S:
            self.kill()
        if (code := self._popen.poll()) is None:
            return None
        _signal_group(self._popen.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def ask_to_end(self, state: State) -> None:
        """SIGTERM; unless the trial is done in the very same moment it becomes `state`."""
        if self._asked is None:
            self._asked, self.becomes = time.monotonic(), state
            self._popen.terminate()

    def kill(self) -> None:
        _signal_group(self._popen.pid, signal.SIGKILL)

    def wait(self) -> int:
        self._popen.wait()
        code = self.poll()
        assert code is not None
        return code


def state_after(code: int, asked: State | None) -> State:
    """The state of a trial whose process has exited with `code`, after it was asked to end as `asked`."""
    if code == 0:
        return "finished"
    if asked is not None:
        return asked
    return "interrupted" if code in ENDED_FROM_OUTSIDE else "failed"


def wait_for_leftover(trial: Trial) -> None:
    """Wait for the process that a runner which died has left; it was sent SIGTERM then. After `KILL_DELAY_S` it is killed."""
    if not trial.lock.is_file():
        return
    deadline = time.monotonic() + KILL_DELAY_S
    with trial.lock.open() as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline and (pid := lock.read().strip()).isdecimal():
                    _signal_group(int(pid), signal.SIGKILL)
                time.sleep(0.2)
                lock.seek(0)


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
