"""Rollouts as rows of a table that people read: one row a model call, long texts and long tables cut and marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_lightning.tracking.secrets import environment_secrets, scrub_text
from rllm_lightning.types import Episode, Step, Trajectory

COLUMNS = ["task", "rollout", "role", "prompt", "response", "reward", "advantage", "correct", "termination"]
MAX_ROWS = 64
MAX_CHARACTERS = 4000  # of a prompt or a response


def episode_rows(episodes: Sequence[Episode], max_rows: int = MAX_ROWS, max_characters: int = MAX_CHARACTERS) -> list[list[Any]]:
    """One list a model call, under `COLUMNS`. Calls beyond `max_rows` are counted in one last row.

    The reward is the trajectory's, the advantage the step's (the mean over its tokens where they differ); None where there is none.
    """
    calls = [(e, t, s) for e in episodes for t in e.trajectories for s in t.steps]
    secrets = environment_secrets()
    rows = [_row(*call, secrets, max_characters) for call in calls[:max_rows]]
    if len(calls) > max_rows:
        rows.append([f"… {len(calls) - max_rows} more rows", *[None] * (len(COLUMNS) - 1)])
    return rows


def _row(episode: Episode, trajectory: Trajectory, step: Step, secrets: list[str], max_characters: int) -> list[Any]:
    return [
        episode.task_id,
        episode.rollout_idx,
        trajectory.name,
        shorten(scrub_text(prompt_of(step), secrets), max_characters),
        shorten(scrub_text(step.model_response or "", secrets), max_characters),
        trajectory.reward,
        advantage_of(step),
        episode.is_correct,
        episode.termination_reason.value if episode.termination_reason else None,
    ]


def prompt_of(step: Step, num_known: int = 0) -> str:
    """What the model was asked: the chat before its answer, one message a paragraph (a single message without its role); without the
    first `num_known` messages, for a reader who has seen them."""
    messages = step.chat_completions[num_known:]
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"[{message.get('role')}] {message.get('content')}" for message in messages)


def advantage_of(step: Step) -> float | None:
    """The step's advantage as one number: the mean where each token has its own."""
    if isinstance(step.advantage, list):
        return float(np.mean(step.advantage)) if step.advantage else None
    return step.advantage


def shorten(text: str, max_characters: int) -> str:
    """`text`, cut to `max_characters` with the cut marked."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}… [{len(text) - max_characters} more characters]"
