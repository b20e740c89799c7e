"""`multi_turn`: the model and an environment by turns, with tools in between.

    environment.reset -> observation -> the model's reply --a tool call--> results -----------> the next turn
                                              └───────────an action----> environment.step --> observation, reward

Every turn is one step of the one trajectory, with the reward that its action got. Its prompt is the conversation so far: messages are
only ever appended, so that the engine can go on from the very tokens that were sampled (`rollout/conversations.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from rllm_lightning.registry import register_workflow
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine, current_request
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.types import Episode, ModelOutput, Step, TerminationEvent, TerminationReason, Trajectory
from rllm_lightning.workflows.environment import MakeEnvironment, act, environment_maker, messages_of
from rllm_lightning.workflows.reward import RewardFunction
from rllm_lightning.workflows.single_turn import chat_of
from rllm_lightning.workflows.tool_format import ToolCall, tool_format_of
from rllm_lightning.workflows.tools import ERROR, ToolBox
from rllm_lightning.workflows.workflow import Workflow


@register_workflow("multi_turn")
class MultiTurnWorkflow(Workflow):
    """An agent that acts on an environment, turn after turn; the episode holds one trajectory, `agent`.

    Args:
        environment: a registered environment's name; from Python also a class, or a function that makes one.
        environment_args: keywords for it.
        reward_function: handed to environments that take one (`retry`).
        max_turns: model calls in an episode, those that call tools included.
        max_episode_tokens: sampled tokens of all turns together (None: no limit but that of each response).
        tools: functions that the model may call, or their import paths; see `tools.py`. A reply with calls is no action: the next
            turn's prompt tells what came of them.
        tool_timeout: seconds that one call may take.
        system_prompt: system message put before the task's own messages.

    | the episode ends                                                    | as                               |
    |---------------------------------------------------------------------|----------------------------------|
    | where the environment is done                                       | `ENV_DONE`                       |
    | after `max_turns` turns                                             | `MAX_TURNS_EXCEEDED`             |
    | where a reply was cut, or `max_episode_tokens` are used up          | `MAX_RESPONSE_LENGTH_EXCEEDED`   |
    | before a turn whose prompt is longer than `data.max_prompt_length`  | `MAX_PROMPT_LENGTH_EXCEEDED`     |
    | after `timeout` seconds                                             | `TIMEOUT`                        |
    | where environment or reward function fail                           | `ERROR`, without trajectories    |

    A cut reply is an action all the same. Where an episode ends early, the trajectory holds the turns until then. The trajectory's
    reward is the sum of its steps' as the environment gave them. Keywords of `run` are sampling overrides.

    Steps carry `info["state_key"]`, so estimators that compare steps of equal states (`gigpo`) can be used. Metrics of an episode:
    `agent_acc`, `num_turns`, with tools `num_tool_calls` and `num_tool_errors`, and those that the environment gives.
    """

    provides = frozenset({"state_keys"})

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        environment: str | MakeEnvironment = "retry",
        environment_args: Mapping[str, Any] | None = None,
        reward_function: RewardFunction | None = None,
        max_turns: int = 4,
        max_episode_tokens: int | None = None,
        tools: Sequence[str | Callable[..., Any]] = (),
        tool_timeout: float = 10.0,
        system_prompt: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(rollout_engine, executor, **kwargs)
        for name, limit in (("max_turns", max_turns), ("max_episode_tokens", max_episode_tokens)):
            if limit is not None and limit < 1:
                raise ValueError(f"rllm.workflow.workflow_args.{name}: must be at least 1, got {limit}")
        self.environment = environment_maker(environment, environment_args, reward_function)()
        self.max_turns = max_turns
        self.max_episode_tokens = max_episode_tokens
        self.toolbox = ToolBox(tools, tool_timeout)
        self.tool_format = tool_format_of(rollout_engine.setup.tokenizer) if self.toolbox.tools else None
        self.system_prompt = system_prompt

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        if cls.__init__ is MultiTurnWorkflow.__init__:  # a subclass may want a real engine
            cls(ScriptedEngine(EngineSetup(), answers=["-"]), Executor(), **arguments)

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        trajectory = Trajectory(name="agent", task=task)
        try:
            reason = await self._converse(task, trajectory.steps, kwargs)
        except (TerminationEvent, asyncio.CancelledError):  # a limit; after any other error nothing is to be trained on
            self.commit(trajectory=trajectory)
            raise
        return self.postprocess_episode(Episode(trajectories=[trajectory]), reason)

    async def _converse(self, task: dict[str, Any], steps: list[Step], sampling: dict[str, Any]) -> TerminationReason:
        """Turn after turn, until something ends it. A step is added once what came of it is known."""
        messages = await self._opening(task)
        observed = len(messages)  # of the messages, those up to the latest observation
        for _ in range(self.max_turns):
            state = self._state_key(messages, observed)
            output = await self._ask(messages, steps, sampling)
            step = Step.from_model_output(output, messages)
            step.info["state_key"], step.observation = state, messages[-1]["content"]
            cut = output.finish_reason == "length"
            calls = self.tool_format.read(step.model_response) if self.tool_format and not cut else []
            if calls:
                answers = await self._call_tools(calls, step)
                messages = [*step.chat_completions, *answers]
            else:
                messages = [*step.chat_completions, *await self._act(step)]
                observed = len(messages)
            steps.append(step)
            if cut:
                return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
            if step.done:
                return TerminationReason.ENV_DONE
        return TerminationReason.MAX_TURNS_EXCEEDED

    # ---------------------------------------------------------------------------------------------------------- one turn

    async def _opening(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages before the first turn."""
        observation = self.environment.reset(task)
        if inspect.isawaitable(observation):
            observation = await observation
        opening = task if observation is None else {"messages": messages_of(observation)}
        system_prompt = self.system_prompt
        if self.tool_format and not self.tool_format.native:
            system_prompt = "\n\n".join(filter(None, [system_prompt, self.tool_format.system_text(self.toolbox.schemas)]))
        return chat_of(opening, system_prompt)

    def _state_key(self, messages: list[dict[str, Any]], observed: int) -> str:
        """Equal for equal states: that of the environment with what tools said since, else the whole conversation."""
        if not hasattr(self.environment, "state_key"):
            return _digest(messages)
        key = str(self.environment.state_key())
        return f"{key} {_digest(messages[observed:])}" if messages[observed:] else key

    async def _ask(self, messages: list[dict[str, Any]], steps: list[Step], sampling: dict[str, Any]) -> ModelOutput:
        overrides = dict(sampling)
        if self.max_episode_tokens is not None:
            left = self.max_episode_tokens - sum(len(step.response_ids) for step in steps)
            if left < 1:
                raise TerminationEvent(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
            overrides["max_tokens"] = min(left, self.rollout_engine.params_for(current_request(), sampling).max_tokens)
        if self.tool_format and self.tool_format.native:
            overrides["tools"] = self.toolbox.schemas
        return await self.rollout_engine.get_model_response(messages, **overrides)

    async def _act(self, step: Step) -> list[dict[str, Any]]:
        """Let the environment answer to the reply; the messages that follow it."""
        step.action = step.model_response
        outcome = await act(self.environment, step.action)
        step.reward, step.done = outcome.reward, outcome.done
        step.info = outcome.info | step.info
        return messages_of(outcome.observation)

    async def _call_tools(self, calls: Sequence[ToolCall], step: Step) -> list[dict[str, Any]]:
        """Make the calls, one after the other; the messages that tell of them."""
        assert self.tool_format is not None
        messages, errors = [], 0
        for call in calls:
            text = f"{ERROR}{call.problem}" if call.problem else await self.toolbox.call(call.name, call.arguments)
            errors += text.startswith(ERROR)
            messages.append(self.tool_format.result(call.name, text))
        step.action = [{"name": call.name, "arguments": call.arguments} for call in calls]
        step.info |= {"num_tool_calls": len(calls), "num_tool_errors": errors}
        return messages

    # ------------------------------------------------------------------------------------------------------- the episode

    def assign_episode_correctness(self, episode: Episode) -> None:
        """As the environment last said; where it never did, by the reward."""
        said = [step.info["is_correct"] for t in episode.trajectories for step in t.steps if "is_correct" in step.info]
        if said:
            episode.is_correct = bool(said[-1])
        else:
            super().assign_episode_correctness(episode)

    def collect_metrics(self, episode: Episode) -> None:
        super().collect_metrics(episode)
        steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
        episode.metrics["num_turns"] = float(len(steps))
        for name in ("num_tool_calls", "num_tool_errors") if self.toolbox.tools else ():
            episode.metrics[name] = float(sum(step.info[name] for step in steps if name in step.info))
        for step in steps:
            episode.metrics |= step.info.get("metrics", {})


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True, default=str).encode()).hexdigest()[:16]
