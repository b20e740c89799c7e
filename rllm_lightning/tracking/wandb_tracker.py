"""The tracker `wandb`: a Weights & Biases run around `wandb.init`.

Not Lightning's `WandbLogger`: that one defines no step metric on a run made elsewhere, leaves a run of a caught exception open and
ends it with exit code 0, and passes deprecated arguments. Here every row carries the global step as the metric `train/global_step`,
and everything is drawn against it; W&B's own `_step` only counts rows, so no row can be dropped for coming late.

Offline unless this machine is logged in or `wandb.mode` says otherwise. All files lie under the run directory, whatever becomes of
the server. How a run begins (mode, names, settings): `wandb_settings.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning import schema
from rllm_lightning.config import Config, ConfigError
from rllm_lightning.tracking.distributions import distributions
from rllm_lightning.tracking.episode_rows import COLUMNS, episode_rows
from rllm_lightning.tracking.metrics_table import as_numbers
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.secrets import scrub
from rllm_lightning.tracking.summary import earlier_courses
from rllm_lightning.tracking.sweep_values import check_swept_values
from rllm_lightning.tracking.tracker import Tracker
from rllm_lightning.tracking.wandb_settings import choose_mode, folders, is_disabled, run_arguments, settings
from rllm_lightning.types import Episode

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

STEP = "train/global_step"
PASS_RATE = re.compile(r"val/.+/pass@1")  # its best and its last value stand in the run's summary; of other metrics the last


class WandbTracker(Tracker):
    """One W&B run, made when it is first needed, on rank 0 alone.

    Raises:
        ConfigError: `wandb.mode=online` without a login, or a sweep that shows other values than the config holds.
    """

    def __init__(self, config: Config, run: RunDirectory):
        super().__init__(run)
        self.config = config
        self.mode = rank_zero_only(choose_mode, default="disabled")(config)
        if not is_disabled(config):
            check_swept_values(config)  # on every rank: none trains on alone
        self._wandb_run: wandb.Run | None = None
        self._is_ours = True
        self._closed = False
        self._known: set[str] = set()
        self._best_before: dict[str, float] = {}  # best pass rates, where a resumed run has some
        self._takes_files = True  # until the server fails at one

    @property
    @rank_zero_experiment
    def experiment(self) -> wandb.Run | None:
        """The W&B run; None when disabled or closed."""
        if self._wandb_run is None and self.mode != "disabled" and not self._closed:
            self._wandb_run = self._start()
        return self._wandb_run

    @rank_zero_only
    def begin(self, step: int, total_steps: int | None = None) -> None:
        if (run := self.experiment) is None:
            return
        if step > 0:
            courses = earlier_courses(self.run, step).items()
            self._best_before = {key: course.best for key, course in courses if PASS_RATE.fullmatch(key) and course.best is not None}
        if self.tables:
            import wandb

            with self._staging():
                tables = {name: wandb.Table(columns=[*table.columns], data=table.rows) for name, table in self.tables.items()}
                run.log({**tables, STEP: step})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert step is not None, "metrics are logged with their step"
        if (run := self.experiment) is None:
            return
        # not-a-number would end a sweep's optimiser: leave it out
        finite = {key: value for key, value in as_numbers(metrics).items() if math.isfinite(value)}
        for key in finite.keys() - self._known:
            if PASS_RATE.fullmatch(key):
                run.define_metric(key, step_metric=STEP, summary="max,last")
        self._known |= finite.keys()
        run.log({**finite, STEP: step})
        for key in finite.keys() & self._best_before.keys():  # W&B knows only the maximum since the resume
            self._best_before[key] = max(self._best_before[key], finite[key])
            run.summary.update({key: {"max": self._best_before[key], "last": finite[key]}})

    @rank_zero_only
    def log_episodes(self, episodes: Sequence[Episode], step: int) -> None:
        if (run := self.experiment) is None or not self._takes_files:
            return
        import wandb

        with self._staging():
            table = wandb.Table(columns=[*COLUMNS], data=episode_rows(episodes))
            histograms = {name: wandb.Histogram(values) for name, values in distributions(episodes).items()}
            run.log({"episodes": table, **histograms, STEP: step})

    @rank_zero_only
    def log_model(self, folder: Path) -> None:
        if not self.config.wandb.log_model or (run := self.experiment) is None or not self._takes_files:
            return
        import wandb

        with self._staging():
            artifact = wandb.Artifact(f"model-{self.run.id}", type="model")
            artifact.add_dir(str(folder))
            run.log_artifact(artifact)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        run, self._wandb_run, self._closed = self._wandb_run, None, True
        if run is None or not self._is_ours:
            return
        import wandb

        with folders(self.run):
            run.finish(exit_code)
            wandb.teardown(exit_code)  # only when the service has ended is the file complete
        if not run.offline and _upload_failed(run):
            folder = Path(run.settings.sync_dir)
            logger.warning(
                "W&B did not get all of this run; it is complete in %s, upload it with `wandb sync --include-online %s`", folder, folder
            )

    @contextlib.contextmanager
    def _staging(self) -> Iterator[None]:
        """Around what becomes an artifact: W&B asks the server first, and raises where that is gone. Training goes on without."""
        import wandb

        with folders(self.run):
            try:
                yield
            except wandb.errors.CommError as error:
                self._takes_files = False
                logger.warning("W&B run: no more tables and files, the server does not answer: %s", " ".join(str(error).split()))

    def _start(self) -> wandb.Run:
        import wandb

        content = scrub(schema.to_plain_tree(self.config))
        if wandb.run is not None:  # the user's own, as in a function that an in-process agent calls: use it, and leave it open
            self._is_ours, run = False, wandb.run
            run.config.update(content, allow_val_change=True)
        else:
            with folders(self.run):
                run = self._init(content)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _init(self, content: dict[str, Any]) -> wandb.Run:
        import wandb

        arguments = run_arguments(self.config, self.run) | {"config": content, "dir": str(self.run.path)}
        if self.mode == "online" and self._has_unsynced_part():
            self._warn_offline("its beginning was recorded offline and is not uploaded yet")
        elif self.mode == "online":
            try:
                return wandb.init(mode="online", settings=wandb.Settings(**settings()), **arguments)
            except (wandb.errors.CommError, wandb.errors.UsageError) as error:
                if isinstance(error, wandb.errors.UsageError) and self.config.wandb.resume in ("must", "never"):
                    raise ConfigError([f"wandb.resume: {self.config.wandb.resume} was refused: {error}"]) from error
                self._warn_offline(str(error))
                wandb.teardown()
        return wandb.init(mode="offline", settings=wandb.Settings(silent=True, **settings()), **arguments)

    def _has_unsynced_part(self) -> bool:
        files = self.run.wandb.glob("offline-run-*/run-*.wandb")
        return any(not file.with_suffix(".wandb.synced").exists() for file in files)

    def _warn_offline(self, reason: str) -> None:
        folder = self.run.wandb
        logger.warning(
            "W&B run: %s; it is recorded offline in %s, upload it with `wandb sync %s`", " ".join(reason.split()), folder, folder
        )


def _upload_failed(run: wandb.Run) -> bool:
    """W&B tells the outcome of an upload to its log alone."""
    log = Path(run.settings.log_internal)
    return log.exists() and "filestream: fatal error" in log.read_text(encoding="utf-8", errors="replace")
