"""Episodes to groups: names, masks, keys, filled rewards, metrics."""

import copy

import pytest

from rllm_lightning.algorithms.transform import group_by_task_and_name, transform_episodes_to_trajectory_groups
from rllm_lightning.config import CompactFilteringConfig, TransformConfig
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory, TrajectoryGroup


def transform(episodes, *args, **config):
    return transform_episodes_to_trajectory_groups(episodes, TransformConfig(**config), *args)


def test_one_group_for_each_task_and_name_in_first_seen_order(make):
    episodes = [
        make.episode("b:0", names=("solver", "judge"), is_correct=True, reason=TerminationReason.ENV_DONE),
        make.episode("a:0", names=("solver",)),
        make.episode("b:1", names=("judge", "solver")),
    ]
    groups, _ = transform(episodes)
    assert [group.group_id for group in groups] == ["b:solver", "b:judge", "a:solver"]
    assert [group.group_role for group in groups] == ["solver", "judge", "solver"]
    assert groups[0].trajectories[1] is episodes[2].trajectories[1]
    assert groups[0].metadata[0] == {
        "task_id": "b",
        "rollout_idx": "0",
        "termination_reason": TerminationReason.ENV_DONE,
        "is_correct": True,
    }
    assert [item["rollout_idx"] for item in groups[1].metadata] == ["0", "1"]


def test_task_ids_that_hold_colons_stay_apart(make):
    """B07: gsm8k:1 and gsm8k:2 are two tasks; rLLM split at the first colon."""
    episodes = [make.episode(f"gsm8k:{task}:{rollout}") for task in (1, 2) for rollout in (0, 1)]
    groups, _ = transform(episodes)
    assert [(group.task_id, len(group.trajectories)) for group in groups] == [("gsm8k:1", 2), ("gsm8k:2", 2)]


def test_equal_prompts_with_different_answers_are_different_tasks(make):
    """B07: the key is the task's id, never its text."""
    episodes = [make.episode(f"row{row}:{rollout}", task={"question": "1+1?"}) for row in (0, 1) for rollout in (0, 1)]
    groups, _ = transform(episodes)
    assert [len(group.trajectories) for group in groups] == [2, 2]


def test_unnamed_trajectories_are_named_by_their_position(make):
    episodes = [make.episode(f"a:{i}", names=("default_traj_name", "judge", "")) for i in range(2)]
    groups, _ = transform(episodes)
    assert [group.group_role for group in groups] == ["default_traj_name_0", "judge", "default_traj_name_2"]
    assert [len(group.trajectories) for group in groups] == [2, 2, 2]
    again, _ = transform(episodes)
    assert [group.group_id for group in again] == [group.group_id for group in groups]


def test_unnamed_trajectories_are_left_out_where_asked(make):
    episode = make.episode("a:0", names=("default_traj_name", "judge"))
    groups, metrics = transform([episode], drop_unnamed_traj=True)
    assert [group.group_role for group in groups] == ["judge"]
    assert (metrics["groups/num_trajs_before_filter"], metrics["groups/num_trajs_after_filter"]) == (2, 1)
    assert len(episode.trajectories) == 2


def test_unnamed_trajectories_share_the_default_role_where_neither_is_asked(make):
    groups, _ = transform([make.episode("a:0", names=("default_traj_name",) * 2)], impute_missing_names=False)
    assert [(group.group_role, len(group.trajectories)) for group in groups] == [("default_traj_name", 2)]


def test_a_name_with_a_colon_is_refused(make):
    with pytest.raises(ValueError, match=r"a:0.*'turn:1' holds ':'"):
        transform([make.episode("a:0", names=("turn:1",))])


def test_an_episode_without_id_is_refused_and_not_merged_with_others(make):
    """B07: all tasks without an id would share one baseline."""
    with pytest.raises(ValueError, match=r"no id"):
        transform([make.episode("")])


def test_masked_episodes_and_trajectories_without_steps_are_left_out(make):
    episodes = [
        make.episode("a:0", reason=TerminationReason.TIMEOUT),
        make.episode("a:1", reason=TerminationReason.ENV_DONE),
        make.episode("a:2"),  # no reason counts as unknown
        Episode(id="a:3", trajectories=[Trajectory(name="solver", reward=1.0)]),
    ]
    groups, metrics = transform(episodes, CompactFilteringConfig(enable=True, mask_timeout=True, mask_unknown=True))
    assert [item["rollout_idx"] for item in groups[0].metadata] == ["1"]
    assert (metrics["groups/num_trajs_before_filter"], metrics["groups/num_trajs_after_filter"]) == (4, 1)
    groups, _ = transform(episodes, CompactFilteringConfig(enable=False, mask_timeout=True))
    assert len(groups[0].trajectories) == 3


