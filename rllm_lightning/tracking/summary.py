"""`summary.json`: what a run came to. Written when the run begins, after each validation, and at its end.

`metrics` holds the course of every headline metric (`val/*` and `reward/*/mean`): its first, last and best value.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import platform
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import rllm_lightning
from rllm_lightning.config import Config
from rllm_lightning.tracking.metrics_table import Number, as_numbers, read_metrics
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write
from rllm_lightning.tracking.secrets import scrub
from rllm_lightning.types import to_plain

Status = Literal["running", "done", "failed", "interrupted"]

PACKAGES = ("torch", "lightning", "transformers", "omegaconf", "numpy", "wandb", "reasoning-gym")
INTERRUPTED = {128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}  # exit codes: 130, 143, 138
NUM_TOKENS = "rollout/num_response_tokens"  # the metric that counts the tokens sampled in a step, on all ranks


def status_of(exit_code: int) -> Status:
    """The status of a run whose process exits with `exit_code`."""
    return "done" if exit_code == 0 else "interrupted" if exit_code in INTERRUPTED else "failed"


def is_headline(key: str) -> bool:
    """Whether a metric belongs in the summary of a run."""
    return key.startswith("val/") or re.fullmatch(r"reward/.+/mean", key) is not None


@dataclass
class Course:
    """The course of one metric over a run. `best` is the largest finite value (None: there is none), at its first step."""

    first: Number
    last: Number
    best: Number | None = None
    best_step: int | None = None

    def update(self, value: Number, step: int) -> None:
        self.last = value
        if math.isfinite(value) and (self.best is None or value > self.best):
            self.best, self.best_step = value, step


def update_courses(courses: dict[str, Course], metrics: Mapping[str, Number], step: int) -> None:
    """Carry the headline metrics among `metrics` into `courses`."""
    for key, value in metrics.items():
        if is_headline(key):
            courses.setdefault(key, Course(value, value)).update(value, step)


def earlier_rows(run: RunDirectory, step: int) -> list[tuple[int, dict[str, float]]]:
    """What `metrics.csv` holds of a run's steps up to `step`: each with its metrics; nothing where there is no such file."""
    rows = read_metrics(run.metrics_csv) if run.metrics_csv.exists() else []
    return [(int(row.pop("step")), row) for row in rows if row["step"] <= step]


def earlier_courses(run: RunDirectory, step: int) -> dict[str, Course]:
    """The courses of a run's steps up to `step`: from its `metrics.csv`, else (no tracker wrote one) what its `summary.json` says."""
    courses: dict[str, Course] = {}
    for row_step, row in earlier_rows(run, step):
        update_courses(courses, row, row_step)
    if run.metrics_csv.exists() or not run.summary_json.exists():
        return courses
    for key, entry in json.loads(run.summary_json.read_text(encoding="utf-8"))["metrics"].items():
        first, last = (math.nan if entry[name] is None else entry[name] for name in ("first", "last"))
        is_known = entry["best_step"] is not None and entry["best_step"] <= step
        courses[key] = Course(first, last, *((entry["best"], entry["best_step"]) if is_known else ()))
    return courses


class RunSummary:
    """Follows a run and writes its `summary.json`. Make and use it on rank 0 alone."""

    def __init__(self, run: RunDirectory, config: Config):
        self.run = run
        self.config = config
        self.courses: dict[str, Course] = {}
        self.num_steps = 0
        self.precision: str | None = None  # that the policy is trained in, once it is known
        self._num_tokens: Number | None = None
        self._earlier_s = 0.0
        self._start = time.monotonic()
        self._begun = False
        self._git_commit = git_commit()

    def begin(self, step: int = 0) -> None:
        """Write the first summary. When a run resumes after `step`, its earlier metrics and time are taken up again."""
        self._begun, self._start = True, time.monotonic()
        if step > 0:
            self.courses = earlier_courses(self.run, step)
            self._num_tokens = sum(row[NUM_TOKENS] for _, row in earlier_rows(self.run, step) if NUM_TOKENS in row)
        if step > 0 and self.run.summary_json.exists():
            self._earlier_s = json.loads(self.run.summary_json.read_text(encoding="utf-8"))["wall_time_s"]
        self.num_steps = step
        self._write("running")

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """The metrics of one step."""
        self._follow(as_numbers(metrics), step)
        if any(key.startswith("val/") for key in metrics):
            self._write("running")

    def finish(self, status: Status) -> None:
        """Write the last summary. Where a run to be resumed failed before it began, what it came to earlier stays."""
        if self._begun or not self.run.summary_json.exists():
            self._write(status)
        else:
            earlier = json.loads(self.run.summary_json.read_text(encoding="utf-8"))
            self._save(earlier | {"status": status})

    def _follow(self, metrics: Mapping[str, Number], step: int) -> None:
        update_courses(self.courses, metrics, step)
        self.num_steps = step
        if NUM_TOKENS in metrics:
            self._num_tokens = (self._num_tokens or 0) + metrics[NUM_TOKENS]

    def _write(self, status: Status) -> None:
        algorithm, wall_time_s = self.config.rllm.algorithm, self._earlier_s + time.monotonic() - self._start
        content = {
            "name": self.config.rllm.trainer.experiment_name,
            "id": self.run.id,
            "status": status,
            "seed": self.config.seed,
            "estimator": algorithm.estimator_of(""),
            "loss_fn": algorithm.loss_of(""),
            "precision": self.precision,
            "steps": self.num_steps,
            "wall_time_s": wall_time_s,
            "tokens_per_s": self._num_tokens / wall_time_s if self._num_tokens and wall_time_s > 0 else None,
            "metrics": self.courses,
            "versions": versions(),
            "git_commit": self._git_commit,
        }
        self._save(content)

    def _save(self, content: dict[str, Any]) -> None:
        atomic_write(self.run.summary_json, json.dumps(scrub(to_plain(content), keys=False), indent=2, allow_nan=False) + "\n")


@functools.cache  # looking through all that is installed takes some 30 ms
def versions() -> dict[str, str]:
    """Python, this library, and the packages that decide a run's numbers (those that are installed)."""
    found = {"python": platform.python_version(), "rllm-lightning": rllm_lightning.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit checked out in the working directory; None outside of a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
