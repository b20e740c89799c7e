"""Trajectory groups -> training rows -> minibatches; and what a micro-batch is.

    TrajectoryGroup.trajectories[i].steps[j]  ->  Row(prompt, response)        one row for each model call
    rows                                      ->  minibatches                  whole groups, one optimizer step each
    minibatch                                 ->  micro-batches (`layout.py`)  one forward pass each

Shapes: B rows, T response tokens of the longest response, N response tokens of all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def advantages(self) -> list[float]:
        """The step's advantage, one number for each response token."""
        advantage = self.step.advantage
        assert advantage is not None, "rows without an advantage are not trained on"
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

    def with_advantages(self) -> TrainBatch:
        """Only the rows that the estimator gave an advantage (it may drop a group): the others count in no denominator."""
        return replace(self, rows=[row for row in self.rows if row.step.advantage is not None])


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


@dataclass
class MicroBatch:
    """Rows laid out as tensors for one forward pass. How rows share tokens is a matter of the layout (`layout.py`); a reader
    of scores only sees [B, T].

    `input_ids`, `attention_mask` and `position_ids` go to the model ([S, L]: S sequences of L tokens, padded on the right to the longest
    of `lengths`; the mask is [S, L], or [S, 1, L, L] where tokens see a tree). The N response tokens of all rows, row after row, are
    `targets_N`; each is predicted at sequence `sequences_N`, column `columns_N`. `mask_BT` is 1.0 where row b has a response token t,
    and 0.0 in padding.
    """

    rows: list[Row] = field(repr=False)
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lengths: list[int]
    sequences_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    mask_BT: Tensor

    @property
    def num_response_tokens(self) -> int:
        return sum(len(row.response_ids) for row in self.rows)

    def padded(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers of each row's response tokens as [B, T], 0 in padding."""
        return pad(values, self.mask_BT.shape[1], dtype).to(self.mask_BT.device)

    def unpadded(self, values_SL: Tensor) -> Tensor:
        """The values of all sequences' tokens, one sequence behind the other."""
        return torch.cat([values[:length] for values, length in zip(values_SL, self.lengths, strict=True)])

    def gather(self, outputs: Tensor) -> Tensor:
        """The model's outputs [N, D] where a response token is predicted, of [S, L, D] or of those without padding; gradients pass.

        In a tree the first tokens of all responses are predicted in one place. There the gradients add up in one order: behind an
        index they would on a CPU in that in which the threads come by, and two runs would differ in their last digits.
        """
        if outputs.ndim == 3:
            return functional.embedding(self.sequences_N * outputs.shape[1] + self.columns_N, outputs.flatten(0, 1))
        first_S = torch.tensor([0, *accumulate(self.lengths)], device=self.columns_N.device)
        return functional.embedding(first_S[self.sequences_N] + self.columns_N, outputs)

    def spread(self, values_N: Tensor) -> Tensor:
        """One number for each response token as [B, T], 0 in padding; gradients pass."""
        return values_N.new_zeros(self.mask_BT.shape).masked_scatter(self.mask_BT.bool(), values_N)


def response_mask(rows: Sequence[Row]) -> Tensor:
    """`mask_BT` of some rows."""
    return pad([[1.0] * len(row.response_ids) for row in rows], max(len(row.response_ids) for row in rows), torch.float32)


def pad(values: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    """Lists of different lengths as [B, `width`], 0 behind their ends."""
    result = torch.zeros(len(values), width, dtype=dtype)
    for index, numbers in enumerate(values):
        result[index, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
    return result
