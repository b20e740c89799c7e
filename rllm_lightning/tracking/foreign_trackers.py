"""Trackers around loggers that others wrote: `tensorboard` and `mlflow` (Lightning's own loggers) and `trackio`.

    ForeignTracker(config, run, make)   begin -> make(step), the config;   log_metrics -> finite numbers;   close -> how the run ended

A logger that fails is left alone from then on, with one warning: it must not take a run down that others record as well.
To add one: a function `(config, run) -> ForeignTracker` here, and its factory in `trackers.py`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.tracking.metrics_table import as_numbers
from rllm_lightning.tracking.run_directory import RunDirectory, atomic_write, safe_name
from rllm_lightning.tracking.secrets import scrub
from rllm_lightning.tracking.summary import status_of
from rllm_lightning.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


class ForeignTracker(Tracker):
    """A Lightning logger that is told when a run begins and how it ends.

    Args:
        config: shown by the logger as its parameters, without secrets.
        run: the run.
        make: makes the logger, given the last step that is done already; called once, on rank 0 alone.
        rename: from our metric keys to those that the logger allows.
    """

    def __init__(self, config: Config, run: RunDirectory, make: Callable[[int], Logger], rename: Callable[[str], str] = str):
        super().__init__(run)
        self.config, self.make, self.rename = config, make, rename
        self.logger: Logger | None = None
        self._over = False

    @rank_zero_only
    def begin(self, step: int, total_steps: int | None = None) -> None:
        self._guarded(lambda: self._start(step))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert step is not None, "metrics are logged with their step"
        finite = {self.rename(key): value for key, value in as_numbers(metrics).items() if math.isfinite(value)}
        self._guarded(lambda: self._start(step).log_metrics(finite, step))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if (made := self.logger) is not None:
            self._guarded(made.save)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        status = {"done": "success", "failed": "failed", "interrupted": "KILLED"}[status_of(exit_code)]  # the last is MLflow's word
        if (made := self.logger) is not None:
            self._guarded(lambda: made.finalize(status))
        self._over = True

    def _start(self, step: int) -> Logger:
        if self.logger is None:
            self.logger = self.make(step)
            if step == 0:  # a resumed run has them already
                self.logger.log_hyperparams(scrub(schema.to_plain_tree(self.config)))
        return self.logger

    def _guarded(self, work: Callable[[], Any]) -> None:
        if self._over:
            return
        try:
            work()
        except Exception as error:  # of a package that is not ours, and of the services behind it
            self._over = True
            name = type(self.logger).__name__ if self.logger else "a tracker"
            logger.warning("%s failed (%s: %s); nothing more is logged there, see %s", name, type(error).__name__, error, self.run.path)


def tensorboard_tracker(config: Config, run: RunDirectory) -> Tracker:
    """Event files in `{run directory}/tensorboard`; a resumed run hides the steps that it does again."""

    def make(step: int) -> Logger:
        return TensorBoardLogger(run.path, name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1 if step else None)

    return ForeignTracker(config, run, make)


def mlflow_tracker(config: Config, run: RunDirectory) -> Tracker:
    """A run of the experiment `project_name`, at MLFLOW_TRACKING_URI, else in `mlflow.db` beside the run directories."""

    def make(step: int) -> Logger:
        made = MLFlowLogger(
            experiment_name=safe_name(config.rllm.trainer.project_name),
            run_name=run.path.name,
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.parent / 'mlflow.db'}",
            run_id=run.mlflow_run_id.read_text(encoding="utf-8") if run.mlflow_run_id.exists() else None,
        )
        atomic_write(run.mlflow_run_id, str(made.run_id))
        return made

    return ForeignTracker(config, run, make, rename=lambda key: key.replace("@", "_at_"))


def trackio_tracker(config: Config, run: RunDirectory) -> Tracker:
    """A run of the local Trackio project `project_name` (`trackio show`)."""
    return ForeignTracker(config, run, lambda step: TrackioLogger(config, run))


class TrackioLogger(Tracker):
    """Trackio as a Lightning logger."""

    def __init__(self, config: Config, run: RunDirectory):
        super().__init__(run)
        import trackio

        self.experiment = trackio.init(
            project=safe_name(config.rllm.trainer.project_name),
            name=run.path.name,
            group=config.rllm.algorithm.estimator_of(""),
            config=scrub(schema.to_plain_tree(config)),
            resume="allow",
            embed=False,
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        self.experiment.finish()
