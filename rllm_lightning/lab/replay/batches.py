"""The batches of a run, as it trained on them: its episodes grouped and filtered by its own settings.

    episodes of a step -> transform_episodes_to_trajectory_groups -> apply_rejection_sampling_and_filtering -> Batch

The functions are those of training, and so is what they remember from batch to batch. Grouping is that of a run without a
`traj_grouping_hook`, which no file tells of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rllm_lightning.algorithms.needs import rewards_of
from rllm_lightning.algorithms.rejection_sampling import RejectionSamplingState, apply_rejection_sampling_and_filtering
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import RejectionSamplingConfig, RLLMConfig, TransformConfig
from rllm_lightning.lab.replay.episodes import read_step
from rllm_lightning.types import Episode, TerminationReason, Trajectory, TrajectoryGroup

FAILED = (TerminationReason.ERROR, TerminationReason.TIMEOUT)


@dataclass(frozen=True)
class Batch:
    """What was trained on in one step: `groups`, empty where filtering left nothing.

    `num_failed` of the `num_episodes` ended in an error or a time-out. `problem`: why no estimator can be applied to it.
    """

    step: int
    groups: list[TrajectoryGroup]
    num_episodes: int
    num_failed: int
    problem: str | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def read_batches(files: Mapping[int, Path], config: RLLMConfig) -> Iterator[Batch]:
    """The batch of each step's file, in the order of the files."""
    rejection = config.rejection_sample if config.rejection_sample.enable else RejectionSamplingConfig()
    state = RejectionSamplingState()
    for step, path in files.items():
        episodes = read_step(path)
        num_failed = sum(episode.termination_reason in FAILED for episode in episodes)
        try:
            groups = _groups(episodes, config, rejection, state)
        except ValueError as error:  # a reward that is no number: in training it ended the run
            yield Batch(step, [], len(episodes), num_failed, str(error))
            continue
        yield Batch(step, groups, len(episodes), num_failed)
        del episodes, groups  # before the next are read


def _groups(
    episodes: list[Episode], config: RLLMConfig, rejection: RejectionSamplingConfig, state: RejectionSamplingState
) -> list[TrajectoryGroup]:
    groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig(), config.compact_filtering)
    groups, _, _ = apply_rejection_sampling_and_filtering(episodes, groups, rejection, state)
    for group in groups:
        rewards_of(group)
    return groups
