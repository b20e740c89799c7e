"""Groups to rows, minibatches, micro-batches and tensors."""

import torch

from rllm_lightning.trainer.batch import collate, make_train_batch, split_micro_batches, split_minibatches
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


def test_the_first_response_token_and_the_end_token_are_trained():
    """B15: prompt of 2, response r1 r2 eos. Over the 4 predicted tokens the mask is [0, 1, 1, 1]: 3 trainable, the response's length."""
    step = Step(prompt_ids=[11, 12], response_ids=[21, 22, 23])
    micro = collate(make_train_batch([TrajectoryGroup([Trajectory(steps=[step])], group_id="t:s")]).rows)
    predicted = torch.zeros(1, 4)
    predicted.scatter_(1, micro.predicting_columns_BT, micro.mask_BT)
    assert predicted.tolist() == [[0, 1, 1, 1]]
    assert micro.targets_BT.tolist() == [[21, 22, 23]]
    assert micro.mask_BT.sum() == len(step.response_ids)


def test_rows_of_different_length_are_padded_on_the_right():
    a, b = Step(prompt_ids=[1, 2, 3], response_ids=[4]), Step(prompt_ids=[5], response_ids=[6, 7])
    micro = collate(make_train_batch([TrajectoryGroup([Trajectory(steps=[a]), Trajectory(steps=[b])], group_id="t:s")]).rows)
    assert micro.input_ids_BL.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert micro.attention_mask_BL.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert micro.mask_BT.tolist() == [[1, 0], [1, 1]]
    assert micro.predicting_columns_BT[0, 0] == 2
    assert micro.predicting_columns_BT[1].tolist() == [0, 1]
    assert micro.padded([[9.0], [8.0, 7.0]]).tolist() == [[9, 0], [8, 7]]


def test_advantages_are_one_number_a_token():
    batch = make_train_batch([group_of(2, 3, 1)])
    batch.rows[0].step.advantage = 0.5
    batch.rows[1].step.advantage = [1.0, 2.0, 3.0]
    assert [row.advantages for row in batch.rows] == [[0.5, 0.5], [1.0, 2.0, 3.0], [0.0]]


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


def test_micro_batches_keep_the_token_budget_and_lose_no_row():
    rows = make_train_batch([group_of(*[(7 * i) % 13 + 1 for i in range(20)])]).rows
    parts = split_micro_batches(rows, 40)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    assert all(len(part) * max(row.num_tokens for row in part) <= 40 for part in parts)
    assert [len(part) for part in split_micro_batches(rows, 1)] == [1] * 20  # a row that is longer than the budget stands alone
