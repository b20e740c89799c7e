"""One update pass (forward, loss, backward) over the rollouts of a step: padded rows with full logits, padded rows with the output
layer on the responses only, and trees that compute a shared prompt once. And over conversations: a row a turn, a row a conversation.

The rows are sampled by our engine, the loss is the trainer's own (`trainer.update`); a test compares the gradients.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rllm_lightning.config import Config
from rllm_lightning.lab.speed.machine import Limits, peak_memory, reset_peak_memory
from rllm_lightning.lab.speed.report import DTYPE, SECONDS, VARIANT, Column, Report, Row, seconds_of
from rllm_lightning.lab.speed.timing import Timing, Variant, take_turns
from rllm_lightning.lab.speed.workload import DTYPES, Counts, Sampler, Size, as_chats, load, questions
from rllm_lightning.trainer.batch import MicroBatch
from rllm_lightning.trainer.batch import Row as TrainRow
from rllm_lightning.trainer.layout import collate_rows
from rllm_lightning.trainer.policy import Policy, Scores
from rllm_lightning.trainer.update import MinibatchUpdate, UpdateMetrics
from rllm_lightning.types import ModelOutput, Step

NUM_ROWS = 2048  # of the matrix products that set the limit: tokens of a usual micro-batch
COLUMNS = (
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("tokens", "tokens through the model", ",.0f"),
    Column("ratio", "× full logits, same dtype", ".2f"),
    Column("ratio_fp32", "× full logits, fp32", ".2f"),
    Column("peak_gb", "peak GB over the model", ".2f"),
    Column("limit_share", "share of limit", ".0%"),
)
TURN_COLUMNS = (
    Column("turns", "turns", ",.0f"),
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("tokens", "tokens through the model", ",.0f"),
    Column("ratio", "× a sequence a turn", ".2f"),
)
PRECISION = {"fp32": "fp32", "bf16": "bf16-mixed"}


class FullLogits(Policy):
    """How one would write it: all rows padded to the longest, logits of every position, log-softmax, gather. No entropies."""

    def forward(self, micro: MicroBatch) -> Scores:
        logits_SLV = self.model(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False).logits
        logprobs_SLV = torch.log_softmax(logits_SLV[:, :-1] / self.temperature, dim=-1, dtype=torch.float32)
        logprobs_SL = logprobs_SLV.gather(-1, micro.input_ids[:, 1:, None]).squeeze(-1)
        logprobs_BT = micro.spread(logprobs_SL[micro.sequences_N, micro.columns_N])
        return Scores(logprobs_BT, torch.zeros_like(logprobs_BT))

    def micro_batches(self, rows: Sequence[TrainRow], max_tokens: int) -> Iterator[MicroBatch]:
        yield collate_rows(rows, self.device)


FULL, PADDED, TREE = "padded rows, full logits", "padded rows, head on responses", "tree rows"
VARIANTS: dict[str, Callable[[Any, Any], Policy]] = {
    FULL: lambda model, tokenizer: FullLogits(model, tokenizer, tree=False),
    PADDED: lambda model, tokenizer: Policy(model, tokenizer, tree=False),
    TREE: lambda model, tokenizer: Policy(model, tokenizer, tree=True),
}


class UpdatePass:
    """One variant of the pass over some rows. Calling it leaves the gradients in the model and returns the tokens it computed."""

    def __init__(self, variant: str, dtype: str, model: Any, tokenizer: Any, rows: Sequence[TrainRow]):
        self.policy = VARIANTS[variant](model, tokenizer)
        self.rows = list(rows)
        self.config = Config()
        self.mixed = dtype == "bf16"
        budget = self.config.training.micro_batch_tokens
        micros = list(self.policy.micro_batches(self.rows, budget))
        self.num_tokens = sum(micro.input_ids.numel() for micro in micros)
        self.num_head_tokens = self.num_tokens if variant == FULL else sum(micro.num_response_tokens for micro in micros)

    def __call__(self, number: int = 0) -> float:
        self.policy.zero_grad(set_to_none=True)
        update = MinibatchUpdate(self.rows, self.config, self.policy, lambda loss, sync: loss.backward(), UpdateMetrics())
        with self.policy.training_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            update.backward()
        return float(self.num_tokens)


def measure(name: str, model: Any, tokenizer: Any, counts: Counts, repeats: int = 3, memory: bool = True) -> list[Report]:
    """Peak memory of each variant in a process of its own; then seconds of all in this one, in turns (it keeps what full logits took)."""
    kinds = [(variant, dtype) for variant in VARIANTS for dtype in DTYPES]
    peaks = {kind: {"peak_gb": peak_gb(name, counts, *kind)} if memory else {} for kind in kinds}
    rows = sampled_rows(model, tokenizer, counts)
    passes = {kind: UpdatePass(*kind, model, tokenizer, rows) for kind in kinds}
    timings = take_turns([Variant(f"{variant}, {dtype}", run) for (variant, dtype), run in passes.items()], repeats)
    model.zero_grad(set_to_none=True)
    limits = Limits.measure(NUM_ROWS, model.config.hidden_size, DTYPES)
    size = Size.of(model)
    table = []
    for (variant, dtype), run in passes.items():
        flop = 6 * (size.body * run.num_tokens + size.head * run.num_head_tokens)
        table.append(_row(variant, dtype, timings, flop / limits.rates[dtype]) | peaks[variant, dtype])
    num_real, num_response = sum(row.num_tokens for row in rows), sum(len(row.response_ids) for row in rows)
    words = {"model": name, "sequences": len(rows), "tokens": num_real, "response tokens": num_response, "repeats": repeats}
    notes = [
        "One pass: forward, loss and backward of the rollouts of one GRPO step. Peak: each variant in a process of its own.",
        f"Share of limit: 6 FLOP a parameter and token (the head's: only where it runs), over the rate of {limits.in_words()}.",
    ]
    return [Report(f"One update pass of {name}", words, COLUMNS, table, notes)]


def measure_turns(
    name: str,
    model: Any,
    tokenizer: Any,
    dtype: str,
    max_tokens: int,
    num_agents: int = 16,
    turns: Sequence[int] = (2, 4, 8),
    repeats: int = 3,
) -> list[Report]:
    """Seconds of one pass over conversations of `turns` turns: what merging the turns of a trajectory saves."""
    table = []
    for num_turns in turns:
        rows = conversation_rows(model, tokenizer, max_tokens, num_agents, num_turns)
        apart = [replace(row, sequence=index) for index, row in enumerate(rows)]
        passes = {
            label: UpdatePass(variant, dtype, model, tokenizer, given)
            for label, variant, given in (
                ("a sequence a turn", PADDED, apart),
                ("a sequence a conversation", PADDED, rows),
                ("trees of conversations", TREE, rows),
            )
        }
        timings = take_turns([Variant(label, run) for label, run in passes.items()], repeats)
        plain, *_ = timings.values()
        table += [
            {"turns": num_turns, "variant": label, "dtype": PRECISION[dtype], **seconds_of(timing)}
            | {"tokens": timing.work[0], "ratio": plain.median_s / timing.median_s}
            for label, timing in timings.items()
        ]
    words = {"model": name, "conversations": num_agents, "max tokens a turn": max_tokens, "repeats": repeats}
    return [Report(f"One update pass over conversations with {name}", words, TURN_COLUMNS, table, ["Same losses and gradients in all."])]


def conversation_rows(model: Any, tokenizer: Any, max_tokens: int, num_agents: int, num_turns: int) -> list[TrainRow]:
    """A row for each turn of some conversations, with advantages of both signs."""
    sampler = Sampler(model, tokenizer, max_tokens)
    outputs = sampler.talk(num_agents, num_turns, 0)
    sampler.close()
    return _with_advantages(outputs, num_turns, num_turns)


def sampled_rows(model: Any, tokenizer: Any, counts: Counts) -> list[TrainRow]:
    """Rollouts of the model as training rows, with advantages of both signs."""
    sampler = Sampler(model, tokenizer, counts.max_tokens)
    outputs = sampler.answers(as_chats(questions(counts.num_prompts)), counts.num_samples, 0)
    sampler.close()
    return _with_advantages(outputs, 1, counts.num_samples)


def _with_advantages(outputs: Sequence[ModelOutput], per_trajectory: int, per_group: int) -> list[TrainRow]:
    advantages = np.random.default_rng(0).standard_normal(len(outputs))
    rows = []
    for index, (output, advantage) in enumerate(zip(outputs, advantages, strict=True)):
        step = Step.from_model_output(output)
        step.advantage = float(advantage)
        rows.append(TrainRow(step, index // per_trajectory, index // per_group, "solver", output.logprobs))
    return rows


def peak_gb(name: str, counts: Counts, variant: str, dtype: str) -> float:
    """Peak memory of one pass over what the loaded model takes, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_gb, name, counts, variant, dtype, torch.get_num_threads()).result()


def _peak_gb(name: str, counts: Counts, variant: str, dtype: str, num_threads: int) -> float:
    torch.set_num_threads(num_threads)
    model, tokenizer = load(name)
    run = UpdatePass(variant, dtype, model, tokenizer, sampled_rows(model, tokenizer, counts))
    gc.collect()
    reset_peak_memory()
    before = peak_memory()
    run()
    return (peak_memory() - before) / 1e9


def gradients(model: Any) -> Tensor:
    """All gradients in one vector, in float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def _row(variant: str, dtype: str, timings: dict[str, Timing], limit_s: float) -> Row:
    timing = timings[f"{variant}, {dtype}"]
    return {
        "variant": variant,
        "dtype": PRECISION[dtype],
        **seconds_of(timing),
        "tokens": timing.work[0],
        "ratio": timings[f"{FULL}, {dtype}"].median_s / timing.median_s,
        "ratio_fp32": timings[f"{FULL}, fp32"].median_s / timing.median_s,
        "limit_share": limit_s / timing.median_s,
    }
