"""How ranks share out tasks and rows, without other processes."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_lightning.config import load_config
from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.ranks import Ranks, merge
from rllm_lightning.types import Step
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow


def test_eight_tasks_are_shared_out_to_two_ranks_without_one_twice_or_none():
    """B22: disjoint, and together all 8."""
    tasks = [{"id": str(i)} for i in range(8)]
    first, second = (Ranks(rank, 2).share(tasks) for rank in (0, 1))
    assert [task["id"] for task in first] == ["0", "2", "4", "6"]
    assert [task["id"] for task in second] == ["1", "3", "5", "7"]


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 3))
def test_merging_undoes_the_sharing(num_items, world_size, num_each):
    items = [(item, k) for item in range(num_items) for k in range(num_each)]
    shares = [
        [(item, k) for item in Ranks(rank, world_size).share(range(num_items)) for k in range(num_each)] for rank in range(world_size)
    ]
    assert merge(shares, num_items) == items


def test_a_rank_that_lost_an_episode_is_noticed():
    with pytest.raises(ValueError, match="each task needs equally many"):
        merge([["a", "a"], ["b"]], 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_every_row_is_computed_by_one_rank(lengths, world_size):
    rows = [Row(Step(prompt_ids=[1], response_ids=[2] * n), index, index // 2, "", None) for index, n in enumerate(lengths)]
    shares = [Ranks(rank, world_size).share_rows(rows) for rank in range(world_size)]
    assert sorted(id(row) for share in shares for row in share) == sorted(map(id, rows))


def test_ranks_that_ask_the_same_question_get_other_answers():
    """B22: two ranks, seed 42, one prompt, temperature 1, 32 tokens, groups of 4: all eight differ, and a rerun repeats them."""
    tasks = [{"id": name, "question": "hello"} for name in ("first", "second")]

    def answers(rank):
        model, tokenizer = tiny_model(0)
        engine = HFEngine(EngineSetup(model, tokenizer, train=SamplingParams(max_tokens=32)))
        workflows = UnifiedWorkflowEngine(SingleTurnWorkflow, {"reward_function": lambda *_: 1.0}, engine, load_config(["seed=42"]))
        episodes = asyncio.run(workflows.execute_tasks([task for task in Ranks(rank, 2).share(tasks) for _ in range(4)]))
        workflows.shutdown()
        return [tuple(episode.trajectories[0].steps[0].response_ids) for episode in episodes]

    found = answers(0) + answers(1)
    assert len(set(found)) == 8
    assert answers(0) + answers(1) == found
