"""The trackers, by name, and `make_trackers(config, run)`, which makes those that `rllm.trainer.logger` lists.

A tracker is registered as a factory `(config, run) -> lightning.pytorch.loggers.Logger`. Each is imported when it is made, so that
a config is checked without importing Lightning. To add one: write a `Logger` (`tracker.Tracker` helps) and, in a module named in
`plugins`, a factory under `@register_tracker("x")`; choose it with `rllm.trainer.logger=[x]`. One of Lightning's own loggers
becomes a tracker by `foreign_trackers.ForeignTracker`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rllm_lightning.config import Config, ConfigError
from rllm_lightning.registry import TRACKERS, register_tracker
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.table import Table

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

EXTRAS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio"}  # tracker -> the package, and extra, it needs


@register_tracker("console")
def console(config: Config, run: RunDirectory) -> Logger:
    """A live line while training, a table at the end."""
    from rllm_lightning.tracking.console_tracker import ConsoleTracker

    return ConsoleTracker(run)


@register_tracker("csv")
def csv(config: Config, run: RunDirectory) -> Logger:
    """`metrics.csv` in the run directory."""
    from rllm_lightning.tracking.csv_tracker import CSVTracker

    return CSVTracker(run)


@register_tracker("wandb")
def wandb(config: Config, run: RunDirectory) -> Logger:
    """A Weights & Biases run, offline unless logged in."""
    from rllm_lightning.tracking.wandb_tracker import WandbTracker

    return WandbTracker(config, run)


@register_tracker("tensorboard")
def tensorboard(config: Config, run: RunDirectory) -> Logger:
    """TensorBoard event files in the run directory (extra `tensorboard`)."""
    from rllm_lightning.tracking.foreign_trackers import tensorboard_tracker

    return tensorboard_tracker(config, run)


@register_tracker("mlflow")
def mlflow(config: Config, run: RunDirectory) -> Logger:
    """A run in MLflow, at MLFLOW_TRACKING_URI or beside the run directories (extra `mlflow`)."""
    from rllm_lightning.tracking.foreign_trackers import mlflow_tracker

    return mlflow_tracker(config, run)


@register_tracker("trackio")
def trackio(config: Config, run: RunDirectory) -> Logger:
    """A local run in Hugging Face's Trackio (extra `trackio`)."""
    from rllm_lightning.tracking.foreign_trackers import trackio_tracker

    return trackio_tracker(config, run)


def check_trackers(config: Config) -> None:
    """Whether the trackers that `rllm.trainer.logger` lists can be made. Does not import Lightning.

    Raises:
        ConfigError: a package is missing, W&B is to be online without a login, or a sweep shows other values than the config holds.
    """
    problems = _missing_packages(config)
    if "wandb" in config.rllm.trainer.logger:
        from rllm_lightning.tracking.sweep_values import check_swept_values
        from rllm_lightning.tracking.wandb_settings import choose_mode, is_disabled

        is_first_process = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"  # the others need no login
        try:
            if not is_disabled(config):
                check_swept_values(config)
                if is_first_process:
                    choose_mode(config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _missing_packages(config: Config) -> list[str]:
    return [
        f"rllm.trainer.logger: {name} needs a package that is not installed; pip install 'rllm-lightning[{EXTRAS[name]}]'"
        for name in dict.fromkeys(config.rllm.trainer.logger)
        if name in EXTRAS and importlib.util.find_spec(EXTRAS[name]) is None
    ]


def make_trackers(config: Config, run: RunDirectory, tables: Mapping[str, Table] | None = None) -> list[Logger]:
    """The loggers that `rllm.trainer.logger` lists, each once, in its order.

    Args:
        config: the typed config.
        run: where they may write.
        tables: of the whole run, by name; those that can show them do.

    Raises:
        ConfigError: one cannot be made; see `check_trackers`.
    """
    from rllm_lightning.tracking.tracker import Tracker

    if problems := _missing_packages(config):
        raise ConfigError(problems)
    trackers = [TRACKERS.get(name)(config, run) for name in dict.fromkeys(config.rllm.trainer.logger)]
    for tracker in trackers:
        if isinstance(tracker, Tracker):
            tracker.tables = tables or {}
    return trackers
