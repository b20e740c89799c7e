"""`TokenEngine`: what engines have in common that are asked in token ids and answer in token ids.

messages -> Conversations -> prompt ids -> `sample` (the engine's own part) -> Sample -> ModelOutput
                 ▲                                                               │
                 └──────────────── the turn's tokens, for the next turn ─────────┘
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm_lightning.rollout.chat import Chat
from rllm_lightning.rollout.conversations import Conversations, Span
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine, SamplingParams, current_request
from rllm_lightning.types import ModelOutput, TerminationEvent, TerminationReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Sampled token ids (the end token included, where one was sampled) and the log-prob of each."""

    tokens: list[int]
    logprobs: list[float]


class TokenEngine(RolloutEngine):
    """Prompts and answers are tokens of `setup.tokenizer`; a subclass writes `sample`.

    Args:
        name: of the engine, for its messages.

    Raises:
        ValueError: no model, no tokenizer, or no chat template.
    """

    def __init__(self, setup: EngineSetup, name: str):
        super().__init__(setup)
        self.name = name
        if setup.model is None or setup.tokenizer is None:
            raise ValueError(f"rollout engine {name}: needs the policy, EngineSetup.model and EngineSetup.tokenizer")
        self._chat = Chat(setup.tokenizer, setup.chat_template_kwargs)
        self._conversations = Conversations(self._chat)
        self._stop_ids = self._chat.stop_ids(getattr(setup.model, "generation_config", None))
        self._warned_of_truncation = False

    @abstractmethod
    async def sample(self, prompt: list[int], params: SamplingParams, stream: np.random.Generator) -> Sample:
        """Draw an answer: until one of `self._stop_ids`, which belongs to it, or `params.max_tokens` tokens. All randomness comes
        from `stream`, the request's own."""

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens, None where the model names no limit."""
        return positions_of(self.setup.model)

    async def get_model_response(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> ModelOutput:
        """See `RolloutEngine`.

        Raises:
            ValueError: prompt and `max_tokens` together exceed the model's positions.
        """
        context = current_request()
        params = self.params_for(context, overrides)
        run = (context.seed, context.global_step, context.mode, context.task_id, context.rollout_idx)
        prompt = self._conversations.prompt(run, messages, tools)
        self._check(prompt.ids, params)
        weight_version = self.weight_version
        sampled = await self.sample(prompt.ids, params, context.next_stream())
        output = self._output(prompt.ids, sampled, weight_version)
        end = sampled.tokens[-1:] if output.finish_reason == "stop" else []
        self._conversations.remember(
            run, prompt, Span(f"{self._chat.as_text(output.text)}{self._chat.decode(end, special=True)}", sampled.tokens)
        )
        return output

    async def rest(self) -> None:
        self._conversations.forget()

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse what cannot be answered as asked."""
        if not prompt:
            raise ValueError(f"rollout engine {self.name}: the chat template made an empty prompt")
        if len(prompt) > self.setup.max_prompt_length:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        limit = self.max_positions
        if limit is not None and len(prompt) + params.max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and up to {params.max_tokens} sampled ones exceed the model's {limit} positions "
                "(max_position_embeddings); lower data.max_prompt_length or data.max_response_length"
            )
        if params.is_truncated and not self._warned_of_truncation:
            self._warned_of_truncation = True
            logger.warning(
                "sampling with top_k=%s, top_p=%s: tokens are drawn from a cut-off distribution, which the trainer's log-probs "
                "(over all tokens) do not equal",
                params.top_k,
                params.top_p,
            )

    def _output(self, prompt: list[int], sampled: Sample, weight_version: int) -> ModelOutput:
        stopped = sampled.tokens[-1] in self._stop_ids
        text = self._chat.decode(sampled.tokens[:-1] if stopped else sampled.tokens)
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=prompt,
            completion_ids=sampled.tokens,
            logprobs=sampled.logprobs,
            prompt_length=len(prompt),
            completion_length=len(sampled.tokens),
            finish_reason="stop" if stopped else "length",
            weight_version=weight_version,
        )


def seed_from(stream: np.random.Generator) -> int:
    """A request's seed for a sampler that has its own random numbers; 31 bits, which every one takes."""
    return int(stream.integers(2**31))


def positions_of(model: Any) -> int | None:
    """The longest sequence in tokens that a Hugging Face model allows, None where its config names no limit."""
    config = getattr(model, "config", None)
    return None if config is None else getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
