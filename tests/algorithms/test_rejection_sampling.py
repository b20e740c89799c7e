"""Which groups are trained on, in the three modes, and what waits across batches."""

import json

import pytest

from rllm_lightning.algorithms.rejection_sampling import RejectionSamplingState, apply_rejection_sampling_and_filtering
from rllm_lightning.config import RejectionSamplingConfig


@pytest.fixture
def batch(make):
    """Task -> whether each of its episodes is solved; gives episodes, and one group a task that shares their trajectories."""

    def build(**solved):
        episodes = [make.episode(f"{task}:{i}", float(ok), bool(ok)) for task, of_task in solved.items() for i, ok in enumerate(of_task)]
        groups = []
        for task in solved:
            group = make.group([], f"{task}:solver")
            group.trajectories = [e.trajectories[0] for e in episodes if e.task_id == task]
            groups.append(group)
        return episodes, groups

    return build


def apply(batch, state=None, **config):
    return apply_rejection_sampling_and_filtering(*batch, RejectionSamplingConfig(**config), state or RejectionSamplingState())


def ids(groups):
    return [group.group_id for group in groups]


def test_mode_none_drops_nothing_so_that_one_rollout_a_task_trains(batch):
    groups, episodes, metrics = apply(batch(a=[1], b=[0]))
    assert ids(groups) == ["a:solver", "b:solver"]
    assert len(episodes) == 2
    assert metrics["batch/groups_after_filter"] == 2


def test_mode_group_drops_small_groups(batch):
    groups, episodes, metrics = apply(batch(a=[1], b=[0, 1], c=[1, 1, 1]), mode="group", min_trajs_per_group=2)
    assert ids(groups) == ["b:solver", "c:solver"]
    assert len(episodes) == 6
    assert metrics["batch/groups_before_filter"] == 3
    assert metrics["batch/groups_after_filter"] == 2
    assert metrics["batch/groups_dropped_insufficient_trajs"] == 1


def test_mode_group_drops_groups_of_equal_rewards_where_asked(batch):
    groups, _, metrics = apply(batch(a=[1], b=[0, 1], c=[1, 1, 1]), mode="group", min_trajs_per_group=1, filter_uniform_groups=True)
    assert ids(groups) == ["b:solver"]
    assert metrics["batch/groups_dropped_insufficient_trajs"] == 0


def test_equal_rewards_with_float_residue_are_equal(batch):
    episodes, groups = batch(a=[1, 1])
    groups[0].trajectories[0].reward, groups[0].trajectories[1].reward = 0.1 + 0.2, 0.3
    kept, _, _ = apply((episodes, groups), mode="group", filter_uniform_groups=True)
    assert kept == []


def test_filtering_by_rewards_names_the_trajectory_without_one(batch):
    """B05."""
    episodes, groups = batch(a=[1, 0])
    groups[0].trajectories[1].reward = None
    with pytest.raises(ValueError, match=rf"a:solver.*{groups[0].trajectories[1].uid}"):
        apply((episodes, groups), mode="group", filter_uniform_groups=True)


def test_mode_episode_waits_for_enough_partly_solved_tasks_and_releases_once(batch):
    """B37: three batches with one partly solved task each, two wanted: nothing, both, nothing."""
    state = RejectionSamplingState()
    released = []
    for name in ("first", "second", "third"):
        groups, episodes, metrics = apply(batch(**{name: [1, 0]}), state, mode="episode", min_partial_solve_tasks=2)
        released.append(ids(groups))
        assert metrics["batch/groups_after_filter"] == len(groups)
        assert len(episodes) == 2 * len(groups)
    assert released == [[], ["first:solver", "second:solver"], []]
    assert ids(state.accumulated_groups) == ["third:solver"]
    groups, _, _ = apply(batch(fourth=[0, 1]), state, mode="episode", min_partial_solve_tasks=2)
    assert ids(groups) == ["third:solver", "fourth:solver"]


def test_mode_episode_keeps_groups_that_are_not_partly_solved_too(batch):
    state = RejectionSamplingState()
    assert apply(batch(a=[1, 1], b=[0, 0]), state, mode="episode")[0] == []
    groups, _, _ = apply(batch(c=[1, 0]), state, mode="episode")
    assert ids(groups) == ["a:solver", "b:solver", "c:solver"]


def test_what_waits_survives_a_checkpoint_and_shares_its_trajectories_again(batch):
    """B37: plain data, as strict JSON."""
    state = RejectionSamplingState()
    apply(batch(first=[1, 0]), state, mode="episode", min_partial_solve_tasks=2)
    restored = RejectionSamplingState()
    restored.load_state_dict(json.loads(json.dumps(state.state_dict(), allow_nan=False)))
    assert restored == state
    assert restored.accumulated_groups[0].trajectories[1] is restored.accumulated_episodes[1].trajectories[0]
    groups, episodes, _ = apply(batch(second=[0, 1]), restored, mode="episode", min_partial_solve_tasks=2)
    assert ids(groups) == ["first:solver", "second:solver"]
    assert len(episodes) == 4


def test_a_task_counts_over_all_its_episodes_also_those_that_failed(batch):
    """B54: the one episode of c that gave a group was right, the others crashed: partly solved."""
    episodes, groups = batch(a=[1, 1], b=[0, 0], c=[1, 0, 0], d=[1, 0])
    groups[2].trajectories = groups[2].trajectories[:1]
    _, _, metrics = apply((episodes, groups))
    assert metrics["batch/num_tasks"] == 4
    assert (metrics["batch/solve_none"], metrics["batch/solve_all"], metrics["batch/solve_partial"]) == (0.25, 0.25, 0.5)


def test_an_empty_batch_is_no_exception():
    groups, episodes, metrics = apply(([], []), mode="group", filter_uniform_groups=True)
    assert (groups, episodes) == ([], [])
    assert set(metrics.values()) == {0}
