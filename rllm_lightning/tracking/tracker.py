"""What every tracker of this library is: a Lightning `Logger` with a beginning and an end of its own.

    begin(step, total_steps)  ->  log_metrics(metrics, step) once a step, log_episodes(...)  ->  close(exit_code)

All of it acts on rank 0 only, and every method but `log_metrics` does nothing unless a tracker overrides it. Lightning ends its
loggers by `finalize("success" | "failed")` at the end of each `fit` or `validate`, before the last files of a run are written and
without knowing an interrupt from a failure; here `finalize` therefore only flushes, and `close`, called once by whoever made the
trackers, tells how the process will exit.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.table import Table
from rllm_lightning.types import Episode


class Tracker(Logger):
    """Base of the trackers. `tables` are of the whole run, by name; whoever makes the trackers sets them before `begin`."""

    def __init__(self, run: RunDirectory):
        super().__init__()
        self.run = run
        self.tables: Mapping[str, Table] = {}

    def begin(self, step: int, total_steps: int | None = None) -> None:
        """The run starts.

        Args:
            step: the last step that is done already (0: a new run). What was logged of later ones is done again.
            total_steps: the step at which the run will end; None where that is open.
        """

    def log_episodes(self, episodes: Sequence[Episode], step: int) -> None:
        """Show rollouts of one step, with the rewards and advantages they got."""

    def log_model(self, folder: Path) -> None:
        """The final model lies in `folder`."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The config reaches a tracker through its factory; Lightning has nothing to add."""

    def close(self, exit_code: int) -> None:
        """The end. Idempotent.

        Args:
            exit_code: 0 done, 130 interrupted, 143 terminated, 138 to be requeued, anything else failed.
        """

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def version(self) -> str:
        return self.run.id

    @property
    def root_dir(self) -> str:
        return str(self.run.path)

    @property
    def log_dir(self) -> str:
        return str(self.run.path)

    @property
    def save_dir(self) -> str:
        return str(self.run.path)
