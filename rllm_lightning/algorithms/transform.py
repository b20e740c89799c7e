"""Episodes -> trajectory groups: which trajectories are compared with each other.

    episodes --name the unnamed--> --leave out masked episodes and empty trajectories--> groups by (task, trajectory name)

Trajectories are passed by reference: what is written to a group's trajectory stands in its episode too. To group in another
way, hand over a `traj_grouping_hook` with the signature of `group_by_task_and_name`, which puts the episodes' own trajectories into
groups, each into one at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rllm_lightning.algorithms.needs import as_float
from rllm_lightning.config import CompactFilteringConfig, TransformConfig
from rllm_lightning.types import DEFAULT_TRAJ_NAME, Episode, Trajectory, TrajectoryGroup

GroupingHook = Callable[[Sequence[Episode], TransformConfig, CompactFilteringConfig | None], list[TrajectoryGroup]]


def group_by_task_and_name(
    episodes: Sequence[Episode], transform_config: TransformConfig, compact_filtering_config: CompactFilteringConfig | None = None
) -> list[TrajectoryGroup]:
    """One group for each task and trajectory name, in first-seen order.

    Left out: episodes whose termination reason is masked, trajectories without steps and, under `drop_unnamed_traj`, unnamed ones.
    `metadata[i]` of a group holds `task_id`, `rollout_idx`, `termination_reason` and `is_correct` of its trajectory's episode.

    Raises:
        ValueError: a trajectory name holds ':' (it separates task and role in a group's id), or an episode has no id.
    """
    groups: dict[tuple[str, str], TrajectoryGroup] = {}
    for episode in episodes:
        if compact_filtering_config is not None and compact_filtering_config.should_mask(episode.termination_reason):
            continue
        for trajectory in episode.trajectories:
            if not trajectory.steps or (transform_config.drop_unnamed_traj and _is_unnamed(trajectory, transform_config)):
                continue
            if ":" in trajectory.name:
                raise ValueError(
                    f"episode {episode.id!r}: the trajectory name {trajectory.name!r} holds ':', which separates task and role; rename it"
                )
            if not episode.id:
                raise ValueError("an episode has no id, so its task is not known; set Episode.id to '{task_id}:{rollout_idx}'")
            group_id = f"{episode.task_id}:{trajectory.name}"
            group = groups.setdefault((episode.task_id, trajectory.name), TrajectoryGroup(group_id=group_id))
            group.trajectories.append(trajectory)
            group.metadata.append(
                {
                    "task_id": episode.task_id,
                    "rollout_idx": episode.rollout_idx,
                    "termination_reason": episode.termination_reason,
                    "is_correct": episode.is_correct,
                }
            )
    return list(groups.values())


def transform_episodes_to_trajectory_groups(
    episodes: Sequence[Episode],
    transform_config: TransformConfig,
    compact_filtering_config: CompactFilteringConfig | None = None,
    metrics_prefix: str = "groups",
    traj_grouping_hook: GroupingHook = group_by_task_and_name,
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Group the trajectories of a batch, and fill in what they lack.

    An unnamed trajectory becomes `{default_traj_name}_{position in its episode}` under `impute_missing_names` (unless unnamed ones
    are dropped). In broadcast mode a trajectory reward that is None becomes the sum of its steps' rewards, as in a workflow
    (rLLM takes the last step's); a reward of 0.0 is a reward.

    Returns:
        The groups, none of them empty, and `{metrics_prefix}/num_trajs_before_filter`, `num_trajs_after_filter`, `num_groups`,
        `avg_group_size`, `max_group_size`, `min_group_size`; zeros where nothing is left.

    Raises:
        ValueError: see `group_by_task_and_name`; a `traj_grouping_hook` returned something else than groups of the episodes' trajectories,
            or a trajectory twice.
    """
    if transform_config.impute_missing_names and not transform_config.drop_unnamed_traj:
        for episode in episodes:
            for position, trajectory in enumerate(episode.trajectories):
                if _is_unnamed(trajectory, transform_config):
                    trajectory.name = f"{transform_config.default_traj_name}_{position}"
    groups = traj_grouping_hook(episodes, transform_config, compact_filtering_config)
    if traj_grouping_hook is not group_by_task_and_name:
        _check_groups(groups, episodes, getattr(traj_grouping_hook, "__name__", repr(traj_grouping_hook)))
    groups = [group for group in groups if group.trajectories]
    if transform_config.broadcast:
        for group in groups:
            for trajectory in group.trajectories:
                _fill_reward(trajectory)

    sizes = [len(group.trajectories) for group in groups]
    metrics = {
        "num_trajs_before_filter": sum(len(episode.trajectories) for episode in episodes),
        "num_trajs_after_filter": sum(sizes),
        "num_groups": len(sizes),
        "avg_group_size": sum(sizes) / len(sizes) if sizes else 0.0,
        "max_group_size": max(sizes, default=0),
        "min_group_size": min(sizes, default=0),
    }
    return groups, {f"{metrics_prefix}/{name}": float(value) for name, value in metrics.items()}


def _check_groups(groups: object, episodes: Sequence[Episode], hook: str) -> None:
    """Whether a hook of the user's did what it is for. Advantages are written to trajectories: on a copy they would be lost, and the
    group that comes last would overwrite those of the others."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, TrajectoryGroup) for group in groups):
        raise ValueError(f"traj_grouping_hook {hook}: must return a list of TrajectoryGroup, got {_kinds(groups)}")
    own = {id(trajectory) for episode in episodes for trajectory in episode.trajectories}
    home: dict[int, str] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if not isinstance(trajectory, Trajectory):
                raise ValueError(f"traj_grouping_hook {hook}: group {group.group_id!r} holds a {type(trajectory).__name__}, no Trajectory")
            name = f"trajectory {trajectory.uid} ({trajectory.name!r})"
            if id(trajectory) not in own:
                raise ValueError(
                    f"traj_grouping_hook {hook}: {name} in group {group.group_id!r} is none of the episodes' own; group the objects "
                    "themselves, not copies"
                )
            if id(trajectory) in home:
                raise ValueError(
                    f"traj_grouping_hook {hook}: {name} stands twice, in groups {home[id(trajectory)]!r} and {group.group_id!r}"
                )
            home[id(trajectory)] = group.group_id


def _kinds(value: object) -> str:
    if not isinstance(value, list | tuple):
        return type(value).__name__
    return f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value}))}"


def _is_unnamed(trajectory: Trajectory, config: TransformConfig) -> bool:
    return trajectory.name in ("", DEFAULT_TRAJ_NAME, config.default_traj_name)


def _fill_reward(trajectory: Trajectory) -> None:
    """A step whose scorer gave None leaves the trajectory without a reward, which `collect_...` reports by name."""
    rewards = [step.reward for step in trajectory.steps]
    if trajectory.reward is None and None not in rewards:
        trajectory.reward = float(sum(map(as_float, rewards)))
