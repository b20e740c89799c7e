"""What a run goes on from: `rllm.trainer.resume`, as `never` (null), `auto`, a run directory or a checkpoint file.

A run may go on longer, elsewhere, with other processes or other trackers (`FREE`); everything else is as it was, or it is refused:
the rows of one `metrics.csv` are those of one configuration.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import torch

from rllm_lightning import schema
from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.tracking.run_directory import RunDirectory, root_of, safe_name
from rllm_lightning.tracking.secrets import scrub
from rllm_lightning.trainer.checkpoints import STEP_NAME, read_checkpoint
from rllm_lightning.values import as_path

logger = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"
FREE = (
    "lightning.accelerator",
    "lightning.devices",
    "lightning.num_nodes",
    "lightning.strategy",
    "rllm.episode_logging",
    "rllm.trainer.keep_checkpoints",
    "rllm.trainer.logger",
    "rllm.trainer.resume",
    "rllm.trainer.save_freq",
    "rllm.trainer.test_freq",
    "rllm.trainer.total_batches",
    "rllm.trainer.total_epochs",
    "rllm.workflow.n_parallel_tasks",
    "training.micro_batch_tokens",  # how a sum is split: to be lowered after running out of memory
    "run_root",
    "wandb",
)


def checkpoint_to_resume(config: Config) -> Path | None:
    """The checkpoint that a run of `config` goes on from; None: it starts anew.

    `auto` takes the newest run of the same project, experiment name and config that has a checkpoint.

    Raises:
        ConfigError: there is no checkpoint where `resume` points to, it holds more than plain data, or the run there has another
            config; it names the keys.
    """
    found = _find(config)
    if found is not None:
        try:
            read_checkpoint(found)
        except ValueError as error:
            raise ConfigError([f"rllm.trainer.resume: {error}"]) from error
    return found


def _find(config: Config) -> Path | None:
    resume = config.rllm.trainer.resume
    if resume is None or resume == NEVER:
        return None
    if resume == AUTO:
        return next((found for run in _runs_like(config) if (found := newest_checkpoint(run.checkpoints))), None)
    try:
        path = as_path(resume).absolute()
    except ValueError as error:
        raise ConfigError([f"rllm.trainer.resume: {error}"]) from error
    if path.is_dir():
        folder = path if (path / "last.ckpt").exists() else path / "checkpoints"
        found = newest_checkpoint(folder)
    else:
        found = path if is_complete(path) else None
    if found is None:
        what = "is no whole checkpoint" if path.is_file() else "does not exist"
        if path.is_dir():
            what = "has no whole checkpoint" if (path / "config.yaml").is_file() or folder.is_dir() else "is a folder, but no run directory"
        raise ConfigError([f"rllm.trainer.resume: {resume!r} {what}; give a .ckpt file or a run directory with checkpoints/last.ckpt"])
    if (run := run_directory_of(found)) is not None and (problems := _differences(config, run)):
        raise ConfigError([f"{problem} ({run.path}); leave it as it was, or start a run of its own" for problem in problems])
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """`last.ckpt`, or where that is damaged the newest whole one of the others."""
    steps = {int(match.group(1)): path for path in folder.glob("step_*.ckpt") if (match := STEP_NAME.search(path.name))}
    for path in [folder / "last.ckpt", *(steps[step] for step in sorted(steps, reverse=True))]:
        if is_complete(path):
            return path
        if path.exists():
            logger.warning("%s is damaged; an earlier checkpoint is looked for", path)
    return None


def is_complete(path: Path) -> bool:
    """Whether every byte that was written to a checkpoint is there: PyTorch's files are zip archives, which carry checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_sound = archive.testzip() is None
        torch._C.PyTorchFileReader(str(path))  # what PyTorch makes of the index: it refuses some that `zipfile` puts up with
        return is_sound
    except Exception:  # a damaged index makes `zipfile` raise whatever it comes across: an unknown compression, a password, ...
        return False


def run_directory_of(checkpoint: Path) -> RunDirectory | None:
    """The run directory that a checkpoint lies in, None where it lies elsewhere."""
    folder = checkpoint.parent.parent
    return RunDirectory(folder) if checkpoint.parent.name == "checkpoints" and (folder / "config.yaml").is_file() else None


def without_resume(config: Config) -> Config:
    """The config as a run directory keeps it: whoever loads it repeats the run from its beginning."""
    tree = schema.to_plain_tree(config)
    tree["rllm"]["trainer"]["resume"] = None
    return Config.from_config(tree)


def is_finished(checkpoint: Path, total_steps: int) -> bool:
    """Whether this is the last checkpoint of a run that has come to its end, and that end is where it is to be now."""
    run = run_directory_of(checkpoint)
    if run is None or checkpoint.name != "last.ckpt" or not run.summary_json.is_file():
        return False
    summary = json.loads(run.summary_json.read_text(encoding="utf-8"))
    return summary["status"] == "done" and summary["steps"] >= total_steps


def plain(config: Config) -> dict[str, Any]:
    """The config as it is compared: without secrets, which no file holds."""
    return scrub(schema.to_plain_tree(config))


def forbidden_changes(former: dict[str, Any], config: Config) -> list[str]:
    """What differs from a former config (`plain`) and may not: the key with both values."""
    return [
        f"{key}: is {schema.show(now)}, but was {schema.show(then)} in the run that is resumed"
        for key, (then, now) in schema.differences(former, plain(config)).items()
        if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]


def _differences(config: Config, run: RunDirectory) -> list[str]:
    return forbidden_changes(plain(Config.from_config(load_config([], default=str(run.config_yaml)))), config)


def _runs_like(config: Config) -> list[RunDirectory]:
    """The runs with this config, the newest first."""
    trainer = config.rllm.trainer
    project = root_of(config) / safe_name(trainer.project_name)
    runs = [RunDirectory(path.parent) for path in project.glob("*/config.yaml")]
    named = [run for run in runs if run.path.name == f"{safe_name(trainer.experiment_name)}-{run.id}"]
    return [run for run in sorted(named, key=lambda run: run.id, reverse=True) if _is_like(config, run)]


def _is_like(config: Config, run: RunDirectory) -> bool:
    try:
        return not _differences(config, run)
    except ConfigError:  # of another version of this library, or with plugins that are not here
        return False
