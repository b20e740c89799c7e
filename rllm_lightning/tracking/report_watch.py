"""The report of a run that is going on, written anew whenever its files have changed. It only reads the run's files: training does not
know of it, and is not slowed down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rllm_lightning.tracking.report import Report
from rllm_lightning.tracking.rollout_sample import file_state
from rllm_lightning.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

ENDED = ("done", "failed", "interrupted")  # what a run's summary says when nothing more will come


def watch(run: RunDirectory, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Write the report every `seconds` in which something changed, as a page that loads itself anew, until the run has ended; then, or
    when Ctrl-C ends the watch, once more as a page that stays. A file that cannot be read is told of, and tried again.
    """
    report = Report(run)
    former: object = None
    try:
        while report.status not in ENDED:
            if (state := _state(run, report)) != former:
                former = state if _write(report, seconds) else None
            if report.status not in ENDED:
                sleep(seconds)
    finally:
        _write(report, None)


def _write(report: Report, reload_s: float | None) -> bool:
    try:
        report.write(reload_s)
    except ValueError as error:
        logger.warning("%s", error)
        return False
    return True


def _state(run: RunDirectory, report: Report) -> list[tuple[Path, int, int, int]]:
    """Changes when a file does that the report is made from."""
    paths = [run.metrics_csv, run.summary_json, *report.rollouts.folder.glob("*.jsonl")]
    return [(path, *state) for path in sorted(paths) if (state := file_state(path))]
