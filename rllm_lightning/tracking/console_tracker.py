"""The tracker `console`: where the run stands, in one line; at the end a table of what it came to.

On a terminal the line is live; elsewhere (a file, a pipe) single lines appear, at most one every `interval_s` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rllm_lightning.tracking.metrics_table import Number, as_numbers
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.summary import NUM_TOKENS, Course, earlier_courses, status_of, update_courses
from rllm_lightning.tracking.terminal import one_line
from rllm_lightning.tracking.tracker import Tracker

PLAIN_WIDTH = 140  # columns where there is no terminal to ask


class ConsoleTracker(Tracker):
    """One line about the latest step, from `reward/*/mean`, `val/*/pass@1` and the number of sampled tokens."""

    def __init__(self, run: RunDirectory, console: Console | None = None, interval_s: float = 10.0):
        super().__init__(run)
        self.console = console or _console()
        self.interval_s = interval_s
        self.courses: dict[str, Course] = {}
        self._step, self._total_steps = 0, None  # type: int, int | None
        self._tokens_per_s: float | None = None
        self._start = self._logged_at = time.monotonic()
        self._printed_at, self._printed = -float("inf"), ""
        self._live: Live | None = None
        self._closed = False

    @rank_zero_only
    def begin(self, step: int, total_steps: int | None = None) -> None:
        self._start = self._logged_at = time.monotonic()
        self._step, self._total_steps = step, total_steps
        if step > 0:
            self.courses = earlier_courses(self.run, step)
        self.console.print(Text(str(self.run.path), style="dim"), soft_wrap=True)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert step is not None, "metrics are logged with their step"
        numbers, now = as_numbers(metrics), time.monotonic()
        update_courses(self.courses, numbers, step)
        self._step = step
        if NUM_TOKENS in numbers:
            self._tokens_per_s = numbers[NUM_TOKENS] / max(now - self._logged_at, 1e-9)
        self._logged_at = now
        self._show(now)

    def line(self) -> str:
        """Where the run stands."""
        parts = [f"step {self._step}/{self._total_steps}" if self._total_steps else f"step {self._step}"]
        parts += [f"reward {role} {_text(course.last)}" for role, course in self._courses("reward/", "/mean")]
        parts += [f"pass@1 {source} {_text(course.last)}" for source, course in self._courses("val/", "/pass@1")]
        if self._tokens_per_s is not None:
            parts.append(f"{self._tokens_per_s:,.0f} tokens/s")
        return " · ".join([*parts, str(timedelta(seconds=round(time.monotonic() - self._start)))])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        if self._closed:
            return
        self._closed = True
        self.finalize("")
        if self.courses:
            self.console.print(self._table(), soft_wrap=True)
        self.console.print(Text(f"{status_of(exit_code)} at step {self._step}: {self.run.path}"), soft_wrap=True)

    def _courses(self, prefix: str, suffix: str) -> list[tuple[str, Course]]:
        """The metrics of this form, by what stands between prefix and suffix."""
        found = [(key, course) for key, course in self.courses.items() if key.startswith(prefix) and key.endswith(suffix)]
        return [(one_line(key.removeprefix(prefix).removesuffix(suffix)), course) for key, course in found]

    def _show(self, now: float) -> None:
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, get_renderable=lambda: Text(self.line()), refresh_per_second=4)
                self._live.start()
            self._live.refresh()
        elif now - self._printed_at >= self.interval_s:
            self.console.print(Text(self.line()), soft_wrap=True)
            self._printed_at = now

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("metric", "first", "last", "best", "at step"):
            table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
        for key, course in self.courses.items():
            best = ("", "") if course.best is None else (_text(course.best), str(course.best_step))
            table.add_row(Text(one_line(key)), _text(course.first), _text(course.last), *best)
        return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _text(value: Number) -> str:
    return f"{value:.4g}"
