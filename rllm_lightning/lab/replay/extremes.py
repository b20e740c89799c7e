"""The trajectories that two estimators weigh most differently, with what was asked and answered.

Advantages are compared in units of their root mean square in the batch, so that a mere factor is no difference. Of one group and pair
only the trajectory with the largest difference is taken: its siblings would say the same again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from rllm_lightning.lab.replay.agreement import Array, size
from rllm_lightning.lab.replay.batches import Batch
from rllm_lightning.tracking.episode_rows import prompt_of, shorten
from rllm_lightning.tracking.secrets import scrub_text
from rllm_lightning.types import Trajectory

NUM_EXTREMES = 5  # kept for each pair
MAX_CHARACTERS = 2000  # of a prompt or a response
NEGLIGIBLE = 1e-6  # a smaller difference is none


@dataclass(frozen=True)
class Extreme:
    """`a` and `b` are the advantages of the two estimators, `difference` that of a's over b's after division by their sizes."""

    step: int
    task_id: str
    rollout_idx: str
    role: str
    reward: float
    a: float
    b: float
    difference: float
    prompt: str
    response: str


class Extremes:
    """The `NUM_EXTREMES` largest so far."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Extreme]] = []
        self._count = 0

    def add(self, batch: Batch, a_N: Array, b_N: Array) -> None:
        size_a, size_b = size(a_N), size(b_N)
        difference_N = np.nan_to_num(a_N / (size_a or 1.0) - b_N / (size_b or 1.0))
        start = 0
        for group in batch.groups:
            end = start + len(group.trajectories)
            index = int(np.argmax(np.abs(difference_N[start:end])))
            gap = float(difference_N[start + index])
            self._count += 1
            if abs(gap) > NEGLIGIBLE and (len(self._heap) < NUM_EXTREMES or abs(gap) > self._heap[0][0]):
                trajectory, metadata = group.trajectories[index], group.metadata[index]
                extreme = Extreme(
                    batch.step,
                    group.task_id,
                    str(metadata["rollout_idx"]),
                    group.group_role,
                    float(trajectory.reward or 0.0),
                    float(a_N[start + index]),
                    float(b_N[start + index]),
                    gap,
                    *_texts(trajectory),
                )
                push = heapq.heappush if len(self._heap) < NUM_EXTREMES else heapq.heapreplace
                push(self._heap, (abs(gap), -self._count, extreme))
            start = end

    def largest(self) -> list[Extreme]:
        """The largest first."""
        return [extreme for *_, extreme in sorted(self._heap, key=lambda entry: (-entry[0], -entry[1]))]


def _texts(trajectory: Trajectory) -> tuple[str, str]:
    """What was asked first, and what was answered in all steps."""
    answers = "\n\n".join(step.model_response for step in trajectory.steps)
    return shorten(scrub_text(prompt_of(trajectory.steps[0])), MAX_CHARACTERS), shorten(scrub_text(answers), MAX_CHARACTERS)
