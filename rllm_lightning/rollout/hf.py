"""`hf`: rollouts from the very model that is trained, in its own process, whatever Hugging Face causal LM it is.

    TokenEngine ──> sample ──> LocalSampler: an open request ──> Batch <── one decode task on the event loop, a step at a time
         ▲                                                         │
         └──────── finished request <── drawn tokens <── logits <── Decoder

Many workflows await answers on one event loop. Rows that are finished or cancelled leave the batch, waiting requests join it, and
every row gets one token a step. A request's tokens depend on its prompt, its parameters and its own random stream alone, not on the
batch.

torch is imported with the first request, so that a configuration is checked against the engine's keys in a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rllm_lightning.config_sections import DTYPES
from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.tokens import Sample, TokenEngine

if TYPE_CHECKING:
    from rllm_lightning.rollout.local_sampler import LocalSampler


@register_rollout_engine("hf")
class HFEngine(TokenEngine):
    """Samples from `setup.model` with `setup.tokenizer`.

    Log-probs are those of the distribution the tokens were drawn from: softmax(logits / temperature), at top-k or top-p other
    than neutral the renormalised rest (which the trainer's own log-probs then cannot equal; warned of once). Of the
    checkpoint's generation config only the EOS ids count.

    Args:
        fast: decode with packed tokens and shared prompts where the model allows it, those like Llama on a CPU by layers of ours (else,
            after one warning, and with false, any model by its own forward and cache).
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
        self._keys: dict[str, Any] = {"fast": fast, "dtype": dtype, "max_batch_size": max_batch_size, "kept_state_mb": kept_state_mb}
        self._sampler: LocalSampler | None = None

    async def sample(self, prompt: list[int], params: SamplingParams, stream: np.random.Generator) -> Sample:
        """See `TokenEngine`.

        Raises:
            FloatingPointError: the model's logits are not numbers.
        """
        return await self._the_sampler().answer(prompt, params, stream.random(params.max_tokens))

    def on_weights_updated(self, weight_version: int) -> None:
        """Takes over the new weights and forgets all that was computed with the old ones. To be called whenever weights change
        after the first request: after an update, and after loading a checkpoint."""
        super().on_weights_updated(weight_version)
        if self._sampler is not None:
            self._sampler.refresh()

    async def shutdown(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            await sampler.shutdown()

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call: `rollout/requests`, `rollout/tokens` sampled, `rollout/prompt_tokens` asked about,
        `rollout/prefill_tokens` of them that went through the model, and `rollout/steps` of the batch. Nothing before the first
        request."""
        counts = {} if self._sampler is None else self._sampler.batch.pop_metrics()
        return {f"rollout/{name}": count for name, count in counts.items()}

    def _the_sampler(self) -> LocalSampler:
        """Made when first needed, by when the model is where it will be trained, and anew on another event loop."""
        from rllm_lightning.rollout.local_sampler import LocalSampler

        if self._sampler is not None and self._sampler.is_stranded:
            self._sampler.batch.close()
            self._sampler = None
        if self._sampler is None:
            self._sampler = LocalSampler(self.setup.model, self._stop_ids, **self._keys)
        return self._sampler
