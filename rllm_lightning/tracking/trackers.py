"""The trackers, by name, and `make_trackers(config, run)`, which makes those that `rllm.trainer.logger` lists.

A tracker is registered as a factory `(config, run) -> lightning.pytorch.loggers.Logger`. Each is imported when it is made, so that
a config is checked without importing Lightning. To add one: write a `Logger` (`tracker.Tracker` helps) and, in a module named in
`plugins`, a factory under `@register_tracker("x")`; choose it with `rllm.trainer.logger=[x]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm_lightning.config import Config
from rllm_lightning.registry import TRACKERS, register_tracker
from rllm_lightning.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


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


def make_trackers(config: Config, run: RunDirectory) -> list[Logger]:
    """The loggers that `rllm.trainer.logger` lists, each once, in its order."""
    return [TRACKERS.get(name)(config, run) for name in dict.fromkeys(config.rllm.trainer.logger)]