def test_a_missing_reward_is_the_sum_of_the_steps_rewards_and_0_is_a_reward(make):
    """B05: a trajectory reward of 0.0 beside a step reward of 1.0 stays 0.0; a group may mix."""
    episodes = [
        Episode(id="a:0", trajectories=[make.trajectory(0.0, step_rewards=[1.0])]),
        Episode(id="a:1", trajectories=[make.trajectory(None, step_rewards=[0.25, 0.5])]),
    ]
    groups, _ = transform(episodes)
    assert [t.reward for t in groups[0].trajectories] == [0.0, 0.75]


def test_a_missing_reward_stays_missing_without_broadcast_or_with_a_failed_step(make):
    """B05: so that collecting advantages names the trajectory."""
    episodes = [Episode(id="a:0", trajectories=[make.trajectory(None, step_rewards=[1.0])])]
    groups, _ = transform(episodes, broadcast=False)
    assert groups[0].trajectories[0].reward is None
    episodes = [Episode(id="a:0", trajectories=[make.trajectory(None, step_rewards=[1.0, None])])]
    groups, _ = transform(episodes)
    assert groups[0].trajectories[0].reward is None


def test_metrics_count_groups_and_sizes(make):
    episodes = [make.episode(f"a:{i}") for i in range(3)] + [make.episode("b:0")]
    _, metrics = transform(episodes, None, "train_groups")
    assert metrics == {
        "train_groups/num_trajs_before_filter": 4,
        "train_groups/num_trajs_after_filter": 4,
        "train_groups/num_groups": 2,
        "train_groups/avg_group_size": 2,
        "train_groups/max_group_size": 3,
        "train_groups/min_group_size": 1,
    }


@pytest.mark.parametrize("episodes", [[], [Episode()], [Episode(id="a:0", trajectories=[Trajectory()])]])
def test_metrics_are_0_where_nothing_is_left(episodes):
    groups, metrics = transform(episodes)
    assert groups == []
    assert metrics["groups/num_groups"] == metrics["groups/avg_group_size"] == metrics["groups/min_group_size"] == 0


def test_a_hook_groups_in_its_own_way_and_rewards_are_filled_all_the_same(make):
    def all_in_one(episodes, transform_config, compact_filtering_config):
        groups = group_by_task_and_name(episodes, transform_config, compact_filtering_config)
        for group in groups[1:]:
            groups[0].trajectories += group.trajectories
            group.trajectories = []
        return groups

    episodes = [Episode(id=f"{task}:0", trajectories=[make.trajectory(None, step_rewards=[1.0])]) for task in "ab"]
    groups, metrics = transform_episodes_to_trajectory_groups(episodes, TransformConfig(), traj_grouping_hook=all_in_one)
    assert [t.reward for group in groups for t in group.trajectories] == [1.0, 1.0]
    assert metrics["groups/num_groups"] == 1


@pytest.mark.parametrize(
    ("grouped", "message"),
    [
        (lambda a, b: None, "must return a list of TrajectoryGroup, got NoneType"),
        (lambda a, b: [[a, b]], "must return a list of TrajectoryGroup, got a list of list"),
        (lambda a, b: [TrajectoryGroup([a], "x:s"), b], "got a list of Trajectory, TrajectoryGroup"),
        (lambda a, b: [TrajectoryGroup([a, a.steps[0]], "x:s")], "group 'x:s' holds a Step, no Trajectory"),
        (lambda a, b: [TrajectoryGroup([a, copy.copy(b)], "x:s")], r"trajectory b \('s'\) in group 'x:s' is none of the episodes' own"),
        (lambda a, b: [TrajectoryGroup([a], "x:s"), TrajectoryGroup([b, a], "y:s")], r"trajectory a .* twice, in groups 'x:s' and 'y:s'"),
        (lambda a, b: [TrajectoryGroup([a, b, a], "x:s")], "twice, in groups 'x:s' and 'x:s'"),
    ],
)
def test_a_hook_that_returns_something_else_is_told_so(grouped, message):
    """Advantages would be written to objects that nobody trains on, or over each other."""

    def my_hook(episodes, transform_config, compact_filtering_config):
        return grouped(*(trajectory for episode in episodes for trajectory in episode.trajectories))

    a, b = (Trajectory(uid=uid, name="s", steps=[Step()], reward=1.0) for uid in "ab")
    episodes = [Episode(id="t:0", trajectories=[a]), Episode(id="t:1", trajectories=[b])]
    with pytest.raises(ValueError, match=f"traj_grouping_hook my_hook: .*{message}"):
        transform_episodes_to_trajectory_groups(episodes, TransformConfig(), traj_grouping_hook=my_hook)
