"""What every rollout engine is: messages in, `ModelOutput` out, under an exact sampling distribution.

A workflow calls `await engine.get_model_response(messages)`. Who asks (seed, step, mode, task, rollout) travels in the
context variable `REQUEST`, set by the workflow engine, so that each request draws from a random stream of its own: the same
tokens come back however requests are batched, in whatever order they arrive, on however many processes.

To add an engine: subclass `RolloutEngine` in a module of your own, register it with `@register_rollout_engine("x")`, and
choose it with `rollout_engine.name=x`; its keyword-only constructor parameters become keys under `rollout_engine`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rllm_lightning.types import ModelOutput


@dataclass(frozen=True)
class SamplingParams:
    """How a response is drawn. The defaults are neutral: the model's own distribution, up to `max_tokens` tokens.

    `temperature` divides the logits (0: greedy); `top_p` keeps the smallest set of tokens with that probability (1: all);
    `top_k` keeps the k most likely tokens (<= 0: all).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024

    def with_overrides(self, **overrides: Any) -> SamplingParams:
        """A copy with some fields replaced. Unknown names are a `TypeError`, values out of range a `ValueError`."""
        params = replace(self, **overrides)
        if params.temperature < 0 or not 0 < params.top_p <= 1 or params.max_tokens < 1:
            raise ValueError(f"sampling: temperature must be >= 0, top_p in (0, 1], max_tokens >= 1; got {params}")
        return params

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are cut off, so that the sampled distribution is not the model's own (greedy decoding cuts nothing off:
        its log-probs are the model's)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass
class RequestContext:
    """Who asks. `mode` is `"train"` or `"val"` (or `"greedy"`); calls within one workflow run are counted from 0."""

    seed: int = 0
    global_step: int = 0
    mode: str = "train"
    task_id: str = ""
    rollout_idx: str = "0"
    num_calls: int = field(default=0, compare=False)

    def next_stream(self) -> np.random.Generator:
        """The random stream of this context's next model call: counter-based, keyed by all fields and the call's index."""
        key = repr((self.seed, self.global_step, self.mode, self.task_id, self.rollout_idx, self.num_calls))
        self.num_calls += 1
        words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words))


REQUEST: ContextVar[RequestContext | None] = ContextVar("rllm_lightning_request", default=None)


def current_request() -> RequestContext:
    """The context of the running workflow; outside of one, a fresh anonymous context (always the same stream)."""
    return REQUEST.get() or RequestContext()


@dataclass
class EngineSetup:
    """What the trainer hands to an engine's constructor: the policy's model and tokenizer (None for engines that bring
    their own), the sampling parameters of both modes, the longest prompt in tokens, and variables of the chat template."""

    model: Any = None
    tokenizer: Any = None
    train: SamplingParams = field(default_factory=SamplingParams)
    val: SamplingParams = field(default_factory=SamplingParams)
    max_prompt_length: int = 1024
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class RolloutEngine(ABC):
    """Answers chat requests. `weight_version` counts the policy updates its weights have seen.

    What an engine promises beyond that, its class (or the object) says; `conformance.py` checks it:
        gives_tokens: every answer has its token ids, log-probs and the prompt's token ids. Training needs them.
        repeatable: a request's tokens follow from its context and the weights alone, whatever else is asked at the time.
    """

    gives_tokens: bool = True
    repeatable: bool = False

    def __init__(self, setup: EngineSetup):
        self.setup = setup
        self.weight_version = 0

    def params_for(self, request: RequestContext, overrides: dict[str, Any]) -> SamplingParams:
        """The sampling parameters of a request: those of its mode, greedy at temperature 0, with the caller's overrides."""
        params = self.setup.train if request.mode == "train" else self.setup.val
        if request.mode == "greedy":
            params = replace(self.setup.train, temperature=0.0)
        return params.with_overrides(**overrides) if overrides else params

    @abstractmethod
    async def get_model_response(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> ModelOutput:
        """Sample one answer to a chat.

        Args:
            messages: chat messages, `{"role", "content", ...}`.
            tools: JSON schemas of functions, for chat templates that tell the model of them; only asked of engines whose
                `setup.tokenizer` has such a template.
            overrides: fields of `SamplingParams` for this request alone.

        Raises:
            TerminationEvent: the prompt is longer than `max_prompt_length` (`MAX_PROMPT_LENGTH_EXCEEDED`); it is never cut.
        """

    @classmethod
    def check_keys(cls, keys: Mapping[str, Any], training: bool) -> list[str]:
        """What speaks against an engine with these keys under `rollout_engine`, as far as can be told in a moment: one line each,
        that begins with the key. `training`: its answers are to be trained on."""
        return []

    def on_weights_updated(self, weight_version: int) -> None:
        """The policy's weights changed: whatever was derived from the old ones is stale."""
        self.weight_version = weight_version

    async def rest(self) -> None:
        """No request will come for a while: an engine that shares a device with the trainer may hand back its memory."""

    async def shutdown(self) -> None:
        """Release what the engine holds. Idempotent."""
