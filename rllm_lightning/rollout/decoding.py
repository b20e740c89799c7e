"""Where next-token logits come from: the interface of a decoder, and the plain one.

The engine holds the open requests as rows of a batch. It asks the decoder to `advance`, which appends one token to every row
and admits prompts as new rows, and to `drop` rows; the decoder answers with the logits of each row's next token and keeps
whatever state it needs for that. To add a decoder, write these methods and hand it to the engine.

Shapes: B rows of the batch, N rows of a cohort, L tokens of a row, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from rllm_lightning.rollout.weights import SamplingModel


class Decoder(Protocol):
    """Rows are numbered 0 to B-1. All calls are made under `torch.inference_mode`."""

    def advance(self, tokens: Sequence[int], prompts: Sequence[list[int]]) -> Tensor:
        """Append a token to every row, and a new row for each prompt; the logits_BV of all rows' next tokens."""

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; the old numbers of the rows that are left, in their new order."""

    def rest(self) -> None:
        """No rows are left, and no prompts wait: hold no more memory than is worth it."""

    def clear(self) -> None:
        """Remove all rows, and everything that was computed with the present weights."""

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call: `prefill_tokens`, prompt tokens that went through the model."""


@dataclass
class _Cohort:
    """Rows that were admitted together with prompts of one length, so that they need no padding ever."""

    rows: list[int]
    cache: Any


class PlainDecoder:
    """Any causal language model, through its own forward and Hugging Face's own cache, whatever its kind of layers.

    Prompts of equal length that come together are computed together. There is no padding and no mask, so nothing can be wrong
    about positions; the price is that every length has forward passes of its own. It is the measure of any faster decoder.
    """

    def __init__(self, model: SamplingModel):
        self._model, self._device = model, model.device
        parameters = inspect.signature(model.causal_lm.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed within transformers 5
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cohorts: list[_Cohort] = []
        self._prefill_tokens = 0

    def advance(self, tokens: Sequence[int], prompts: Sequence[list[int]]) -> Tensor:
        logits = [self._forward(cohort, [[tokens[row]] for row in cohort.rows]) for cohort in self._cohorts]
        for length in dict.fromkeys(map(len, prompts)):
            places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            cohort = _Cohort([len(tokens) + i for i in places], DynamicCache(config=self._model.causal_lm.config))
            logits.append(self._forward(cohort, [prompts[i] for i in places]))
            self._cohorts.append(cohort)
        self._prefill_tokens += sum(map(len, prompts))
        row_of_each = torch.tensor([row for cohort in self._cohorts for row in cohort.rows], device=self._device)
        return torch.cat(logits)[row_of_each.argsort()]

    def drop(self, rows: Sequence[int]) -> list[int]:
        gone = set(rows)
        left = sorted(row for cohort in self._cohorts for row in cohort.rows if row not in gone)
        new_number = {row: i for i, row in enumerate(left)}
        for cohort in self._cohorts:
            kept = [i for i, row in enumerate(cohort.rows) if row not in gone]
            if kept and len(kept) < len(cohort.rows):  # every kind of cache layer can be reordered, so also thinned out that way
                cohort.cache.reorder_cache(torch.tensor(kept, device=self._device))
            cohort.rows = [new_number[cohort.rows[i]] for i in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return left

    def rest(self) -> None:
        pass

    def clear(self) -> None:
        self._cohorts = []

    def pop_metrics(self) -> dict[str, float]:
        counts = {"prefill_tokens": float(self._prefill_tokens)}
        self._prefill_tokens = 0
        return counts

    def _forward(self, cohort: _Cohort, tokens: list[list[int]]) -> Tensor:
        ids_NL = torch.tensor(tokens, device=self._device)
        output = self._model.forward(input_ids=ids_NL, use_cache=True, **{self._cache_name: cohort.cache}, **self._last_only)
        return output.logits[:, -1]
