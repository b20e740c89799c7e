"""The gradients that several estimators have on the same rollouts at the same weights.

    batch + an estimator's advantages -> rows -> MinibatchUpdate (the loss that is trained), one prompt a forward pass
        -> G_u of each prompt: its square, its sketch, and the sum over the prompts -> signal, noise, cosines (`noise.py`)

The batch counts as one minibatch before its first update. In memory there are one micro-batch, one prompt's gradient, a sum for each
estimator, and the short sketches. One backward pass is made for each prompt and estimator. (Where a loss is linear in the advantages, as
`ppo`, `importance_sampling` and `reinforce` are while no ratio has moved, one pass for each trajectory would do for all estimators; with
eight rollouts a prompt that is more passes than estimators that one compares, and it holds for no other loss.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rllm_lightning.config import Config
from rllm_lightning.lab.replay.batches import Batch
from rllm_lightning.lab.replay.checkpoint import Checkpoint
from rllm_lightning.lab.replay.noise import with_errors
from rllm_lightning.lab.replay.projection import CountSketch
from rllm_lightning.lab.replay.results import GradientReport
from rllm_lightning.lab.replay.subjects import Subject
from rllm_lightning.lab.replay.weigh import StepAdvantages, put_advantages
from rllm_lightning.trainer.batch import MicroBatch, Row, TrainBatch, make_train_batch
from rllm_lightning.trainer.policy import Scores
from rllm_lightning.trainer.update import MinibatchUpdate, UpdateMetrics

DIMENSIONS = 16_384  # of a sketch: inner products to 1.1% of the norms
MAX_SUMS = 4 * 2**30  # bytes; where the estimators' sums would take more, their sketches have to do


class ByPrompt:
    """A policy that scores no two prompts in one pass; `prompt` is that of the last pass.

    Args:
        prompts: the number of the prompt that each trajectory group of the batch belongs to.
    """

    def __init__(self, policy: Any, prompts: Sequence[int]):
        self.policy, self.model, self.prompts = policy, policy.model, prompts
        self.prompt = -1

    def __call__(self, micro: MicroBatch) -> Scores:
        self.prompt = self.prompts[micro.rows[0].group]
        return self.policy(micro)

    def micro_batches(self, rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
        by_prompt: dict[int, list[Row]] = {}
        for row in rows:
            by_prompt.setdefault(self.prompts[row.group], []).append(row)
        for of_prompt in by_prompt.values():
            yield from self.policy.micro_batches(of_prompt, max_tokens)

    def parameters(self) -> Iterator[Tensor]:
        yield from self.policy.parameters()


class Collector:
    """Takes the shares of a loss as `MinibatchUpdate` hands them out, and makes of them, prompt by prompt, squares and sketches of the
    gradient, and its sum over all."""

    def __init__(self, parameters: Sequence[Tensor], sketch: CountSketch, num_prompts: int, keep_sum: bool):
        self.parameters, self.sketch = parameters, sketch
        self.squares_N = np.zeros(num_prompts)
        self.sketches_NK = np.zeros((num_prompts, sketch.dimensions))
        self.sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters] if keep_sum else []
        self.policy: ByPrompt | None = None
        self._prompt, self._scale = -1, 1.0

    def begin(self, policy: ByPrompt, scale: float) -> None:
        """The shares that follow come from passes of `policy`; `scale` makes of a prompt's part of the gradient its own gradient."""
        self.policy, self._scale = policy, scale

    def __call__(self, share: Tensor, sync: bool = True) -> None:
        assert self.policy is not None, "begin() comes first"
        if self.policy.prompt != self._prompt:
            self.flush()
            self._prompt = self.policy.prompt
        share.backward()

    def flush(self) -> None:
        """Put away the gradient of the prompt that is over."""
        gradients = [None if p.grad is None else p.grad * self._scale for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self._prompt >= 0:
            self.squares_N[self._prompt] = sum(float(g.double().square().sum()) for g in gradients if g is not None)
            self.sketches_NK[self._prompt] = self.sketch(gradients).numpy()
            for total, gradient in zip(self.sums, gradients, strict=False):
                if gradient is not None:
                    total += gradient
        self._prompt = -1


def measure_gradients(
    batches: Sequence[tuple[Batch, Mapping[str, StepAdvantages]]],
    subjects: Sequence[Subject],
    checkpoint: Checkpoint,
    config: Config,
    *,
    is_own_checkpoint: bool = True,
    dimensions: int = DIMENSIONS,
    seed: int = 0,
) -> GradientReport:
    """Gradients of all `subjects` on `batches`, each with the advantages of its model calls by label.

    A prompt is a task of a batch: its trajectory groups (one a role) share their luck. Rollouts of other weights than the checkpoint's
    are weighted by the ratio to the sampler's log-probs, as the loss does it; without those log-probs they count as if they were its own.

    Args:
        config: the run's; its loss, aggregation, KL and entropy terms are trained, its micro-batches hold.
        is_own_checkpoint: the checkpoint is of the run that the batches are of.
        dimensions, seed: of the sketches.

    Raises:
        ValueError: no batch has a row to train on.
    """
    policy = checkpoint.policy
    prepared = [_prepare(batch, advantages) for batch, advantages in batches]
    num_prompts = sum(part.num_prompts for part in prepared)
    rows = [row for p in prepared for row in p.train.rows]
    if not rows:
        raise ValueError("no gradient can be taken: the batches hold no model call with prompt and response tokens")
    on_policy = is_own_checkpoint and all(
        row.step.weight_version == checkpoint.weight_version if row.step.weight_version is not None else batch.step == checkpoint.step + 1
        for p, (batch, _) in zip(prepared, batches, strict=True)
        for row in p.train.rows
    )
    drift = _score_rows(rows, policy, config, on_policy)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    num_parameters = sum(p.numel() for p in parameters)
    sketch = CountSketch([p.numel() for p in parameters], dimensions, seed, parameters[0].device)
    keep_sums = num_parameters * 4 * len(subjects) <= MAX_SUMS
    collectors = [Collector(parameters, sketch, num_prompts, keep_sums) for _ in subjects]
    for subject, collector in zip(subjects, collectors, strict=True):
        _collect(subject, prepared, policy, config, collector)
    values, errors = with_errors(
        _products(collectors), np.stack([c.squares_N for c in collectors]), np.stack([c.sketches_NK for c in collectors])
    )
    return GradientReport(
        labels=[subject.label for subject in subjects],
        step=checkpoint.step,
        steps=[batch.step for batch, _ in batches],
        on_policy=on_policy,
        drift=drift,
        num_prompts=num_prompts,
        num_rows=len(rows),
        num_parameters=num_parameters,
        dimensions=sketch.dimensions,
        relative_error=sketch.relative_error,
        exact_sums=keep_sums or sketch.is_exact,
        values=values,
        errors=errors,
    )


@dataclass(frozen=True)
class _Prepared:
    """A batch as rows; `prompts[g]` numbers the prompt of group g, from 0."""

    batch: Batch
    advantages: Mapping[str, StepAdvantages]
    train: TrainBatch
    prompts: list[int]

    @property
    def num_prompts(self) -> int:
        return len(set(self.prompts))


def _prepare(batch: Batch, advantages: Mapping[str, StepAdvantages]) -> _Prepared:
    numbers: dict[str, int] = {}
    prompts = [numbers.setdefault(group.task_id, len(numbers)) for group in batch.groups]
    return _Prepared(batch, advantages, make_train_batch(batch.groups), prompts)


def _collect(subject: Subject, prepared: Sequence[_Prepared], policy: Any, config: Config, collector: Collector) -> None:
    """Let `collector` have the gradients of one estimator on all batches. Prompts without a trained row keep a gradient of 0."""
    config = replace(config, rllm=replace(config.rllm, algorithm=subject.algorithm))
    first = 0
    for part in prepared:
        put_advantages(part.batch, part.advantages[subject.label])
        rows = part.train.with_advantages().rows
        if rows:
            by_prompt = ByPrompt(policy, [first + prompt for prompt in part.prompts])
            collector.begin(by_prompt, float(part.num_prompts))
            with policy.training_mode():
                MinibatchUpdate(rows, config, by_prompt, collector, UpdateMetrics()).backward()  # type: ignore[arg-type]
            collector.flush()
        first += part.num_prompts


def _score_rows(rows: Sequence[Row], policy: Any, config: Config, on_policy: bool) -> float:
    """Give the rows the log-probs that their loss compares with; returns the drift from the sampler."""
    algorithm = config.rllm.algorithm
    gaps: list[np.ndarray] = []
    for micro in policy.micro_batches(rows, config.training.micro_batch_tokens):
        with torch.no_grad():
            now = policy(micro).logprobs.double().cpu().numpy()
        reference = policy.reference_logprobs(micro).tolist() if algorithm.kl_beta > 0 else None
        for index, row in enumerate(micro.rows):
            length = len(row.response_ids)
            if row.rollout_logprobs is not None:
                gaps.append(now[index, :length] - np.array(row.rollout_logprobs))
            if reference is not None:
                row.ref_logprobs = reference[index][:length]
    if not on_policy or algorithm.rollout_correction.bypass_mode:
        for row in rows:
            row.old_logprobs = row.rollout_logprobs
    gap_N = np.concatenate(gaps) if gaps else np.array([math.nan])
    return float(np.mean(np.expm1(gap_N) - gap_N))


def _products(collectors: Sequence[Collector]) -> np.ndarray:
    """[E, E] inner products of the estimators' sums."""
    if not collectors[0].sums:
        sums_EK = np.stack([collector.sketches_NK.sum(axis=0) for collector in collectors])
        return sums_EK @ sums_EK.T
    found = np.zeros((len(collectors), len(collectors)))
    for i, a in enumerate(collectors):
        for j, b in enumerate(collectors[: i + 1]):
            found[i, j] = found[j, i] = sum(float((x.double() * y.double()).sum()) for x, y in zip(a.sums, b.sums, strict=True))
    return found
