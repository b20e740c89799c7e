"""A model and its tokenizer to a folder in Hugging Face format."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Weights (safetensors, under the names of the Hugging Face model), config and tokenizer. Adapters are merged into a copy of
    the weights; the model itself stays as it is."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    with _no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
