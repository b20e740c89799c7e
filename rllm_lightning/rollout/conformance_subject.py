"""What the checks of `conformance.py` work on: the engine under test, and the plain model that it is measured by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from rllm_lightning.rollout.chat import Chat
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, RolloutEngine, SamplingParams
from rllm_lightning.types import ModelOutput

PROMPT_LIMIT = 512  # tokens
PROMPTS = ["", "a", "why?", "count to ten", "what is 17 + 25? think first"]

T = TypeVar("T")


class Failure(Exception):
    """A check's contract does not hold; the message says what was measured and what was expected."""


@dataclass
class Subject:
    """The engine under test, as checks see it.

    Args:
        make: the engine of a setup.
        draws: tokens drawn where frequencies are compared.
        tolerance: largest difference of log-probs to the reference.
    """

    make: Callable[[EngineSetup], RolloutEngine]
    model: Any
    tokenizer: Any
    draws: int = 300
    tolerance: float = 1e-3
    chat: Chat = field(init=False)
    gives_tokens: bool = field(init=False)
    repeatable: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chat = Chat(self.tokenizer)
        engine = self.engine()
        self.gives_tokens, self.repeatable = engine.gives_tokens, engine.repeatable
        asyncio.run(engine.shutdown())

    def engine(self, tokenizer: Any = None, max_prompt_length: int = PROMPT_LIMIT, **sampling: Any) -> RolloutEngine:
        params = SamplingParams(**{"max_tokens": 16, **sampling})
        return self.make(EngineSetup(self.model, tokenizer or self.tokenizer, params, params, max_prompt_length))

    def run(self, body: Callable[[RolloutEngine], Awaitable[T]], *, engine: RolloutEngine | None = None, **sampling: Any) -> T:
        """What `body` makes of an engine (by default one for `sampling`), which is shut down afterwards."""

        async def run() -> T:
            used = engine or self.engine(**sampling)
            try:
                return await body(used)
            finally:
                await used.shutdown()

        return asyncio.run(run())

    def answers(self, contents: Sequence[str], *, together: bool = True, **how: Any) -> list[ModelOutput]:
        """Answers in the order of `contents`; the i-th asks as task `str(i)`.

        Raises:
            Failure: an exception came instead of an answer.
        """
        return answered(self.run(lambda engine: ask(engine, contents, together), **how))

    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.chat.stop_ids(getattr(self.model, "generation_config", None))

    def prompt(self, content: str) -> list[int]:
        """The tokens of a one-message chat."""
        return self.chat.encode(self.chat.render(message(content)))


async def ask(engine: RolloutEngine, contents: Sequence[str], together: bool = True) -> list[ModelOutput | BaseException]:
    """Answers, or the exceptions that came instead, in the order of `contents`."""
    calls = [question(engine, content, str(i)) for i, content in enumerate(contents)]
    if together:
        return await asyncio.gather(*map(asyncio.create_task, calls), return_exceptions=True)
    return [(await asyncio.gather(asyncio.create_task(call), return_exceptions=True))[0] for call in calls]


def answered(answers: Sequence[ModelOutput | BaseException]) -> list[ModelOutput]:
    """The answers; an exception among them is a `Failure`."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise Failure(f"{type(answer).__name__}: {answer}") from answer
    return [answer for answer in answers if isinstance(answer, ModelOutput)]


async def question(engine: RolloutEngine, content: str, task_id: str) -> ModelOutput:
    """One request in a context of its own."""
    REQUEST.set(RequestContext(seed=1, task_id=task_id))
    return await engine.get_model_response(message(content))


def message(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


class Reference:
    """Plain forward passes of the model in float32: what engines are measured by."""

    def __init__(self, model: Any):
        self._model = model

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int] = ()) -> torch.Tensor:
        """[response + 1, vocabulary]: before each response token, and after the last."""
        ids = torch.tensor([[*prompt, *response]], device=next(self._model.parameters()).device)
        training = self._model.training
        logits = self._model.eval()(input_ids=ids).logits[0, len(prompt) - 1 :].float().cpu()
        self._model.train(training)
        return logits

    def logprobs(self, answer: ModelOutput, temperature: float = 1.0) -> torch.Tensor:
        """Of an answer's tokens, teacher-forced."""
        tokens = torch.tensor(answer.completion_ids)
        logits = self.logits(answer.prompt_ids or [], answer.completion_ids or [])[:-1] / temperature
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]

    def greedy(self, prompt: Sequence[int], length: int, ends: frozenset[int], margin: float) -> list[int]:
        """The most likely tokens one by one, as long as they lead by `margin` (in logits): rounding cannot change these."""
        response: list[int] = []
        while len(response) < length and not (response and response[-1] in ends):
            best, second = self.logits(prompt, response)[-1].topk(2).values.tolist()
            if best - second <= margin:
                break
            response.append(int(self.logits(prompt, response)[-1].argmax()))
        return response
