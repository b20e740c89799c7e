"""Tasks of the environment `gridworld`: ways from one cell of a square board to another.

task.name=gridworld rllm.workflow.name=multi_turn rllm.workflow.workflow_args.environment=gridworld
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.task import TaskSet
from rllm_lightning.workflows.gridworld import MAX_SIZE, Cell, cell_of, good_moves, name_of, observe, read_move


@register_task("gridworld")
def gridworld(seed: int, *, size: int = 5, train_size: int = 400, val_size: int = 100) -> TaskSet:
    """Distinct pairs of start and goal, drawn from all size²·(size²-1); training and validation share none.

    `answer` is the number of moves of a shortest way, `solution` a first move on one (a warm start teaches the form of a reply by
    it). The reward function, which the environment has no use for, says whether a reply is a good first move.

    Args:
        seed: of the draw.
        size: cells along a side, 2 to 26.
        train_size, val_size: number of tasks.

    Raises:
        ValueError: a size out of range, or fewer pairs than tasks.
    """
    if not 2 <= size <= MAX_SIZE:
        raise ValueError(f"task.size: must be in [2, {MAX_SIZE}], got {size}")
    if train_size < 1 or val_size < 0:
        raise ValueError(f"task.train_size must be at least 1 and task.val_size at least 0, got {train_size} and {val_size}")
    cells: list[Cell] = [(column, row) for column in range(size) for row in range(size)]
    pairs = list(itertools.permutations(cells, 2))
    if train_size + val_size > len(pairs):
        raise ValueError(f"task.train_size, task.val_size: a board of size {size} has {len(pairs)} pairs of cells, fewer than asked for")
    draw = random.Random(seed)
    tasks = [_task(start, goal, size, draw) for start, goal in draw.sample(pairs, train_size + val_size)]
    return TaskSet(tasks[val_size:], tasks[:val_size], is_good_move)


def _task(start: Cell, goal: Cell, size: int, draw: random.Random) -> dict[str, Any]:
    ends = {"start": name_of(start), "goal": name_of(goal)}
    return {
        "id": f"gridworld:{ends['start']}-{ends['goal']}",
        "question": observe(start, goal),
        "answer": abs(start[0] - goal[0]) + abs(start[1] - goal[1]),
        "solution": draw.choice(good_moves(start, goal)),
        "data_source": "gridworld",
        "size": size,
        **ends,
    }


def is_good_move(task: dict[str, Any], response: str) -> float:
    """1.0 where the response is a direction that leads from the task's start nearer to its goal, else 0.0."""
    return float(read_move(response) in good_moves(cell_of(task["start"]), cell_of(task["goal"])))
