"""`retry`: the task's own question, answered again with feedback until it is right. For any task with a reward function."""

from __future__ import annotations

from typing import Any

from rllm_lightning.registry import register_environment
from rllm_lightning.workflows.environment import Environment
from rllm_lightning.workflows.reward import RewardFunction, score


@register_environment("retry")
class RetryEnvironment(Environment):
    """Every reply is an answer to the task; a wrong one is met with feedback, a right one ends the episode.

    An answer is right where the reward function says `is_correct`, or says nothing of it and gives a score of at least 1.
    A step's reward is what its answer adds to the score of the one before. So rewards add up to the score of the last answer,
    whenever the episode ends, and an answer that undoes an earlier one is charged for it.

    Args:
        reward_function: `(task, response) -> float | RewardOutput`, maybe async. Text in `RewardOutput.metadata["feedback"]` is
            told instead of `feedback`.
        feedback: what is told after a wrong answer.

    `state_key` is the answers so far: two rollouts are in the same state where they were wrong in the same way.
    """

    def __init__(self, *, reward_function: RewardFunction, feedback: str = "That is not right. Try again."):
        if not callable(reward_function):
            raise ValueError(f"environment retry: needs a reward function of (task, response), got {reward_function!r}")
        self.reward_function = reward_function
        self.feedback = feedback
        self._task: dict[str, Any] = {}
        self._score = 0.0
        self._answers: list[str] = []

    def reset(self, task: dict[str, Any]) -> None:
        """The task asks its own question."""
        self._task, self._score, self._answers = task, 0.0, []

    async def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        outcome = await score(self.reward_function, self._task, action)
        self._answers.append(action)
        is_correct = outcome.reward >= 1 if outcome.is_correct is None else outcome.is_correct
        gained, self._score = outcome.reward - self._score, outcome.reward
        info: dict[str, Any] = outcome.metadata | {"is_correct": is_correct}
        if len(self._answers) == 1:
            info["metrics"] = {"first_answer_acc": float(is_correct)}
        return info.get("feedback", self.feedback), gained, is_correct, info

    def state_key(self) -> str:
        return repr(self._answers)
