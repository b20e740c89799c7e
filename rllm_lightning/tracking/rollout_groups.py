"""Rollouts as the trajectory browser of the report shows them: the episodes of one task -> a group for each role, as plain JSON data.

    group   {mode, step, task, role, num, prompts, members}      num: members that there are, of which `members` are the first
    member  {id, reward, advantage, tokens, end, correct, calls, omitted, error}      calls is None where only its numbers are kept
    call    {prompt, text | tokens, advantage, gap}              prompt: its place in the group's prompts; gap: one number a token

`advantage` of a call is one number, or one a token. `gap` is what the trainer's log-prob of a sampled token, before the update, was above
the sampler's. Everything is cut to a size, and what was cut is marked or counted, so that a group has one that is known beforehand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rllm_lightning.tracking.episode_rows import advantage_of, prompt_of, shorten
from rllm_lightning.tracking.secrets import MASK, environment_secrets, scrub, scrub_text
from rllm_lightning.types import Episode, Step, Trajectory

MAX_MEMBERS = 256  # of a group
MAX_WITH_TEXT = 16  # members of a group that are shown in full
MAX_CHARACTERS = 4000  # of a prompt or a response
MAX_TOKENS = 1500  # of a response that are shown one by one
MAX_CHARACTERS_OF_MEMBER = 12_000  # of all its responses and later prompts
MAX_NAME = 200  # characters of a task's id or a role
DIGITS = 4  # of rewards and advantages, behind the point

Group = dict[str, Any]


class TaskGroups:
    """The groups of one task, made from its episodes one by one; no episode is kept."""

    def __init__(self, mode: str, step: int, task: str, token_texts: Mapping[str, str]):
        self.mode, self.step, self.task = mode, step, shorten(task, MAX_NAME)
        self.token_texts = token_texts
        self.by_role: dict[str, Group] = {}
        self._prompts: dict[str, dict[str, int]] = {}  # of a role: prompt -> its place

    def add(self, episode: Episode) -> None:
        """One more rollout; one that came to no trajectory is a member of the group without a role."""
        for trajectory in episode.trajectories or [Trajectory(name="")]:
            group = self._group(trajectory.name)
            group["num"] += 1
            if len(group["members"]) < MAX_MEMBERS:
                group["members"].append(self._member(group, episode, trajectory))

    def _group(self, role: str) -> Group:
        empty = {"mode": self.mode, "step": self.step, "task": self.task, "role": shorten(role, MAX_NAME), "num": 0}
        return self.by_role.setdefault(role, empty | {"prompts": [], "members": []})

    def _member(self, group: Group, episode: Episode, trajectory: Trajectory) -> dict[str, Any]:
        advantages = [value for step in trajectory.steps if (value := advantage_of(step)) is not None]
        error = episode.info.get("error")
        member: dict[str, Any] = {
            "id": shorten(episode.rollout_idx, MAX_NAME),
            "reward": _number(trajectory.reward),
            "advantage": _number(sum(advantages) / len(advantages)) if advantages else None,
            "tokens": trajectory.num_response_tokens,
            "end": (episode.termination_reason or "unknown"),
            "correct": episode.is_correct,
            "calls": None,
            "omitted": 0,
            "error": None if error is None else shorten(json.dumps(scrub(error, keys=False), indent=1), MAX_CHARACTERS),
        }
        if len(group["members"]) < MAX_WITH_TEXT:
            member["calls"] = self._calls(group, trajectory)
            member["omitted"] = len(trajectory.steps) - len(member["calls"])
        return member

    def _calls(self, group: Group, trajectory: Trajectory) -> list[dict[str, Any]]:
        """The first calls, as many as have room. Of a later one's prompt only what is new since the call before."""
        calls: list[dict[str, Any]] = []
        num_left, chat = MAX_CHARACTERS_OF_MEMBER, []  # type: int, list[dict[str, Any]]
        for step in trajectory.steps:
            if num_left <= 0:
                break
            num_known = len(chat) if step.chat_completions[: len(chat)] == chat else 0
            prompt = shorten(scrub_text(prompt_of(step, num_known)), MAX_CHARACTERS)
            chat = step.chat_completions
            calls.append({"prompt": self._prompt(group, trajectory.name, prompt), **call_of(step, self.token_texts)})
            num_left -= min(len(step.model_response), MAX_CHARACTERS) + (len(prompt) if len(calls) > 1 else 0)
        return calls

    def _prompt(self, group: Group, role: str, prompt: str) -> int:
        places = self._prompts.setdefault(role, {})
        if prompt not in places:
            places[prompt] = len(group["prompts"])
            group["prompts"].append(prompt)
        return places[prompt]


def call_of(step: Step, token_texts: Mapping[str, str]) -> dict[str, Any]:
    """The answer of one model call: token by token where the texts of all its tokens are known, else as one text."""
    call: dict[str, Any] = {}
    tokens = _tokens(step, token_texts)
    if tokens is None:
        call["text"] = shorten(scrub_text(step.model_response), MAX_CHARACTERS)
    else:
        call["tokens"] = tokens[:MAX_TOKENS]
        call["more"] = len(tokens) - len(call["tokens"])
    if isinstance(step.advantage, list):
        call["advantage"] = [_number(value) for value in step.advantage[:MAX_TOKENS]]
    else:
        call["advantage"] = _number(step.advantage)
    old = step.info.get("old_logprobs")
    if tokens and isinstance(old, list) and len(old) == len(step.logprobs) == len(tokens):
        call["gap"] = [_gap(*pair) for pair in zip(old[:MAX_TOKENS], step.logprobs[:MAX_TOKENS], strict=True)]
    return call


def _tokens(step: Step, token_texts: Mapping[str, str]) -> list[str] | None:
    """None where one is unknown, or where they would spell out what was masked in the text."""
    tokens = [token_texts.get(str(i)) for i in step.response_ids]
    if not tokens or None in tokens:
        return None
    joined = "".join(tokens)  # type: ignore[arg-type]
    whole = f"{step.model_response}{step.thought}{step.model_output.text if step.model_output else ''}"
    is_masked = MASK in whole and MASK not in joined
    return None if is_masked or scrub_text(joined, environment_secrets()) != joined else tokens  # type: ignore[return-value]


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, DIGITS)


def _gap(trainer: float | None, sampler: float | None) -> float | None:
    return None if trainer is None or sampler is None else _number(trainer - sampler)
