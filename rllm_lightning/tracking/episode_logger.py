"""Episodes on disk: `{folder}/{mode}_step_{step}.jsonl`, one episode a line, strict JSON, so that rollouts can be replayed.

`EpisodeLogger.log` writes the file of one step as a whole; `read_episodes` reads one back as `Episode` objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from rllm_lightning.tracking.run_directory import atomic_write
from rllm_lightning.tracking.secrets import environment_secrets, scrub
from rllm_lightning.types import Episode, to_plain


class EpisodeLogger:
    """Writes episodes below `folder`, which is made when the first are logged."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def log(self, episodes: Iterable[Episode], mode: str, step: int) -> Path:
        """Write the episodes of one step; a file of the same mode and step (from before a resume) is replaced.

        Args:
            mode: what the episodes were for, such as `"train"` or `"val"`; one word.
            step: the global step (validation before training: 0).
        """
        if not re.fullmatch(r"[A-Za-z0-9-]+", mode):
            raise ValueError(f"mode of logged episodes: expected one word of letters and digits, got {mode!r}")
        path = self.folder / f"{mode}_step_{step}.jsonl"
        secrets = environment_secrets()
        atomic_write(path, "".join(f"{_line(episode, secrets)}\n" for episode in episodes))
        return path


def _line(episode: Episode, secrets: list[str]) -> str:
    data = to_plain(episode)
    # ASCII: escapes carry every character, lone surrogates too, and no reader takes U+2028 for the end of a line
    line = json.dumps(data, allow_nan=False, ensure_ascii=True)
    if "://" in line or any(json.dumps(secret)[1:-1] in line for secret in secrets):
        line = json.dumps(scrub(data, keys=False), allow_nan=False, ensure_ascii=True)
    return line


def read_episodes(path: str | Path) -> list[Episode]:
    """The episodes of one file.

    Raises:
        ValueError: a line is not an episode; the message names the file and the line.
    """
    episodes = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                episodes.append(Episode.from_dict(json.loads(line, parse_constant=_refuse)))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not an episode ({error})") from error
    return episodes


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
