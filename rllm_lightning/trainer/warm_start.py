"""Warm start: supervised steps on the task's own solutions before reinforcement learning.

The same policy, rows and `cross_entropy` loss as in the updates. The result is kept in the cache under a hash of all that
shapes it, so that runs which differ in the estimator only start from the very same weights, at once.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
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

VERSION = 1  # raise when the procedure changes, so that what the cache holds is not taken for its result


def warm_start(policy: Policy, dataset: Sequence[dict[str, Any]], config: Config) -> None:
    """Train `policy` in place for `warm_start.steps` steps on the solutions of `dataset`, or load the result of an earlier time.

    Raises:
        ConfigError: a task has no `solution`.
    """
    rows = solution_rows(policy, dataset, config)
    weights = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    path = cache_folder() / "warm_start" / f"{_fingerprint(weights, rows, config)}.safetensors"
    if path.is_file():
        for name, value in load_file(path).items():
            weights[name].data.copy_(value)
        return
    logger.info("warm start: %d supervised steps on %d solutions", config.warm_start.steps, len(rows))
    _train(policy, rows, config)
    _save(weights, path)


def solution_rows(policy: Policy, dataset: Sequence[dict[str, Any]], config: Config) -> list[Row]:
    """Each task's chat and its solution, up to and including the end token, as a training row."""
    chat = Chat(policy.tokenizer)
    stop_ids = chat.stop_ids(policy.model.generation_config)
    system_prompt = config.rllm.workflow.workflow_args.get("system_prompt")
    rows = []
    for index, task in enumerate(dataset):
        if not isinstance(task.get("solution"), str):
            raise ConfigError([f"warm_start.steps: task {task.get('id')!r} has no `solution` text to learn from; set warm_start.steps=0"])
        messages = chat_of(task, system_prompt)
        prompt = chat.render(messages)
        whole = chat.render([*messages, {"role": "assistant", "content": task["solution"]}], for_answer=False)
        if not whole.startswith(prompt):
            raise ConfigError(["warm_start.steps: the chat template writes an answer differently from its prompt; set warm_start.steps=0"])
        answer = chat.encode(whole[len(prompt) :])
        end = next((position + 1 for position, token in enumerate(answer) if token in stop_ids), len(answer))
        rows.append(Row(Step(prompt_ids=chat.encode(prompt), response_ids=answer[:end]), index, index, "", None))
    return rows


def _train(policy: Policy, rows: Sequence[Row], config: Config) -> None:
    settings, loss = config.warm_start, LOSSES.get("cross_entropy")
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    former, policy.temperature = policy.temperature, 1.0
    with torch.enable_grad(), policy.training_mode():
        for step in range(settings.steps):
            batch = _draw(rows, settings.batch_size, config.seed, step)
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
    policy.temperature = former


def _draw(rows: Sequence[Row], size: int, seed: int, step: int) -> list[Row]:
    """The batch of a step: epoch after epoch, each in an order of its own."""
    chosen: list[Row] = []
    for number in range(step * size, (step + 1) * size):
        epoch, position = divmod(number, len(rows))
        if position == 0 or not chosen:
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        chosen.append(rows[int(order[position])])
    return chosen


def _factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _fingerprint(weights: Mapping[str, torch.Tensor], rows: Sequence[Row], config: Config) -> str:
    digest = hashlib.sha256()
    settings = (VERSION, torch.__version__, config.warm_start, config.seed, config.training.micro_batch_tokens, config.model)
    digest.update(repr(settings).encode())
    digest.update(repr([(row.prompt_ids, row.response_ids) for row in rows]).encode())
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
