"""`gridworld`: find the way over a square board, one move a turn. The state is where one stands, however one got there.

Cells are named as on a chess board: a letter for the column from the left, a number for the row from the bottom. Its tasks come from
`task.name=gridworld`.
"""

from __future__ import annotations

import re
import string
from typing import Any

from rllm_lightning.registry import register_environment
from rllm_lightning.workflows.environment import Environment

Cell = tuple[int, int]  # column and row, from 0

MOVES: dict[str, Cell] = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
MAX_SIZE = len(string.ascii_lowercase)
_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)


def name_of(cell: Cell) -> str:
    """(0, 0) -> "a1"."""
    return f"{string.ascii_lowercase[cell[0]]}{cell[1] + 1}"


def cell_of(name: str) -> Cell:
    """ "a1" -> (0, 0)."""
    return string.ascii_lowercase.index(name[0]), int(name[1:]) - 1


def observe(at: Cell, goal: Cell) -> str:
    """What the agent is told in a state; the question of a task that begins there."""
    return f"at {name_of(at)}, go to {name_of(goal)}"


def read_move(reply: str) -> str | None:
    """The first of the words up, down, left and right in a reply; None where there is none."""
    found = _MOVE.search(reply)
    return found.group().lower() if found else None


def move(at: Cell, direction: str, size: int) -> Cell:
    """The cell one step on; the same cell at the edge of the board."""
    column, row = at[0] + MOVES[direction][0], at[1] + MOVES[direction][1]
    return (column, row) if 0 <= column < size and 0 <= row < size else at


def good_moves(at: Cell, goal: Cell) -> list[str]:
    """The directions that lead nearer to the goal; none at the goal."""

    def distance(cell: Cell) -> int:
        return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])

    return [direction for direction, (x, y) in MOVES.items() if distance((at[0] + x, at[1] + y)) < distance(at)]


@register_environment("gridworld")
class GridWorld(Environment):
    """One move a turn, until the goal is reached.

    A task says `size`, `start` and `goal` (`{"size": 4, "start": "a1", "goal": "c2"}`). The reward is 1 for the move that reaches the
    goal, else 0. A reply without a direction, or one against the edge, changes nothing.

    `state_key` is the cell: steps of different rollouts that were taken from the same cell are comparable.
    """

    def __init__(self) -> None:
        self._size = 0
        self._at = self._goal = (0, 0)

    def reset(self, task: dict[str, Any]) -> str:
        """
        Raises:
            ValueError: the task lacks a key (it is not one of `task.name=gridworld`).
        """
        if missing := [key for key in ("size", "start", "goal") if key not in task]:
            raise ValueError(f"environment gridworld: task {task.get('id')!r} has no {', '.join(missing)}; choose task.name=gridworld")
        self._size, self._at, self._goal = task["size"], cell_of(task["start"]), cell_of(task["goal"])
        return observe(self._at, self._goal)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        direction = read_move(action)
        if direction is not None:
            self._at = move(self._at, direction, self._size)
        arrived = self._at == self._goal
        return observe(self._at, self._goal), float(arrived), arrived, {"is_correct": arrived, "direction": direction}

    def state_key(self) -> str:
        return name_of(self._at)
