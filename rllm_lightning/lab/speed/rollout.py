"""Rollouts of the `hf` engine beside Hugging Face `generate`, and several turns with and without kept state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rllm_lightning.lab.speed.machine import Limits
from rllm_lightning.lab.speed.report import DTYPE, SECONDS, VARIANT, Column, Report, Row, seconds_of
from rllm_lightning.lab.speed.timing import Timing, Variant, take_turns
from rllm_lightning.lab.speed.workload import DTYPES, Counts, Sampler, Size, as_chats, copy_in, questions
from rllm_lightning.rollout.chat import Chat

COLUMNS = (
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("rate", "tokens/s", ",.0f"),
    Column("ratio", "× generate, same dtype", ".2f"),
    Column("ratio_fp32", "× generate, fp32", ".2f"),
    Column("limit_share", "share of limit", ".0%"),
)
TURN_COLUMNS = (
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("rate", "tokens/s", ",.0f"),
    Column("ratio", "× without", ".2f"),
    Column("prompt_tokens", "prompt tokens", ",.0f"),
    Column("prefill_tokens", "of them computed", ",.0f"),
)
DTYPE_KEYS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": "bfloat16"}}
ENGINES: dict[str, dict[str, Any]] = {"ours": {}, "ours, fast=false": {"fast": False}}
TURN_ENGINES: dict[str, dict[str, Any]] = {"ours, without kept state": {"kept_state_mb": 0}, "ours": {}}


def measure(name: str, model: Any, tokenizer: Any, counts: Counts, repeats: int = 5) -> list[Report]:
    """One answer to each of many requests: `generate` and our engine, fp32 and bf16."""
    variants: list[Variant] = []
    dtype_of: dict[str, str] = {}
    samplers: list[Sampler] = []

    def add(label: str, dtype: str, run: Callable[[int], float]) -> None:
        dtype_of[f"{label}, {dtype}"] = dtype
        variants.append(Variant(f"{label}, {dtype}", run))

    for dtype in DTYPES:
        add("generate", dtype, Generate(copy_in(model, dtype), tokenizer, counts))
        for label, keys in ENGINES.items():
            samplers.append(Sampler(model, tokenizer, counts.max_tokens, **DTYPE_KEYS[dtype], **keys))
            add(label, dtype, _rollouts(samplers[-1], counts))
    timings = take_turns(variants, repeats)
    for sampler in samplers:
        sampler.close()
    limits = Limits.measure(counts.num_sequences, model.config.hidden_size, DTYPES)
    rows = [_row(label, dtype_of[label], timings, Size.of(model), limits) for label in timings]
    notes = [
        "tokens/s: sampled tokens, the end-of-answer token included. Ours gives log-probs too, and copies the weights anew in each round.",
        f"Share of limit: 2 FLOP a parameter and sampled token (prompts are not counted), over the rate of {limits.in_words()}.",
    ]
    words = {"model": name, **counts.in_words(), "repeats": repeats, "stops": "real"}
    return [Report(f"Rollouts of {name}", words, COLUMNS, rows, notes)]


def measure_turns(
    name: str, model: Any, tokenizer: Any, dtype: str, num_agents: int = 64, num_turns: int = 3, max_tokens: int = 24, repeats: int = 3
) -> list[Report]:
    """Conversations of many agents at once: what an engine gains that keeps their state between turns."""
    samplers = {label: Sampler(model, tokenizer, max_tokens, **DTYPE_KEYS[dtype], **keys) for label, keys in TURN_ENGINES.items()}
    timings = take_turns([Variant(label, _talks(sampler, num_agents, num_turns)) for label, sampler in samplers.items()], repeats)
    without, *_ = timings.values()
    rows = []
    for label, timing in timings.items():
        row = {"variant": label, "dtype": dtype, **seconds_of(timing), "rate": timing.rate, "ratio": timing.rate / without.rate}
        prompts = samplers[label].engine.pop_metrics()
        row |= {key: prompts[f"rollout/{key}"] / (repeats + 1) for key in ("prompt_tokens", "prefill_tokens")}
        rows.append(row)
        samplers[label].close()
    words = {"model": name, "agents": num_agents, "turns": num_turns, "max tokens": max_tokens, "repeats": repeats}
    return [Report(f"Conversations with {name}", words, TURN_COLUMNS, rows, ["Prompt tokens: of all turns of one round."])]


class Generate:
    """Hugging Face `generate` on the same prompts: neutral sampling, left padding, all stop tokens that our engine knows."""

    def __init__(self, model: Any, tokenizer: Any, counts: Counts):
        chat = Chat(tokenizer)
        prompts = [chat.encode(chat.render(messages)) for messages in as_chats(questions(counts.num_prompts))]
        prompts = [prompt for prompt in prompts for _ in range(counts.num_samples)]
        longest = max(map(len, prompts))
        self.model = model
        self.stop_ids = sorted(chat.stop_ids(model.generation_config))
        self.pad_id = tokenizer.pad_token_id
        self.max_tokens = counts.max_tokens
        self.input_ids = torch.tensor([[self.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        self.attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def __call__(self, number: int) -> float:
        torch.manual_seed(number)
        output = self.model.generate(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=self.max_tokens,
            eos_token_id=self.stop_ids,
            pad_token_id=self.pad_id,
        )
        return float(self.num_sampled(output[:, self.input_ids.shape[1] :]))

    def num_sampled(self, new_BT: torch.Tensor) -> int:
        """Tokens up to the first stop token of each row, which belongs to them."""
        is_stop = torch.isin(new_BT, torch.tensor(self.stop_ids))
        lengths_B = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, new_BT.shape[1])
        return int(lengths_B.sum())


def _rollouts(sampler: Sampler, counts: Counts) -> Callable[[int], float]:
    chats = as_chats(questions(counts.num_prompts))

    def run(number: int) -> float:
        sampler.weights_changed(number)
        return float(sum(output.completion_length for output in sampler.answers(chats, counts.num_samples, number)))

    return run


def _talks(sampler: Sampler, num_agents: int, num_turns: int) -> Callable[[int], float]:
    def run(number: int) -> float:
        sampler.weights_changed(number)
        return float(sum(output.completion_length for output in sampler.talk(num_agents, num_turns, number)))

    return run


def _row(label: str, dtype: str, timings: dict[str, Timing], size: Size, limits: Limits) -> Row:
    timing = timings[label]
    return {
        "variant": label.removesuffix(f", {dtype}"),
        "dtype": dtype,
        **seconds_of(timing),
        "rate": timing.rate,
        "ratio": timing.rate / timings[f"generate, {dtype}"].rate,
        "ratio_fp32": timing.rate / timings["generate, fp32"].rate,
        "limit_share": 2 * (size.body + size.head) * timing.rate / limits.rates[dtype],
    }
