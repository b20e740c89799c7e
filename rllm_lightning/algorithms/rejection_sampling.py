"""Which trajectory groups are trained on.

none     every group
group    groups that are large enough and, if asked for, whose rewards differ
episode  every group, but only once enough partly solved tasks have come together: batches wait in `RejectionSamplingState`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_lightning.algorithms.metrics import solve_counts
from rllm_lightning.algorithms.needs import rewards_of
from rllm_lightning.algorithms.ragged import Ragged
from rllm_lightning.config import RejectionSamplingConfig
from rllm_lightning.types import Episode, TrajectoryGroup


@dataclass
class RejectionSamplingState:
    """What waits from one batch to the next in mode `episode`. `state_dict` is plain data, for a checkpoint."""

    accumulated_groups: list[TrajectoryGroup] = field(default_factory=list)
    accumulated_episodes: list[Episode] = field(default_factory=list)
    num_partial_solve_tasks: int = 0

    def reset(self) -> None:
        self.accumulated_groups, self.accumulated_episodes, self.num_partial_solve_tasks = [], [], 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulated_groups": [group.to_dict() for group in self.accumulated_groups],
            "accumulated_episodes": [episode.to_dict() for episode in self.accumulated_episodes],
            "num_partial_solve_tasks": self.num_partial_solve_tasks,
        }

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Groups and episodes share their trajectories again, by uid."""
        self.accumulated_episodes = [Episode.from_dict(item) for item in data["accumulated_episodes"]]
        self.accumulated_groups = [TrajectoryGroup.from_dict(item) for item in data["accumulated_groups"]]
        self.num_partial_solve_tasks = data["num_partial_solve_tasks"]
        by_uid = {trajectory.uid: trajectory for episode in self.accumulated_episodes for trajectory in episode.trajectories}
        for group in self.accumulated_groups:
            group.trajectories = [by_uid.get(trajectory.uid, trajectory) for trajectory in group.trajectories]


def apply_rejection_sampling_and_filtering(
    episodes: list[Episode], groups: list[TrajectoryGroup], config: RejectionSamplingConfig, state: RejectionSamplingState
) -> tuple[list[TrajectoryGroup], list[Episode], dict[str, float]]:
    """Choose what is trained on.

    Mode `none` drops nothing (rLLM drops groups under two). Mode `group` drops groups smaller than `min_trajs_per_group` and, with
    `filter_uniform_groups`, those whose rewards are all equal. Mode `episode` keeps batches in `state` until
    `min_partial_solve_tasks` tasks were partly solved, then releases all of them once and starts anew (rLLM forgets them with
    every batch); until then both lists are empty.

    Args:
        episodes: all of this batch, failed ones too.
        groups: of this batch.

    Returns:
        Groups, episodes, and the metrics of this batch: `batch/num_tasks`; the fractions of its tasks with no, all, and some
        episodes solved, `batch/solve_none|solve_all|solve_partial`; `batch/groups_before_filter` (of this batch),
        `batch/groups_after_filter` (that are returned), `batch/groups_dropped_insufficient_trajs`.

    Raises:
        ValueError: with `filter_uniform_groups`, a reward is None, NaN or infinite.
    """
    solved = list(solve_counts(episodes).values())
    num_none = sum(num_correct == 0 for _, num_correct in solved)
    num_all = sum(num_correct == num_episodes for num_episodes, num_correct in solved)
    num_partial = len(solved) - num_none - num_all
    fractions = {"solve_none": num_none, "solve_all": num_all, "solve_partial": num_partial}
    kept, num_small = list(groups), 0
    if config.mode == "group":
        kept = [group for group in groups if len(group.trajectories) >= config.min_trajs_per_group]
        num_small = len(groups) - len(kept)
        if config.filter_uniform_groups:
            kept = _with_spread(kept)
    elif config.mode == "episode":
        state.accumulated_groups += groups
        state.accumulated_episodes += episodes
        state.num_partial_solve_tasks += num_partial
        kept, episodes = [], []
        if state.num_partial_solve_tasks >= config.min_partial_solve_tasks:
            kept, episodes = state.accumulated_groups, state.accumulated_episodes
            state.reset()
    metrics = {
        "batch/num_tasks": float(len(solved)),
        **{f"batch/{name}": num / max(len(solved), 1) for name, num in fractions.items()},
        "batch/groups_before_filter": float(len(groups)),
        "batch/groups_after_filter": float(len(kept)),
        "batch/groups_dropped_insufficient_trajs": float(num_small),
    }
    return kept, episodes, metrics


def _with_spread(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    rewards = Ragged.of([rewards_of(group) for group in groups])
    return [group for group, differs in zip(groups, rewards.differs_G, strict=True) if differs]
