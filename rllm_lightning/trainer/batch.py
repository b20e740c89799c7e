"""Trajectory groups -> training rows -> minibatches -> micro-batches of tensors.

    TrajectoryGroup.trajectories[i].steps[j]  ->  Row(prompt, response)        one row for each model call
    rows                                      ->  minibatches                  whole groups, one optimizer step each
    minibatch                                 ->  micro-batches                sorted by length, one forward pass each

Shapes: B rows, L tokens of the longest row, T response tokens of the longest response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rllm_lightning.types import Step, TrajectoryGroup


@dataclass
class Row:
    """One model call as it is trained on: `prompt_ids` are given, every token of `response_ids` is predicted.

    `sequence` numbers the trajectory and `group` the trajectory group that the row belongs to. The log-prob lists hold one
    number for each response token, or are None until computed (`rollout_logprobs`: where the sampler gave none).
    """

    step: Step
    sequence: int
    group: int
    role: str
    rollout_logprobs: list[float] | None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.step.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        return self.step.response_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def advantages(self) -> list[float]:
        """The step's advantage, one number for each response token."""
        advantage = self.step.advantage
        if advantage is None:
            return [0.0] * len(self.response_ids)
        if isinstance(advantage, list):
            assert len(advantage) == len(self.response_ids), "advantages are checked where they are computed"
            return advantage
        return [advantage] * len(self.response_ids)


@dataclass
class TrainBatch:
    """The rows of one batch."""

    rows: list[Row]
    num_groups: int = 0
    num_skipped_steps: int = 0  # steps without prompt or response tokens: nothing to train


def make_train_batch(groups: Sequence[TrajectoryGroup]) -> TrainBatch:
    """One row for each step that has prompt and response tokens, in the order of the groups."""
    rows: list[Row] = []
    skipped = sequence = 0
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                if step.prompt_ids and step.response_ids:
                    rows.append(Row(step, sequence, index, group.group_role, list(step.logprobs) or None))
                else:
                    skipped += 1
            sequence += 1
    return TrainBatch(rows, len(groups), skipped)


def split_minibatches(batch: TrainBatch, num_minibatches: int, key: tuple[int, ...]) -> list[list[Row]]:
    """Deal the groups, shuffled by `key`, into `num_minibatches` lists of rows of nearly equal numbers of groups.

    A group is never split: its prompt is shared, and losses that average over prompts see all of it. With fewer groups than
    minibatches some would be empty; those are left out.
    """
    if num_minibatches == 1:
        return [batch.rows] if batch.rows else []
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    order = np.random.default_rng(seed).permutation(batch.num_groups)
    home = {int(group): position * num_minibatches // batch.num_groups for position, group in enumerate(order)}
    parts: list[list[Row]] = [[] for _ in range(num_minibatches)]
    for row in batch.rows:
        parts[home[row.group]].append(row)
    return [part for part in parts if part]


def split_micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Sort by length, longest first, and cut so that rows times longest row stays within `max_tokens` (one row at least)."""
    ordered = sorted(rows, key=lambda row: -row.num_tokens)
    parts: list[list[Row]] = []
    for row in ordered:
        if parts and (len(parts[-1]) + 1) * parts[-1][0].num_tokens <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


@dataclass
class MicroBatch:
    """Rows as tensors, padded on the right.

    `input_ids_BL` (padding: 0) with `attention_mask_BL` (padding: 0); response token t of row b stands at column
    `response_start_B[b] + t` and is predicted one column before. The [B, T] tensors are float32, 0 in padding; `mask_BT` is 1
    on response tokens.
    """

    rows: list[Row] = field(repr=False)
    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    response_start_B: Tensor
    mask_BT: Tensor

    @property
    def targets_BT(self) -> Tensor:
        """Response token ids; padding holds some valid id."""
        return self.input_ids_BL.gather(1, self._columns(0))

    @property
    def predicting_columns_BT(self) -> Tensor:
        """The column whose hidden state predicts each response token; padding holds some valid column."""
        return self._columns(-1)

    def _columns(self, shift: int) -> Tensor:
        steps = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
        return (self.response_start_B[:, None] + steps + shift).clamp(0, self.input_ids_BL.shape[1] - 1)

    def padded(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Numbers of each row's response tokens as [B, T], 0 in padding."""
        result = torch.zeros(self.mask_BT.shape, dtype=torch.float32)
        for index, numbers in enumerate(values):
            result[index, : len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
        return result.to(self.mask_BT.device)


def collate(rows: Sequence[Row], device: torch.device | str = "cpu") -> MicroBatch:
    """The tensors of one micro-batch."""
    assert rows, "a micro-batch has at least one row"
    longest = max(row.num_tokens for row in rows)
    num_targets = max(len(row.response_ids) for row in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention_mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), num_targets, dtype=torch.float32)
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = torch.tensor(row.prompt_ids + row.response_ids, dtype=torch.int64)
        attention_mask[index, : row.num_tokens] = 1
        mask[index, : len(row.response_ids)] = 1.0
    start = torch.tensor([len(row.prompt_ids) for row in rows], dtype=torch.int64)
    return MicroBatch(list(rows), input_ids.to(device), attention_mask.to(device), start.to(device), mask.to(device))
