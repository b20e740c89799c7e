"""An engine of canned answers: no model and no torch, for tests, demonstrations and the debugging of workflows and rewards.

It behaves as a policy that knows a few answers and chooses among them uniformly: token ids come from a trivial codec (a
character's code point, `END` after the last one), log-probs are the exact conditional ones of that policy, and the choice is
drawn from the request's own random stream, so a rerun gives the same answers.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup, RequestContext, RolloutEngine, current_request
from rllm_lightning.types import ModelOutput, TerminationEvent, TerminationReason

END = 0  # the token that ends an answer, and each message of a prompt

# From Python also a function `(messages, request) -> answer or list of answers`, maybe async; it may raise.
Answers = list[str] | dict[str, str] | Any


def encode(text: str) -> list[int]:
    """One token a character: its code point."""
    return [ord(character) for character in text]


def decode(ids: list[int]) -> str:
    """The text of token ids; `END` stands for no text."""
    return "".join(chr(token) for token in ids if token != END)


def render(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt of a chat. That of a longer chat begins with that of a shorter one and its whole answer, `END` included."""
    ids = []
    for message in messages:
        ids += [*encode(f"{message['role']}: {message['content']}"), END]
    return ids + encode("assistant: ")


@register_rollout_engine("scripted")
class ScriptedEngine(RolloutEngine):
    """Answers from a script.

    Args:
        answers: the answers to choose from; or a mapping from the last user message to its answer or answers; or a function of
            `(messages, request)` that returns an answer or several.

    An answer that stands twice is twice as likely. At temperature 0 the most frequent answer is given (the first of equally
    frequent ones) with probability 1; other temperatures, `top_p` and `top_k` change nothing. An answer longer than
    `max_tokens`, its `END` counted, is cut and has the finish reason `"length"`.

    Raises:
        ValueError: no answers are given; at a request: nothing is scripted for this message.
    """

    repeatable = True

    def __init__(self, setup: EngineSetup, *, answers: Answers):
        super().__init__(setup)
        if not (callable(answers) or (isinstance(answers, list | tuple | dict) and answers)):
            raise ValueError(f"rollout_engine.answers: expected a non-empty list of answers, a mapping or a function, got {answers!r}")
        self.answers = answers

    async def get_model_response(self, messages: list[dict[str, Any]], **overrides: Any) -> ModelOutput:
        request = current_request()
        params = self.params_for(request, overrides)
        prompt_ids = render(messages)
        if len(prompt_ids) > self.setup.max_prompt_length:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        stream = request.next_stream()
        options = await self._options(messages, request)
        if params.temperature == 0:
            options = [max(options, key=options.count)]
        choice = options[stream.integers(len(options))]
        ids = [*encode(choice), END][: params.max_tokens]
        text = decode(ids)
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=_logprobs(ids, options),
            prompt_length=len(prompt_ids),
            completion_length=len(ids),
            finish_reason="stop" if ids[-1] == END else "length",
            weight_version=self.weight_version,
        )

    async def _options(self, messages: list[dict[str, Any]], request: RequestContext) -> list[str]:
        options = self.answers
        if isinstance(options, dict):
            said: Any = next((message["content"] for message in reversed(messages) if message["role"] == "user"), None)
            if said not in options:
                raise ValueError(f"rollout_engine.answers: nothing is scripted for {said!r}; there is: {', '.join(map(repr, options))}")
            options = options[said]
        elif callable(options):
            options = options(messages, request)
            if inspect.isawaitable(options):
                options = await options
        return [options] if isinstance(options, str) else list(options)


def _logprobs(ids: list[int], options: list[str]) -> list[float]:
    """Log-probability of each token given those before it, when one of `options` is written with equal probability each."""
    alive = [[*encode(option), END] for option in options]
    logprobs = []
    for position, token in enumerate(ids):
        agreeing = [option for option in alive if option[position] == token]
        logprobs.append(math.log(len(agreeing) / len(alive)))
        alive = agreeing
    return logprobs
