"""The policy of a checkpoint, as the run that wrote it had it: `load_checkpoint(path, config)`.

Checkpoints are read as plain data (`weights_only`): opening one runs nothing. A value head is left out, and its loss with it, so that what
is compared is the gradient of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllm_lightning.config import Config
from rllm_lightning.trainer.checkpoints import CHECKPOINT_KEY, read_checkpoint
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.resume import is_complete

PREFIX = "policy."


@dataclass(frozen=True)
class Checkpoint:
    """`step` batches were trained on, in `weight_version` updated batches."""

    path: Path
    policy: Policy
    step: int
    weight_version: int


def read_given(path: Path) -> dict[str, Any]:
    """The content of the checkpoint file that `--checkpoint` names.

    Raises:
        ValueError: there is no such file, or it is none of our checkpoints.
    """
    if path.is_dir():
        raise ValueError(f"--checkpoint: {path} is a folder; give a .ckpt file")
    if not path.is_file():
        raise ValueError(f"--checkpoint: there is no file {path}")
    if not is_complete(path):
        raise ValueError(f"--checkpoint: {path} is no whole checkpoint")
    try:
        return read_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"--checkpoint: {error}") from error


def load_checkpoint(path: Path, content: dict[str, Any], config: Config) -> Checkpoint:
    """The policy of a checkpoint's `content`, on a GPU where there is one; also its reference policy, where the loss needs one.

    Raises:
        ValueError: the weights are not those of the run's model.
    """
    policy = Policy.from_config(config)
    weights = {key.removeprefix(PREFIX): value for key, value in content["state_dict"].items() if key.startswith(PREFIX)}
    try:
        policy.load_state_dict({key: value for key, value in weights.items() if not key.startswith("value_head.")})
    except RuntimeError as error:
        raise ValueError(
            f"--checkpoint: {path} holds another model than {config.model.name} ({' '.join(str(error).split())[:200]})"
        ) from error
    saved = content[CHECKPOINT_KEY]
    if config.rllm.algorithm.kl_beta > 0 and saved["reference"] is not None:
        policy.load_reference(saved["reference"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Checkpoint(path, policy.to(device), saved["global_step"], saved["weight_version"])
