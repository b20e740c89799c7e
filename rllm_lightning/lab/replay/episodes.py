"""The training episodes of a run as they lie on disk, one step after the other, and which steps are wanted.

    {folder}/train_step_{n}.jsonl  --step_files, choose_steps-->  steps in order  --read_step-->  the episodes of one

Whoever reads step by step, and lets go of one before the next, needs the memory of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from rllm_lightning.tracking.episode_logger import iterate_episodes
from rllm_lightning.types import Episode, Step

STEP_FILE = re.compile(r"train_step_(\d+)\.jsonl")
RANGE = re.compile(r"(\d+)(?:(-)(\d*))?")


def step_files(folder: Path) -> dict[int, Path]:
    """The file of each step, in ascending steps.

    Raises:
        ValueError: there is none.
    """
    found = {int(match.group(1)): path for path in folder.glob("*.jsonl") if (match := STEP_FILE.fullmatch(path.name))}
    if not found:
        raise ValueError(f"{folder}: no episodes (train_step_*.jsonl); a run writes them with rllm.episode_logging.log_episodes=true")
    return dict(sorted(found.items()))


def choose_steps(known: Collection[int], text: str) -> list[int]:
    """Those of the known steps that `text` names: `7`, `1-20`, `10-` (to the end), several between commas; "" names all.

    Raises:
        ValueError: `text` is nothing of the kind, or a part of it names none of the known steps.
    """
    if not text.strip():
        return sorted(known)
    chosen: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"steps: expected 7, 1-20 or 10-, or several between commas; got {part.strip()!r}")
        first, last = int(match[1]), int(match[3] or match[1] if match[3] or not match[2] else max(known))
        named = {step for step in known if first <= step <= last}
        if not named:
            raise ValueError(f"steps: the run has episodes of none in {part.strip()}; it has {min(known)} to {max(known)}")
        chosen |= named
    return sorted(chosen)


def read_step(path: Path) -> list[Episode]:
    """The episodes of one file. What a step and its model output both hold is held once.

    Raises:
        ValueError: a line is not an episode; the message names the file and the line.
    """
    episodes = []
    for episode in iterate_episodes(path):
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                _share(step)
        episodes.append(episode)
    return episodes


def _share(step: Step) -> None:
    """A model call is written down twice, by the engine and by the workflow; together they are most of a file."""
    if (output := step.model_output) is None:
        return
    for theirs, own in (("prompt_ids", "prompt_ids"), ("completion_ids", "response_ids"), ("logprobs", "logprobs")):
        if getattr(output, theirs) == (value := getattr(step, own)):
            setattr(output, theirs, value)
