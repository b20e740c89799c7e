"""Adapters in checkpoints and model folders: what is trained is kept, what is frozen comes from `model.name` again.

A state dict of a policy with adapters holds no frozen weight, and loading one asks for none, whatever strategy writes and reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

ADAPTER_FOLDER = "adapter"  # within a model folder


def has_adapter(model: Any) -> bool:
    return hasattr(model, "disable_adapter")


def leave_out_frozen_weights(policy: nn.Module) -> None:
    """Let the state dicts of `policy` hold none of the weights that are frozen now."""
    frozen = {name for name, p in policy.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    def forgive(module: nn.Module, incompatible: Any) -> None:
        missing = [name for name in incompatible.missing_keys if not name.endswith(tuple(frozen))]
        incompatible.missing_keys[:] = missing

    policy.register_state_dict_post_hook(drop)
    policy.register_load_state_dict_post_hook(forgive)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter alone, in the format of the package peft, to a folder within `folder`."""
    model.save_pretrained(folder / ADAPTER_FOLDER, save_embedding_layers=False)  # else the hub is asked about the base model
