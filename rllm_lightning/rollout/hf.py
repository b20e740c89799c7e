"""`hf`: rollouts from the very model that is trained, in its own process, whatever Hugging Face causal LM it is.

    get_model_response ──> Conversations (messages to tokens) ──> Batch <── one decode task on the event loop, a step at a time
             ▲                                                      │
             └── ModelOutput <── finished request <── sample <── logits <── Decoder

Many workflows await answers on one event loop. While any request is open, a decode task runs one step after the other and
lets the loop breathe in between: rows that are finished or cancelled leave the batch, waiting requests join it, and every row
gets one token. A request's tokens depend on its prompt, its parameters and its own random stream alone, not on the batch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rllm_lightning.models.load import DTYPES
from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.batch import Batch, Request
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.rollout.conversations import Conversations, Span
from rllm_lightning.rollout.decoding import Decoder, PlainDecoder
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine, SamplingParams, current_request
from rllm_lightning.rollout.kept_states import KeptStates
from rllm_lightning.rollout.packed import PackedDecoder
from rllm_lightning.rollout.packed_attention import UnsupportedModel
from rllm_lightning.rollout.sampling import is_truncated
from rllm_lightning.rollout.weights import SamplingModel, exact_inference
from rllm_lightning.types import ModelOutput, TerminationEvent, TerminationReason

logger = logging.getLogger(__name__)


@register_rollout_engine("hf")
class HFEngine(RolloutEngine):
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

    def __init__(
        self, setup: EngineSetup, *, fast: bool = True, dtype: str | None = None, max_batch_size: int = 256, kept_state_mb: int = 1024
    ):
        super().__init__(setup)
        if setup.model is None or setup.tokenizer is None:
            raise ValueError("rollout engine hf: samples from the policy itself; it needs EngineSetup.model and EngineSetup.tokenizer")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"rollout_engine.dtype: must be null or one of {', '.join(DTYPES)}; got {dtype!r}")
        if max_batch_size < 1:
            raise ValueError(f"rollout_engine.max_batch_size: must be at least 1, got {max_batch_size}")
        if kept_state_mb < 0:
            raise ValueError(f"rollout_engine.kept_state_mb: must be at least 0, got {kept_state_mb}")
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._max_batch_size = max_batch_size
        self._fast = fast
        self._kept_bytes = kept_state_mb * 2**20
        self._chat = Chat(setup.tokenizer, setup.chat_template_kwargs)
        self._conversations = Conversations(self._chat)
        self._stop_ids = self._chat.stop_ids(getattr(setup.model, "generation_config", None))
        self._warned_of_truncation = False
        # made when first needed: by then the model is where it will be trained
        self._model: SamplingModel | None = None
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None

    async def get_model_response(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> ModelOutput:
        """See `RolloutEngine`.

        Raises:
            ValueError: prompt and `max_tokens` together exceed the model's positions.
            FloatingPointError: the model's logits are not numbers.
        """
        context = current_request()
        params = self.params_for(context, overrides)
        run = (context.seed, context.global_step, context.mode, context.task_id, context.rollout_idx)
        prompt = self._conversations.prompt(run, messages, tools)
        self._check(prompt.ids, params)
        request = Request(
            prompt=prompt.ids,
            params=params,
            uniforms=context.next_stream().random(params.max_tokens),
            done=asyncio.get_running_loop().create_future(),
            weight_version=self.weight_version,
        )
        self._submit(request)
        await request.done
        output = self._output(request)
        end = request.tokens[-1:] if output.finish_reason == "stop" else []
        self._conversations.remember(run, prompt, Span(f"{output.text}{self._chat.decode(end, special=True)}", request.tokens))
        return output

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

    # ------------------------------------------------------------------------------------------------------ one request

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse what cannot be answered as asked."""
        if not prompt:
            raise ValueError("rollout engine hf: the chat template made an empty prompt")
        if len(prompt) > self.setup.max_prompt_length:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        limit = self._sampling_model().max_positions
        if limit is not None and len(prompt) + params.max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and up to {params.max_tokens} sampled ones exceed the model's {limit} positions "
                "(max_position_embeddings); lower data.max_prompt_length or data.max_response_length"
            )
        if is_truncated(params) and not self._warned_of_truncation:
            self._warned_of_truncation = True
            logger.warning(
                "sampling with top_k=%s, top_p=%s: tokens are drawn from a cut-off distribution, which the trainer's log-probs "
                "(over all tokens) do not equal",
                params.top_k,
                params.top_p,
            )

    def _output(self, request: Request) -> ModelOutput:
        stopped = request.tokens[-1] in self._stop_ids
        text = self._chat.decode(request.tokens[:-1] if stopped else request.tokens)
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=request.prompt,
            completion_ids=request.tokens,
            logprobs=request.logprobs,
            prompt_length=len(request.prompt),
            completion_length=len(request.tokens),
            finish_reason="stop" if stopped else "length",
            weight_version=request.weight_version,
        )

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
        if self._batch is None:
            model = self._sampling_model()
            with exact_inference(model.device):
                self._batch = Batch(self._make_decoder(model), model.device, self._stop_ids, self._max_batch_size)
        return self._batch

    def _make_decoder(self, model: SamplingModel) -> Decoder:
        if self._fast:
            try:
                return PackedDecoder(model, KeptStates(self._kept_bytes))
            except UnsupportedModel as reason:
                logger.warning("rollouts of %s take the plain path, which is slower: %s", type(model.causal_lm).__name__, reason)
        return PlainDecoder(model)

    def _sampling_model(self) -> SamplingModel:
        if self._model is None:
            self._model = SamplingModel(self.setup.model, self._dtype)
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
