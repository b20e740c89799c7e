"""Checkpoint files, written whole or not at all: `step_{n}.ckpt`, the oldest pruned, `last.ckpt` and `best.ckpt`.

    save_checkpoint -> step_{n}.ckpt -> publish as last.ckpt (and best.ckpt) -> prune

A checkpoint is on the disk, under its name, before an older one goes: at every moment a whole one is there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

CHECKPOINT_KEY = "rllm_lightning"  # of what is ours in a checkpoint
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
            _sync_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):  # a disk that has become read-only: the first error is the one to report
                scratch.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint file, its tensors mapped from the disk until they are used. Reading runs nothing.

    Raises:
        ValueError: it holds more than plain data and tensors, or is none of this library's checkpoints.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a pickle can be made so that its reader raises anything
        raise ValueError(f"{path} cannot be read as plain data ({_why_not_plain(error)})") from error
    if not isinstance(content, dict) or not isinstance(content.get(CHECKPOINT_KEY), dict):
        raise ValueError(f"{path} is not one of this library's checkpoints")
    return content


def _why_not_plain(error: Exception) -> str:
    """PyTorch's own message goes on with how to run what is in the file."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"(?:GLOBAL|function) ['\"]?([\w.]+)", str(error))
        return f"it asks for {named[1]}, which could run code" if named else "it holds objects, which could run code"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def publish(path: Path, name: str) -> None:
    """Make the file `name` beside `path` the same as it: a hard link, or a copy where the file system has none."""
    scratch = path.with_name(f".{name}.tmp")
    scratch.unlink(missing_ok=True)
    try:
        os.link(path, scratch)
    except OSError:
        shutil.copyfile(path, scratch)
    os.replace(scratch, path.with_name(name))
    scratch.unlink(missing_ok=True)  # between two names of one file a rename does nothing
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Names too are on the disk now: a power failure leaves those from before or those from after."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all but the `keep` newest step checkpoints up to `step` (keep <= 0: none is deleted). Later ones go too: they are of a
    course that was given up when the run resumed from before them."""
    steps = sorted((int(match.group(1)), path) for path in folder.glob("step_*.ckpt") if (match := STEP_NAME.search(path.name)))
    abandoned = [path for number, path in steps if number > step]
    own = [path for number, path in steps if number <= step]
    for path in abandoned + (own[:-keep] if keep > 0 else []):
        path.unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """Of the process-wide generators, which the library does not use but a user's code may, as plain containers."""
    kind, keys, *position = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": (kind, np.asarray(keys).tolist(), *position), "torch": torch.get_rng_state()}


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo `random_state`."""
    random.setstate(state["python"])
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(state["torch"])
