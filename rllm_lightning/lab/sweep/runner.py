"""The loop of a sweep: start trials, watch them, stop the hopeless ones, end all of them when asked to, and go on another time.

Everything happens in one thread. The state is what the trials' folders say: a trial is written down before it is started and after
it has ended, so that a runner may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rllm_lightning.lab.sweep import engine
from rllm_lightning.lab.sweep.definition import Sweep
from rllm_lightning.lab.sweep.launch import Machine, Process, environment_of, num_processes, state_after, wait_for_leftover
from rllm_lightning.lab.sweep.trial import DONE, Trial, load_trials, new_trial
from rllm_lightning.lab.sweep.view import View
from rllm_lightning.tracking.run_directory import atomic_write

POLL_S = 0.5

# B43, as W&B's agent has it: a sweep that cannot work must not go through all of its trials
EARLY_S, EARLY_FAILURES = 60.0, 3
INITIAL_FAILURES = 5  # without any trial that did better


class Runner:
    """Runs a sweep in a folder, or goes on with the one that is there.

    Args:
        sweep: the checked YAML.
        folder: of the sweep's own; made if it is not there.
        count: trials at most, those of earlier times included; None leaves it to the YAML's `run_cap`, or to the grid.
        jobs: trials at a time.
        view: shows how it stands.

    Raises:
        ValueError: the sweep has no end, or the folder holds another sweep.
    """

    def __init__(self, sweep: Sweep, folder: Path, count: int | None, jobs: int, view: View):
        self.sweep, self.folder, self.jobs, self.view = sweep, folder, jobs, view
        limits = [limit for limit in (count, sweep.run_cap) if limit is not None]
        if not limits and sweep.method != "grid":
            raise ValueError(f"{sweep.path}: method {sweep.method} has no end; give --count N, or run_cap in the YAML")
        self.count = min(limits, default=None)
        self.machine = Machine.here()
        self.trials: list[Trial] = []
        self.processes: list[Process] = []
        self.failures: list[Trial] = []  # of this time
        self.problem: str | None = None  # why the sweep was given up
        self.signum: int | None = None  # by which signal the sweep was asked to end
        self._again: list[Trial] = []  # of an earlier time, to be taken up again
        self._judged: dict[str, int] = {}  # values of the metric that early stopping has seen, by trial

    def run(self) -> int:
        """Returns the exit code: 0 all trials done, 1 one failed, 130/143 interrupted or terminated."""
        with self._alone(), self.view, self._signals():
            self._start = time.monotonic()
            self._take_up()
            try:
                while self.signum is None and not self.problem:
                    self._start_trials()
                    if not self.processes:
                        break
                    time.sleep(POLL_S)
                    self._collect()
                    self._stop_early()
                    self.view.update(self.trials)
            finally:
                self._end_trials()
        if self.signum is not None:
            return 128 + self.signum
        return 1 if self.problem or any(trial.state == "failed" for trial in self.trials) else 0

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the sweep in order; a second one ends it at once."""
        former = {signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum

    # --------------------------------------------------------------------------------------------------------------- folder

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the folder this runner's and this sweep's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise ValueError(f"{self.folder}: another runner (process {lock.read()}) is at work here") from error
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            copy = self.folder / "sweep.yaml"
            if not copy.is_file():
                atomic_write(copy, self.sweep.path.read_bytes())
            elif yaml.safe_load(copy.read_text(encoding="utf-8")) != yaml.safe_load(self.sweep.path.read_text(encoding="utf-8")):
                raise ValueError(f"{self.folder}: holds trials of another version of {self.sweep.path}; choose another --folder")
            yield

    def _take_up(self) -> None:
        """What earlier times have left: done trials stay, all others are taken up again, before new ones."""
        self.trials = load_trials(self.folder / "trials")
        for trial in self.trials:
            if trial.state == "running":
                wait_for_leftover(trial)
                trial.state = "finished" if trial.run_is_done() else "interrupted"
                trial.save()
        self._again = [trial for trial in self.trials if trial.state not in DONE]

    # --------------------------------------------------------------------------------------------------------------- trials

    def _start_trials(self) -> None:
        while len(self.processes) < self.jobs and (trial := self._next_trial()) is not None:
            slot = min(set(range(self.jobs)) - {process.slot for process in self.processes})
            command = [*self.sweep.command_line(trial.values, trial.values_json), f"--run_root={trial.folder}"]
            if (run := trial.checkpoint()) is not None:
                command.append(f"--rllm.trainer.resume={run}")
            else:
                trial.discard_runs()
            share = self.machine.share(slot, self.jobs, num_processes(command))
            trial.state, trial.exit_code = "running", None
            trial.save()
            self.processes.append(Process(trial, slot, command, environment_of(trial, self.folder.name, share)))
            self.view.update(self.trials)

    def _next_trial(self) -> Trial | None:
        if self._again:
            return self._again.pop(0)
        if self.count is not None and len(self.trials) >= self.count:
            return None
        values = engine.next_values(self.sweep, self.trials)
        if values is None:
            return None
        self.trials.append(new_trial(self.folder / "trials", len(self.trials) + 1, values))
        return self.trials[-1]

    def _collect(self) -> None:
        """Take note of the trials that have ended."""
        for process in list(self.processes):
            if (code := process.poll()) is None:
                continue
            self.processes.remove(process)
            trial = process.trial
            trial.exit_code, trial.state = code, state_after(code, process.becomes)
            trial.save()
            if trial.state == "failed":
                self.failures.append(trial)
                self._judge_failures(trial)
            elif trial.state == "finished":
                self._miss_metric(trial)
        self.view.update(self.trials)

    def _judge_failures(self, last: Trial) -> None:
        count, seconds = len(self.failures), time.monotonic() - self._start
        where = f"{last.log} ends with:\n" + "\n".join(f"    {line}" for line in last.last_words())
        if count >= EARLY_FAILURES and seconds < EARLY_S:
            self.problem = f"{count} trials failed within the first {EARLY_S:.0f} s; {where}"
        elif count >= INITIAL_FAILURES and not any(trial.state in DONE for trial in self.trials):
            self.problem = f"the first {count} trials failed; {where}"
        elif not self.problem:
            self.view.say(f"trial {last.name} failed with exit code {last.exit_code}; {where}")

    def _miss_metric(self, trial: Trial) -> None:
        metric = self.sweep.metric
        if metric is None or trial.history(metric.name):
            return
        logged = sorted({key for row in trial.rows() for key in row})
        near = difflib.get_close_matches(metric.name, logged, n=3)
        known = f"near it: {', '.join(near)}" if near else f"it logs: {', '.join(logged) or 'nothing (is csv in rllm.trainer.logger?)'}"
        self.view.say(f"trial {trial.name} never logged the sweep's metric {metric.name}; {known}")

    def _stop_early(self) -> None:
        if not self.sweep.stops_early or self.sweep.metric is None:
            return
        seen = {trial.name: len(trial.history(self.sweep.metric.name)) for trial in self.trials}
        if seen == self._judged:
            return
        self._judged = seen
        running = {process.trial.name: process for process in self.processes if process.becomes is None}
        for trial in engine.to_stop(self.sweep, self.trials):
            if trial.name in running:
                running[trial.name].ask_to_end("stopped")

    def _end_trials(self) -> None:
        """Ask what still runs to save itself and end, and wait for it; a second Ctrl-C kills it."""
        try:
            for process in self.processes:
                process.ask_to_end("interrupted")
            while self.processes:
                time.sleep(POLL_S)
                self._collect()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            self._collect()
