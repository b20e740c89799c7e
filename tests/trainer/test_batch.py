"""Groups to rows and minibatches."""

from rllm_lightning.trainer.batch import make_train_batch, split_minibatches
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup


def group_of(*lengths, task="t", role="solver", prompt=2):
    trajectories = [
        Trajectory(name=role, steps=[Step(prompt_ids=list(range(1, prompt + 1)), response_ids=[7] * n, logprobs=[-1.0] * n)])
        for n in lengths
    ]
    return TrajectoryGroup(trajectories, group_id=f"{task}:{role}")


def test_every_step_with_tokens_becomes_a_row_of_its_trajectory_and_group():
    multi = Trajectory(name="solver", steps=[Step(prompt_ids=[1], response_ids=[2]), Step(prompt_ids=[1, 2, 3], response_ids=[4, 5])])
    groups = [group_of(3, 1), TrajectoryGroup([multi], group_id="u:solver"), group_of(0)]
    batch = make_train_batch(groups)
    assert [(row.sequence, row.group) for row in batch.rows] == [(0, 0), (1, 0), (2, 1), (2, 1)]
    assert batch.num_skipped_steps == 1  # the empty response of the last group
    assert batch.rows[0].rollout_logprobs == [-1.0] * 3
    assert batch.rows[2].rollout_logprobs is None  # none given: unknown, not zero


def test_advantages_are_one_number_a_token():
    batch = make_train_batch([group_of(2, 3, 1)])
    batch.rows[0].step.advantage = 0.5
    batch.rows[1].step.advantage = [1.0, 2.0, 3.0]
    assert [row.advantages for row in batch.rows[:2]] == [[0.5, 0.5], [1.0, 2.0, 3.0]]


def test_rows_whose_group_the_estimator_dropped_are_not_trained_on():
    batch = make_train_batch([group_of(2, 3), group_of(1, task="u")])
    batch.rows[0].step.advantage, batch.rows[1].step.advantage = 0.0, 1.0  # a zero is an advantage, and counts in the denominators
    assert batch.with_advantages().rows == batch.rows[:2]


def test_minibatches_hold_whole_groups_and_every_row_once():
    batch = make_train_batch([group_of(1, 2, task=str(i)) for i in range(7)])
    parts = split_minibatches(batch, 3, key=(0, 5, 0))
    assert len(parts) == 3
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in batch.rows)
    homes = [{row.group for row in part} for part in parts]
    assert sum(len(home) for home in homes) == 7  # no group in two minibatches
    assert max(map(len, homes)) - min(map(len, homes)) <= 1
    again = split_minibatches(batch, 3, key=(0, 5, 0))
    assert [[id(r) for r in p] for p in again] == [[id(r) for r in p] for p in parts]
    assert [[id(r) for r in p] for p in split_minibatches(batch, 3, key=(0, 6, 0))] != [[id(r) for r in p] for p in parts]


def test_fewer_groups_than_minibatches_leave_no_empty_minibatch():
    parts = split_minibatches(make_train_batch([group_of(1, 2), group_of(1, task="u")]), 4, key=(0,))
    assert sorted(len(part) for part in parts) == [1, 2]
    assert split_minibatches(make_train_batch([]), 4, key=(0,)) == []
