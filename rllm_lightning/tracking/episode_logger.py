"""Episodes on disk: `{folder}/{mode}_step_{step}.jsonl`, one episode a line, strict JSON, so that rollouts can be replayed.

`EpisodeLogger.log` writes the file of one step as a whole; `read_episodes` reads one back as `Episode` objects, `iterate_episodes`
one after the other, and only those that are wanted. Beside them `tokens.json` holds the text of every token id that was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rllm_lightning.schema import show
from rllm_lightning.tracking.run_directory import atomic_write
from rllm_lightning.tracking.secrets import environment_secrets, scrub
from rllm_lightning.types import Episode, to_plain

TOKENS = "tokens.json"  # token id -> its text
TokenTexts = Callable[[Sequence[int]], Sequence[str] | None]

_ID = re.compile(r'\{"id": ("(?:[^"\\]|\\.)*")')  # how a line of ours begins


class EpisodeLogger:
    """Writes episodes below `folder`, which is made when the first are logged.

    `token_texts` gives the text of each of some token ids, or None; without it no texts of tokens are written.
    """

    def __init__(self, folder: str | Path, token_texts: TokenTexts | None = None):
        self.folder = Path(folder)
        self.token_texts = token_texts
        self._texts: dict[str, str] | None = None

    def log(self, episodes: Iterable[Episode], mode: str, step: int) -> Path:
        """Write the episodes of one step; a file of the same mode and step (from before a resume) is replaced.

        Args:
            mode: what the episodes were for, such as `"train"` or `"val"`; one word.
            step: the global step (validation before training: 0).
        """
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", mode):
            raise ValueError(f"mode of logged episodes: expected one short word of letters and digits, got {show(mode)}")
        path = self.folder / f"{mode}_step_{step}.jsonl"
        secrets, episodes = environment_secrets(), list(episodes)
        self._log_tokens(episodes)
        atomic_write(path, "".join(f"{_line(episode, secrets)}\n" for episode in episodes))
        return path

    def _log_tokens(self, episodes: Sequence[Episode]) -> None:
        if self.token_texts is None:
            return
        if self._texts is None:
            self._texts = read_token_texts(self.folder)
        sampled = {i for e in episodes for trajectory in e.trajectories for step in trajectory.steps for i in step.response_ids}
        new = sorted(i for i in sampled if str(i) not in self._texts)
        if new and (texts := self.token_texts(new)) is not None:
            self._texts.update(zip(map(str, new), texts, strict=True))
            atomic_write(self.folder / TOKENS, json.dumps(scrub(self._texts, keys=False)) + "\n")


def read_token_texts(folder: Path) -> dict[str, str]:
    """The text of each token id (as text, too) that was sampled; empty where nobody wrote them down."""
    path = folder / TOKENS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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
    return list(iterate_episodes(path))


def iterate_episodes(path: str | Path, is_wanted: Callable[[str], bool] | None = None) -> Iterator[Episode]:
    """The episodes of one file, or those whose ids are wanted, one at a time: neither the file nor what is not wanted is ever in memory.

    Raises:
        ValueError: as `read_episodes`; a line that is not wanted is not looked into.
    """
    decode = json.JSONDecoder(parse_constant=_refuse).decode
    with Path(path).open("rb") as file:
        for number, data in enumerate(file, start=1):
            try:
                line = data.decode("utf-8")
                match = _ID.match(line) if is_wanted else None
                if is_wanted and match and not is_wanted(json.loads(match[1])):
                    continue
                episode = Episode.from_dict(decode(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not an episode ({error})") from error
            if not is_wanted or match or is_wanted(episode.id):
                yield episode


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
