"""The workflow of one question and one answer: ask the model once, score what it says."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

from rllm_lightning.registry import register_workflow
from rllm_lightning.rollout.engine import RolloutEngine
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory
from rllm_lightning.workflows.reward import RewardFunction, score
from rllm_lightning.workflows.workflow import Workflow


def chat_of(task: dict[str, Any], system_prompt: str | None = None) -> list[dict[str, Any]]:
    """The messages that open a task: its `messages`, else its `question` as the user's message.

    `system_prompt` comes first, unless the task's own messages begin with a system message.

    Raises:
        ValueError: the task has neither messages nor a question.
    """
    messages = list(task.get("messages") or [])
    if not messages:
        if not isinstance(task.get("question"), str):
            raise ValueError(f"task {task.get('id')!r} has neither `messages` nor a `question` text; its keys: {', '.join(map(str, task))}")
        messages = [{"role": "user", "content": task["question"]}]
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


@register_workflow("single_turn")
class SingleTurnWorkflow(Workflow):
    """One model call a task; the episode holds one trajectory, `solver`, with one step.

    Args:
        reward_function: `(task, response) -> float | RewardOutput`, may be async. What a `RewardOutput` holds as `is_correct`
            decides about the episode's correctness (None: a reward above 0 does), and its `metadata` goes to the trajectory's
            `info` (a reward vector, for instance, as `metadata["rewards"]`).
        system_prompt: system message put before each task's own messages.

    The episode ends as `MAX_RESPONSE_LENGTH_EXCEEDED` when the answer was cut (it is scored all the same), else `ENV_DONE`.
    Keywords of `run` are sampling overrides for the model call. An answer that could not be scored is an `ERROR` without
    trajectories, so that it is never trained on.
    """

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        reward_function: RewardFunction,
        system_prompt: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(rollout_engine, executor, **kwargs)
        if not callable(reward_function):
            raise ValueError(f"single_turn: reward_function must be a function of (task, response), got {reward_function!r}")
        self.reward_function = reward_function
        self.system_prompt = system_prompt

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        messages = chat_of(task, self.system_prompt)
        output = await self.rollout_engine.get_model_response(messages, **kwargs)
        step = Step.from_model_output(output, messages)
        step.action = step.model_response
        outcome = await score(self.reward_function, task, step.model_response)
        step.reward, step.done = outcome.reward, True
        trajectory = Trajectory(name="solver", task=task, steps=[step], info=dict(outcome.metadata))
        cut = output.finish_reason == "length"
        reason = TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED if cut else TerminationReason.ENV_DONE
        episode = self.postprocess_episode(Episode(trajectories=[trajectory]), reason)
        if outcome.is_correct is not None:
            episode.is_correct = outcome.is_correct
        return episode
