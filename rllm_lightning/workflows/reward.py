"""From what a reward function returns to a checked `RewardOutput`.

A reward function is `(task, response) -> float | RewardOutput`, or an `async` one of the same.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any

import numpy as np

from rllm_lightning.types import RewardOutput

Reward = float | RewardOutput
RewardFunction = Callable[[dict[str, Any], str], Reward | Awaitable[Reward]]


async def score(reward_function: RewardFunction, task: dict[str, Any], response: str) -> RewardOutput:
    """The reward of `response` to `task`; its `reward` is a finite Python float (True and False count as 1 and 0).

    The function runs on the event loop: one that blocks for long should be async.

    Raises:
        ValueError: the function returned anything else, such as None, text, NaN or infinity. Never a silent zero.
    """
    result = reward_function(task, response)
    if inspect.isawaitable(result):
        result = await result
    return checked(result, f"task {task.get('id')!r}: the reward function")


def raised(error: Exception) -> str:
    """What a reward function raised, and where: `raised KeyError: 'x' (file.py:12)`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def checked(result: Any, source: str) -> RewardOutput:
    """What a reward function returned, as a `RewardOutput` with a finite Python float.

    Raises:
        ValueError: it is anything else; `source` says of what.
    """
    output = result if isinstance(result, RewardOutput) else RewardOutput(result)
    value = output.reward
    if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
        raise ValueError(f"{source} returned {result!r}; expected a finite number or a RewardOutput")
    return RewardOutput(float(value), output.is_correct, output.metadata)
