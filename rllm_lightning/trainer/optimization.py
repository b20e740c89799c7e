"""Optimizer and learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from rllm_lightning.config import AlgorithmConfig, TrainingConfig


def make_optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; weight decay applies to matrices only (not to biases and norms)."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def schedule_factor(schedule: str, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate of optimizer step i = 0, 1, ...

    Warm-up: (i+1)/w for i < w, so that step w-1 has the full rate. After it, with x = (i-w)/(total-w) in [0, 1]: constant 1,
    linear 1-x, cosine (1+cos πx)/2. Past the last step the factor stays where it ended.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0

    return factor


def warmup_steps_of(algorithm: AlgorithmConfig, total_steps: int) -> int:
    """Optimizer steps of warm-up: `warmup_steps` where it is given, else the share `warmup_steps_ratio` of all, rounded up."""
    if algorithm.warmup_steps >= 0:
        return min(algorithm.warmup_steps, total_steps)
    return min(total_steps, math.ceil(algorithm.warmup_steps_ratio * total_steps - 1e-9))
