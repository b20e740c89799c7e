"""The model that rollouts are sampled from: a module tree of its own, over the trainer's parameters or over a copy of them.

A tree of its own stays in eval mode, keeps its own attention implementation, and takes part in nothing that the trainer does
to its modules (train mode, adapters switched off for a reference pass, a compiled forward); so there is nothing to restore
after sampling.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rllm_lightning.rollout.prepack import can_prepack, prepack, unpack


class SamplingModel:
    """`model` as rollouts see it.

    Args:
        model: the trainer's model.
        dtype: None, or the dtype they have, shares the trainer's parameters, which are then always up to date; another keeps a
            copy of them, made up to date by `refresh`. Buffers (rotary frequencies) keep their precision.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        parameters = list(model.parameters())
        shared = dtype is None or all(p.dtype == dtype for p in parameters)
        self._sources: list[Tensor] = [] if shared else [p.detach() for p in parameters]
        self._copies = [torch.empty_like(p, dtype=dtype) for p in self._sources]
        own = parameters if shared else [nn.Parameter(p, requires_grad=False) for p in self._copies]
        memo: dict[int, Any] = {id(theirs): ours for theirs, ours in zip(parameters, own, strict=True)}
        self.module: Any = copy.deepcopy(model, memo).eval()
        self.can_prepack = dtype is not None and not shared and can_prepack(dtype, self.device)
        self.version = 0  # of the weights
        self._prepacked_version = -1  # of those that the module itself computes with
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trainer's present weights."""
        for own, theirs in zip(self._copies, self._sources, strict=True):
            own.copy_(theirs)
        self.version += 1

    def forward(self, **inputs: Any) -> Any:
        """The causal LM's own forward."""
        if self.can_prepack and self._prepacked_version != self.version:
            prepack(self.module)
            self._prepacked_version = self.version
        return self.causal_lm(**inputs)

    def drop_prepacked(self) -> None:
        """Free what `forward` keeps: until its next call, nobody computes by it."""
        unpack(self.module)
        self._prepacked_version = -1

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model, beneath adapters."""
        return self.module.get_base_model() if hasattr(self.module, "get_base_model") else self.module

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


@contextlib.contextmanager
def exact_inference(device: torch.device) -> Iterator[None]:
    """No gradients, and the weights' own precision whatever autocast the trainer runs under (both are settings of a thread)."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield
