"""One trial of a sweep: its values, its state, and its folder.

SWEEP_FOLDER/trials/0001/
    trial.json              values and state; with the run's own files this is all that a restart knows
    values.yaml             the values as W&B's agent hands them to a run (it locks them in the run's config)
    log.txt                 what the command printed
    lock                    held by the trial's process
    {project}/{experiment}-{id}/    the run directory
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write

State = Literal["running", "finished", "stopped", "failed", "interrupted"]
DONE: tuple[State, ...] = ("finished", "stopped")

LOG_TAIL = 5  # lines shown of a failed trial's log


@dataclass
class Trial:
    """A trial.

    `state`: running; finished (exit code 0); stopped (given up by `early_terminate`); failed; interrupted (the sweep or the trial was
    ended from outside: it goes on when the sweep is started again).
    """

    folder: Path
    values: dict[str, Any]
    state: State = "running"
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # W&B's
    exit_code: int | None = None
    seconds: float = 0.0  # that it has run, all attempts together

    @classmethod
    def load(cls, folder: Path) -> Trial:
        return cls(folder, **json.loads((folder / "trial.json").read_text(encoding="utf-8")))

    def save(self) -> None:
        content = asdict(self)
        del content["folder"]
        atomic_write(self.folder / "trial.json", json.dumps(content, indent=2) + "\n")

    @property
    def name(self) -> str:
        """`0001`."""
        return self.folder.name

    @property
    def number(self) -> int:
        return int(self.name)

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def values_yaml(self) -> Path:
        return self.folder / "values.yaml"

    @property
    def values_json(self) -> Path:
        return self.folder / "values.json"

    def write_values(self) -> None:
        """The files that stand for the values: W&B's, and that of `${args_json_file}`."""
        wire = {key: {"value": value} for key, value in self.values.items()}
        atomic_write(self.values_yaml, yaml.safe_dump({"wandb_version": 1, **wire}, sort_keys=False, allow_unicode=True))
        atomic_write(self.values_json, json.dumps(self.values))

    # ------------------------------------------------------------------------------------------------------------ its run

    def run_directory(self) -> RunDirectory | None:
        """The run directory; None before the run has made it."""
        found = sorted(self.folder.glob("*/*/config.yaml"), key=lambda path: path.stat().st_mtime)
        return RunDirectory.open(found[-1].parent) if found else None

    def checkpoint(self) -> Path | None:
        """The run directory to go on from; None where it holds no checkpoint."""
        run = self.run_directory()
        return run.path if run and (run.checkpoints / "last.ckpt").is_file() else None

    def run_is_done(self) -> bool:
        """Whether the run itself says that it came to its end."""
        run = self.run_directory()
        return bool(run and run.summary_json.is_file() and json.loads(run.summary_json.read_text(encoding="utf-8"))["status"] == "done")

    def discard_runs(self) -> None:
        """Delete what attempts without a checkpoint left: a comparison would take them for runs."""
        for config in self.folder.glob("*/*/config.yaml"):
            shutil.rmtree(config.parent)

    def rows(self) -> list[dict[str, float]]:
        """What the run has logged so far, step by step."""
        run = self.run_directory()
        return self._cache.read(run.metrics_csv) if run else []

    def history(self, metric: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [row[metric] for row in self.rows() if metric in row and math.isfinite(row[metric])]

    @property
    def step(self) -> int | None:
        """The last step that is logged."""
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else None

    def last_words(self) -> list[str]:
        """The last lines of the log."""
        if not self.log.is_file():
            return []
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()][-LOG_TAIL:]

    @cached_property
    def _cache(self) -> _Table:
        return _Table()


class _Table:
    """The last `metrics.csv` that was read, and when it was written."""

    def __init__(self) -> None:
        self._version: tuple[str, int, int] | None = None
        self._rows: list[dict[str, float]] = []

    def read(self, path: Path) -> list[dict[str, float]]:
        if not path.is_file():
            return []
        stat = path.stat()
        version = (str(path), stat.st_mtime_ns, stat.st_size)
        if version != self._version:
            self._rows, self._version = read_metrics(path), version
        return self._rows


def new_trial(folder: Path, number: int, values: dict[str, Any]) -> Trial:
    """Make the folder of a trial that has not begun; it counts as interrupted until it is started."""
    name = f"{number:04d}"
    making = folder / f".making-{name}"  # renamed when all is in it: a folder of a trial is never half made
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    trial = Trial(making, values, state="interrupted")
    trial.write_values()
    trial.save()
    trial.folder = making.rename(folder / name)
    return trial


def load_trials(folder: Path) -> list[Trial]:
    """All trials below a folder, in their order."""
    return [Trial.load(path) for path in sorted(folder.glob("[0-9]*"))]
