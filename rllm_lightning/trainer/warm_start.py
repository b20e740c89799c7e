"""Warm start: supervised steps on the task's own solutions before reinforcement learning.

The same policy, rows and `cross_entropy` loss as in the updates. The result is kept in the cache under a hash of all that
shapes it, so that runs which differ in the estimator only start from the very same weights, at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rllm_lightning.algorithms.losses import aggregate_loss, compute_policy_loss
from rllm_lightning.config import Config, ConfigError
from rllm_lightning.models.load import cache_folder
from rllm_lightning.registry import LOSSES
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.types import Step
from rllm_lightning.workflows.single_turn import chat_of

logger = logging.getLogger(__name__)

VERSION = 2  # raise when the procedure changes, so that what the cache holds is not taken for its result
PROGRESS_S = 10.0  # between two lines that say how far it is
STREAM = 1  # apart from the order in which the tasks are trained on later

Example = tuple[list[dict[str, Any]], str]  # a chat and its solution


async def warm_start(policy: Policy, dataset: Sequence[dict[str, Any]], config: Config) -> None:
    """Train `policy` in place for `warm_start.steps` steps on the solutions of `dataset`, or load the result of an earlier time.

    Between two steps the event loop runs, so that it can be cancelled.

    Raises:
        ConfigError: a task has no `solution`, or the chat template writes answers in a way that cannot be taught.
    """
    settings = config.warm_start
    examples = draw_examples(dataset, settings.steps * settings.batch_size, config)
    weights = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    path = cache_folder() / "warm_start" / f"{_fingerprint(policy, weights, examples, config)}.safetensors"
    if path.is_file():
        for name, value in load_file(path).items():
            weights[name].data.copy_(value)
        return
    await _train(policy, examples, config)
    _save(weights, path)


def draw_examples(dataset: Sequence[dict[str, Any]], count: int, config: Config) -> list[Example]:
    """`count` chats with their solutions (some of them wrong, if asked for): epoch after epoch, each in an order of its own."""
    system_prompt = config.rllm.workflow.workflow_args.get("system_prompt")
    examples: list[Example] = []
    for epoch in range(-(-count // len(dataset))):
        order = np.random.default_rng([config.seed, epoch, STREAM]).permutation(len(dataset))
        for index in order[: count - len(examples)]:
            task = dataset[int(index)]
            if not isinstance(task.get("solution"), str):
                raise ConfigError(
                    [f"warm_start.steps: task {task.get('id')!r} has no `solution` text to learn from; set warm_start.steps=0"]
                )
            examples.append((chat_of(task, system_prompt), task["solution"]))
    return _with_wrong_solutions(examples, config)


def _with_wrong_solutions(examples: list[Example], config: Config) -> list[Example]:
    """A share `wrong_solutions` of the examples, chosen at random, gets the solution of some other example."""
    random = np.random.default_rng([config.seed, STREAM])
    wrong, other = random.random(len(examples)) < config.warm_start.wrong_solutions, random.permutation(len(examples))
    return [(chat, examples[int(other[i])][1] if wrong[i] else solution) for i, (chat, solution) in enumerate(examples)]


def solution_row(chat: Chat, stop_ids: frozenset[int], example: Example) -> Row:
    """A chat and its solution, up to and including the end token, as a training row."""
    messages, solution = example
    prompt = chat.render(messages)
    whole = chat.render([*messages, {"role": "assistant", "content": solution}], for_answer=False)
    if not whole.startswith(prompt):
        raise ConfigError(["warm_start.steps: the chat template writes an answer differently from its prompt; set warm_start.steps=0"])
    answer = chat.encode(whole[len(prompt) :])
    end = next((position + 1 for position, token in enumerate(answer) if token in stop_ids), len(answer))
    return Row(Step(prompt_ids=chat.encode(prompt), response_ids=answer[:end]), 0, 0, "", None)


async def _train(policy: Policy, examples: Sequence[Example], config: Config) -> None:
    settings, loss = config.warm_start, LOSSES.get("cross_entropy")
    chat = Chat(policy.tokenizer, config.model.chat_template_kwargs)
    stop_ids = chat.stop_ids(policy.model.generation_config)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    former, policy.temperature = policy.temperature, 1.0
    said = time.monotonic()
    with torch.enable_grad(), policy.training_mode():
        for step in range(settings.steps):
            drawn = examples[step * settings.batch_size : (step + 1) * settings.batch_size]
            batch = [solution_row(chat, stop_ids, example) for example in drawn]
            weight = 1.0 / sum(len(row.response_ids) for row in batch)
            for micro in policy.micro_batches(batch, config.training.micro_batch_tokens):
                logprobs_BT = policy(micro).logprobs
                loss_BT, _ = compute_policy_loss(loss, logprobs_BT, None, torch.ones_like(logprobs_BT), micro.mask_BT)
                aggregate_loss(loss_BT, micro.mask_BT, np.full(len(micro.rows), weight)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _factor(step, settings.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if time.monotonic() - said > PROGRESS_S:
                logger.info("warm start: step %d of %d", step + 1, settings.steps)
                said = time.monotonic()
            await asyncio.sleep(0)
    policy.temperature = former


def _factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _fingerprint(policy: Policy, weights: Mapping[str, torch.Tensor], examples: Sequence[Example], config: Config) -> str:
    """Of everything that shapes the result."""
    training = config.training
    settings = (VERSION, torch.__version__, config.warm_start, training.micro_batch_tokens, training.tree, config.model)
    digest = hashlib.sha256(repr((settings, policy.tokenizer.chat_template, sorted(policy.tokenizer.get_vocab().items()))).encode())
    digest.update(repr(examples).encode("utf-8", "surrogatepass"))
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, scratch)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
