"""Checkpoint files: written whole or not at all, `step_{n}.ckpt` and `last.ckpt`, the oldest pruned."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from rllm_lightning.config import ConfigError

STEP_NAME = re.compile(r"step_(\d+)\.ckpt$")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, forces it to disk, and renames: a crash leaves the former file or the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.tmp")
        try:
            with open(scratch, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)


def publish_as_last(path: Path) -> None:
    """Make `last.ckpt` beside `path` the same file as it: a hard link, or a copy where the file system has none."""
    scratch = path.with_name(".last.ckpt.tmp")
    scratch.unlink(missing_ok=True)
    try:
        os.link(path, scratch)
    except OSError:
        shutil.copyfile(path, scratch)
    os.replace(scratch, path.with_name("last.ckpt"))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest step checkpoints (keep <= 0: none is deleted)."""
    steps = sorted((int(match.group(1)), path) for path in folder.glob("step_*.ckpt") if (match := STEP_NAME.search(path.name)))
    for _, path in steps[:-keep] if keep > 0 else []:
        path.unlink(missing_ok=True)


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that `rllm.trainer.resume` names: a file, or a run directory's `last.ckpt`.

    Raises:
        ConfigError: there is none.
    """
    path = Path(resume).expanduser()
    candidates = [path / "checkpoints" / "last.ckpt", path / "last.ckpt"] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    raise ConfigError(
        [f"rllm.trainer.resume: no checkpoint at {resume!r}; give a .ckpt file or a run directory with checkpoints/last.ckpt"]
    )


def run_directory_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, None where it lies elsewhere."""
    folder = checkpoint.parent.parent
    return folder if checkpoint.parent.name == "checkpoints" and (folder / "config.yaml").is_file() else None
