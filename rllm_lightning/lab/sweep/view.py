"""How a sweep stands: a live table on a terminal, single lines elsewhere, and the whole table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rllm_lightning.lab.sweep.definition import Sweep
from rllm_lightning.lab.sweep.trial import Trial

PLAIN_WIDTH = 140  # columns where there is no terminal to ask
FRAME = 8  # lines of a terminal that are not rows of the table


class View:
    """The table of a sweep's trials. Nothing is drawn from another thread: trials must be started from the only one."""

    def __init__(self, sweep: Sweep, console: Console | None = None):
        self.sweep = sweep
        self.console = console or _console()
        self._shown: dict[str, str] = {}  # lines last printed, by trial
        self._live: Live | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A message above the table."""
        self.console.print(Text(text), soft_wrap=True)

    def update(self, trials: Sequence[Trial]) -> None:
        """Show how the trials stand now."""
        if self._live is not None:
            self._live.update(self.table(trials, max(1, self.console.height - FRAME)), refresh=True)
            return
        for trial in trials:
            line = f"trial {trial.name} {trial.state}: {self._values_text(trial)}"
            if self._shown.get(trial.name) != line:
                self._shown[trial.name] = line
                best = "" if trial.state == "running" or (value := self.best(trial)) is None else f" · best {value:.4g}"
                self.say(line + best)

    def table(self, trials: Sequence[Trial], limit: int | None = None) -> Group:
        """A headline, and the trials: those that run first, then the best; at most `limit` of them."""
        metric = self.sweep.metric
        shown = self.ranked(trials)[:limit]
        table = Table(box=None, pad_edge=False)
        for heading in ("trial", *(_short(path, self.sweep.varied) for path in self.sweep.varied), "state"):
            table.add_column(heading, no_wrap=True)
        for heading in ("step", *(("last", "best") if metric else ()), "time"):
            table.add_column(heading, justify="right", no_wrap=True)
        for trial in shown:
            history = trial.history(metric.name) if metric else []
            objective = (_number(history[-1] if history else None), _number(self.best(trial))) if metric else ()
            step = "" if trial.step is None else str(trial.step)
            values = [Text(_value_text(trial.values, path)) for path in self.sweep.varied]
            table.add_row(trial.name, *values, trial.state, step, *objective, str(timedelta(seconds=round(trial.seconds))))
        hidden = len(trials) - len(shown)
        return Group(Text(self._headline(trials)), table, *([Text(f"and {hidden} more")] if hidden else []))

    def _headline(self, trials: Sequence[Trial]) -> str:
        states = [trial.state for trial in trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trials yet"
        metric = self.sweep.metric
        return f"{self.sweep.path.stem}: {counts}" + (f" · {metric.goal} {metric.name}" if metric else "")

    def best(self, trial: Trial) -> float | None:
        """The best value of the metric that a trial has logged."""
        metric = self.sweep.metric
        return metric.best(trial.history(metric.name)) if metric else None

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Running trials, then the others from the best on."""
        sign = -1 if self.sweep.metric and self.sweep.metric.goal == "maximize" else 1

        def key(trial: Trial) -> tuple[bool, bool, float]:
            best = self.best(trial)
            return trial.state != "running", best is None, 0.0 if best is None else sign * best

        return sorted(trials, key=key)

    def _values_text(self, trial: Trial) -> str:
        return " ".join(f"{_short(path, self.sweep.varied)}={_value_text(trial.values, path)}" for path in self.sweep.varied)


def _short(path: tuple[str, ...], among: Sequence[tuple[str, ...]]) -> str:
    """The last part of a parameter's name, or all of it where another one ends alike."""
    full = ".".join(path)
    last = full.rpartition(".")[2]
    return last if sum(".".join(other).rpartition(".")[2] == last for other in among) == 1 else full


def _value_text(values: Any, path: tuple[str, ...]) -> str:
    for part in path:
        values = values[part]
    return f"{values:.4g}" if isinstance(values, float) else str(values)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
