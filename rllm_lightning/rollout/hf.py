"""`hf`: rollouts from the very model that is trained, in its own process, whatever Hugging Face causal LM it is.

    TokenEngine ──> sample: an open request ──> Batch <── one decode task on the event loop, a step at a time
         ▲                                        │
         └── finished request <── drawn tokens <── logits <── Decoder

Many workflows await answers on one event loop. While any request is open, a decode task runs one step after the other and
lets the loop breathe in between: rows that are finished or cancelled leave the batch, waiting requests join it, and every row
gets one token. A request's tokens depend on its prompt, its parameters and its own random stream alone, not on the batch.

torch is imported with the first request, so that a configuration is checked against the engine's keys in a moment.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import numpy as np

from rllm_lightning.config_sections import DTYPES
from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.tokens import Sample, TokenEngine

if TYPE_CHECKING:
    from rllm_lightning.rollout.batch import Batch, Request
    from rllm_lightning.rollout.decoding import Decoder
    from rllm_lightning.rollout.weights import SamplingModel

logger = logging.getLogger(__name__)


@register_rollout_engine("hf")
class HFEngine(TokenEngine):
    """Samples from `setup.model` with `setup.tokenizer`.

    Log-probs are those of the distribution the tokens were drawn from: softmax(logits / temperature), at top-k or top-p other
    than neutral the renormalised rest (which the trainer's own log-probs then cannot equal; warned of once). Of the
    checkpoint's generation config only the EOS ids count.

    Args:
        fast: decode with packed tokens and shared prompts where the model allows it (else, after one warning, and with false, any
            model by its own forward and cache).
        dtype: precision to sample in: None with the trainer's own weights, else a copy of them in `float32`, `bfloat16` or
            `float16`, made up to date at every weight update.
        max_batch_size: requests decoded at once; more wait.
        kept_state_mb: memory for the states of answered requests, from which later turns go on; 0 computes every turn in full.

    Raises:
        ValueError: no model, no chat template, or a key out of range.
    """

    repeatable = True

    def __init__(
        self, setup: EngineSetup, *, fast: bool = True, dtype: str | None = None, max_batch_size: int = 256, kept_state_mb: int = 1024
    ):
        super().__init__(setup, "hf")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"rollout_engine.dtype: must be null or one of {', '.join(DTYPES)}; got {dtype!r}")
        if max_batch_size < 1:
            raise ValueError(f"rollout_engine.max_batch_size: must be at least 1, got {max_batch_size}")
        if kept_state_mb < 0:
            raise ValueError(f"rollout_engine.kept_state_mb: must be at least 0, got {kept_state_mb}")
        self._dtype = dtype
        self._max_batch_size = max_batch_size
        self._fast = fast
        self._kept_bytes = kept_state_mb * 2**20
        # made when first needed: by then the model is where it will be trained
        self._model: SamplingModel | None = None
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None

    async def sample(self, prompt: list[int], params: SamplingParams, stream: np.random.Generator) -> Sample:
        """See `TokenEngine`.

        Raises:
            FloatingPointError: the model's logits are not numbers.
        """
        from rllm_lightning.rollout.batch import Request

        request = Request(
            prompt=prompt,
            params=params,
            uniforms=stream.random(params.max_tokens),
            done=asyncio.get_running_loop().create_future(),
        )
        self._submit(request)
        await request.done
        return Sample(request.tokens, request.logprobs)

    def on_weights_updated(self, weight_version: int) -> None:
        """Takes over the new weights and forgets all that was computed with the old ones. To be called whenever weights change
        after the first request: after an update, and after loading a checkpoint."""
        super().on_weights_updated(weight_version)
        if self._model is not None:
            self._model.refresh()
        if self._batch is not None:
            assert not self._batch.num_open, f"weights updated while {self._batch.num_open} requests are being answered"
            self._batch.forget()

    async def shutdown(self) -> None:
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._batch is not None:
            self._batch.close()
        self._model = self._batch = None

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call: `rollout/requests`, `rollout/tokens` sampled, `rollout/prompt_tokens` asked about,
        `rollout/prefill_tokens` of them that went through the model, and `rollout/steps` of the batch. Nothing before the first
        request."""
        counts = {} if self._batch is None else self._batch.pop_metrics()
        return {f"rollout/{name}": count for name, count in counts.items()}

    # ------------------------------------------------------------------------------------------------------- the decode task

    def _submit(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        if self._task is not None and not self._task.done() and self._task.get_loop() is not loop:
            self._the_batch().close()  # its event loop ended without finishing it
            self._model = self._batch = self._task = None
        batch = self._the_batch()
        batch.add(request)
        if self._task is None or self._task.done():
            self._task = loop.create_task(_decode(batch), name="hf rollout")

    def _the_batch(self) -> Batch:
        from rllm_lightning.rollout.batch import Batch
        from rllm_lightning.rollout.weights import exact_inference

        if self._batch is None:
            model = self._sampling_model()
            with exact_inference(model.device):
                self._batch = Batch(self._make_decoder(model), model.device, self._stop_ids, self._max_batch_size)
        return self._batch

    def _make_decoder(self, model: SamplingModel) -> Decoder:
        from rllm_lightning.rollout.decoding import PlainDecoder
        from rllm_lightning.rollout.kept_states import KeptStates
        from rllm_lightning.rollout.packed import PackedDecoder
        from rllm_lightning.rollout.packed_attention import UnsupportedModel

        if self._fast:
            try:
                return PackedDecoder(model, KeptStates(self._kept_bytes))
            except UnsupportedModel as reason:
                logger.warning("rollouts of %s take the plain path, which is slower: %s", type(model.causal_lm).__name__, reason)
        return PlainDecoder(model)

    def _sampling_model(self) -> SamplingModel:
        import torch

        from rllm_lightning.rollout.weights import SamplingModel

        if self._model is None:
            self._model = SamplingModel(self.setup.model, None if self._dtype is None else getattr(torch, self._dtype))
        return self._model


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
