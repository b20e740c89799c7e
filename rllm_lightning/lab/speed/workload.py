"""What the comparisons work on: a model, questions of ordinary length, and the counts that each model is measured with."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rllm_lightning.config import ModelConfig
from rllm_lightning.models.load import load_model
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.types import ModelOutput

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

QUESTIONS = (
    "What is {a} + {b}? Please answer with the number only.",
    "Tom has {a} apples and buys {b} more. How many apples does he have now? Be brief.",
    "Is {a} larger than {b}? Answer yes or no, please, and nothing else at all.",
    "There are {a} birds on a tree and {b} fly away. How many stay? Give the number.",
    "Count from {a} to {b} in steps of two. Write down the numbers one after the other, without any other words.",
    "How many days are there in {a} weeks and {b} days? Give the number.",
    "Which is larger, {a}/{b} or {b}/{a}? Say in a few words which one it is.",
    "What comes next: {a}, {b}, {a}, {b}? Answer with the number.",
)
FOLLOW_UP = "Are you sure? Think again, and answer once more."


@dataclass(frozen=True)
class Counts:
    """`num_prompts` questions, `num_samples` answers to each, of `max_tokens` tokens at the most."""

    num_prompts: int
    num_samples: int
    max_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples

    def in_words(self) -> dict[str, Any]:
        return {name.removeprefix("num_").replace("_", " "): value for name, value in asdict(self).items()}


LARGE, SMALL = Counts(8, 8, 24), Counts(32, 8, 16)


def counts_of(model: str) -> Counts:
    """The usual counts for a model: the tiny one is so fast that it takes more."""
    return SMALL if model == "builtin:tiny" else LARGE


def load(name: str) -> tuple[Any, Any]:
    """Model (fp32, eval mode) and tokenizer of a `model.name`."""
    model, tokenizer = load_model(ModelConfig(name=name))
    return model.eval(), tokenizer


def copy_in(model: Any, dtype: str) -> Any:
    """The model itself in fp32, a copy of it in anything else."""
    return model if dtype == "fp32" else copy.deepcopy(model).to(DTYPES[dtype])


@dataclass(frozen=True)
class Size:
    """Parameters that take part in matrix products: those of the layers, and those of the output layer (the head)."""

    body: int
    head: int

    @classmethod
    def of(cls, model: Any) -> Size:
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        total = sum(p.numel() for p in model.parameters())
        return cls(total - embedding.numel() - (0 if head is embedding else head.numel()), head.numel())


def questions(num: int) -> list[str]:
    return [QUESTIONS[i % len(QUESTIONS)].format(a=3 + i, b=7 + 2 * i) for i in range(num)]


class Sampler:
    """Our rollout engine on an event loop of its own, asked as the trainer asks it.

    Args:
        keys: of the engine, as under `rollout_engine`.
    """

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, **keys: Any):
        setup = EngineSetup(model, tokenizer, train=SamplingParams(max_tokens=max_tokens), max_prompt_length=100_000)
        self.engine = HFEngine(setup, **keys)
        self._runner = asyncio.Runner()

    def answers(self, chats: Sequence[list[dict[str, Any]]], num_samples: int, number: int) -> list[ModelOutput]:
        """`num_samples` answers to each chat, those to one chat next to each other."""
        return self._runner.run(self._answers(chats, num_samples, number))

    async def _answers(self, chats: Sequence[list[dict[str, Any]]], num_samples: int, number: int) -> list[ModelOutput]:
        return await asyncio.gather(*(self._answer(chat, number, i, j) for i, chat in enumerate(chats) for j in range(num_samples)))

    async def _answer(self, chat: list[dict[str, Any]], number: int, task: int, sample: int) -> ModelOutput:
        REQUEST.set(RequestContext(global_step=number, task_id=str(task), rollout_idx=str(sample)))
        return await self.engine.get_model_response(chat)

    def weights_changed(self, number: int) -> None:
        """As after an update of the policy: a copy of the weights is made anew, and nothing computed before is used again."""
        self.engine.on_weights_updated(number)

    def talk(self, num_agents: int, num_turns: int, number: int) -> list[ModelOutput]:
        """Each agent asks, waits for the answer, and asks again, `num_turns` times; all agents at once."""
        return self._runner.run(self._talk(num_agents, num_turns, number))

    async def _talk(self, num_agents: int, num_turns: int, number: int) -> list[ModelOutput]:
        talks = await asyncio.gather(*(self._agent(text, num_turns, number, i) for i, text in enumerate(questions(num_agents))))
        return [output for talk in talks for output in talk]

    async def _agent(self, question: str, num_turns: int, number: int, task: int) -> list[ModelOutput]:
        REQUEST.set(RequestContext(global_step=number, task_id=str(task)))
        chat, outputs = [{"role": "user", "content": question}], []
        for _ in range(num_turns):
            outputs.append(await self.engine.get_model_response(chat))
            chat = [*chat, {"role": "assistant", "content": outputs[-1].text or ""}, {"role": "user", "content": FOLLOW_UP}]
        return outputs

    def close(self) -> None:
        self._runner.run(self.engine.shutdown())
        self._runner.close()


def as_chats(texts: Sequence[str]) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": text}] for text in texts]
