"""Sampling in this process: a model, the decoder that suits it, and the batch of open requests, on one event loop.

While any request is open, a decode task runs one step of the batch after the other and lets the loop breathe in between.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import torch

from rllm_lightning.rollout.batch import Batch, Request
from rllm_lightning.rollout.decoding import Decoder, PlainDecoder
from rllm_lightning.rollout.engine import SamplingParams
from rllm_lightning.rollout.kept_states import KeptStates
from rllm_lightning.rollout.packed import PackedDecoder
from rllm_lightning.rollout.packed_attention import UnsupportedModel
from rllm_lightning.rollout.tokens import Sample
from rllm_lightning.rollout.weights import SamplingModel, exact_inference

logger = logging.getLogger(__name__)


class LocalSampler:
    """Answers requests from `model`; the keys are those of the engine `hf`.

    Args:
        model: the trainer's, on the device where it will stay.
        stop_ids: tokens that end a response; they belong to it.
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], *, fast: bool, dtype: str | None, max_batch_size: int, kept_state_mb: int):
        self.model = SamplingModel(model, None if dtype is None else getattr(torch, dtype))
        with exact_inference(self.model.device):
            decoder = _decoder_for(self.model, KeptStates(kept_state_mb * 2**20), fast)
        self.batch = Batch(decoder, self.model.device, stop_ids, max_batch_size)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_stranded(self) -> bool:
        """Whether requests are open on an event loop that is not the running one (and has ended without finishing them)."""
        return self._task is not None and not self._task.done() and self._task.get_loop() is not asyncio.get_running_loop()

    async def answer(self, prompt: list[int], params: SamplingParams, uniforms: np.ndarray) -> Sample:
        """Tokens and log-probs, by one of the uniform numbers a token.

        Raises:
            FloatingPointError: the model's logits are not numbers.
        """
        loop = asyncio.get_running_loop()
        request = Request(prompt, params, uniforms, done=loop.create_future())
        self.batch.add(request)
        if self._task is None or self._task.done():
            self._task = loop.create_task(_decode(self.batch), name="hf rollout")
        await request.done
        return Sample(request.tokens, request.logprobs)

    def refresh(self) -> None:
        """Take over the trainer's present weights, and forget all that was computed with the old ones."""
        assert not self.batch.num_open, f"weights updated while {self.batch.num_open} requests are being answered"
        self.model.refresh()
        self.batch.forget()

    async def shutdown(self) -> None:
        """End the decode task; who still waits is cancelled."""
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.batch.close()


def _decoder_for(model: SamplingModel, kept: KeptStates, fast: bool) -> Decoder:
    if fast:
        try:
            return PackedDecoder(model, kept)
        except UnsupportedModel as reason:
            logger.warning("rollouts of %s take the plain path, which is slower: %s", type(model.causal_lm).__name__, reason)
    return PlainDecoder(model)


async def _decode(batch: Batch) -> None:
    """Steps until nothing is open. What goes wrong reaches everyone who waits."""
    try:
        await asyncio.sleep(0)  # so that all who are about to ask are in the first step
        while batch.has_work:
            batch.step()
            await asyncio.sleep(0)
    except BaseException as error:
        told = batch.num_open > 0
        batch.close(error)
        if not told or not isinstance(error, Exception):
            raise
