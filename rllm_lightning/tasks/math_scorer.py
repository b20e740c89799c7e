"""Scorer `math`: whether a response holds the same mathematics as the answer, by the package `math-verify`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from rllm_lightning.registry import register_scorer
from rllm_lightning.tasks.scoring import Extract, answer_text, extract_answer
from rllm_lightning.tasks.worker import Worker, WorkerError
from rllm_lightning.types import RewardOutput
from rllm_lightning.workflows.reward import RewardFunction

logger = logging.getLogger(__name__)

WORKER = Worker("rllm_lightning.tasks.math_worker")


@dataclass(frozen=True)
class MathReward:
    """1.0 for an equal expression, else 0.0. What cannot be judged, or not in time, counts as wrong, and
    `metadata["scorer_error"]` says why."""

    checks_every_task: ClassVar[bool] = False  # some milliseconds each
    time_limit_s: float
    extract: Extract

    def __call__(self, task: dict[str, Any], response: str) -> RewardOutput:
        given = extract_answer(response, self.extract)
        if given is None:
            return RewardOutput(0.0, is_correct=False)
        try:
            is_equal = WORKER.call("is_equal", given, answer_text(task), limit_s=self.time_limit_s)
        except (WorkerError, ValueError) as error:
            logger.warning("%s: judging %.80r failed (%s); it counts as wrong", task.get("id"), given, error)
            return RewardOutput(0.0, is_correct=False, metadata={"scorer_error": str(error)})
        return RewardOutput(float(is_equal), is_correct=is_equal)

    def check(self, task: dict[str, Any], solution: str) -> None:
        outcome = self(task, solution)
        if not outcome.is_correct:
            reason = outcome.metadata.get("scorer_error", "they are different")
            raise ValueError(
                f"task.scorer=math does not find the answer {answer_text(task)!r:.60} in the solution {solution!r:.60}: {reason}"
            )


@register_scorer("math")
def math(extract: Extract, *, time_limit_s: float = 5.0) -> RewardFunction:
    """The same mathematics, by the package math-verify: numbers, expressions, sets, equations, in LaTeX or plain.

    Args:
        time_limit_s: seconds of CPU time for one answer; beyond it the answer counts as wrong.
    """
    if time_limit_s <= 0:
        raise ValueError(f"time_limit_s: must be above 0 seconds, got {time_limit_s}")
    if find_spec("math_verify") is None:
        raise ValueError("task.scorer: math needs the package math-verify: pip install 'rllm-lightning[math]'")
    return MathReward(time_limit_s, extract)
