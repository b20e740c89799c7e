"""Which rollouts of a run its report shows, read from the episode files without ever holding one of them.

    episodes/*.jsonl  --MAX_FILES a mode-->  files  --MAX_TASKS a file-->  groups of tasks  --as many as have room-->  the page

A sample grows with its run: files that were read are not read again (`refresh`). The same tasks are taken of every file that has them, so
that one may be followed over the steps. Whole tasks are left out, oldest steps first, never a rollout of a group.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm_lightning.tracking.episode_logger import TOKENS, iterate_episodes, read_token_texts
from rllm_lightning.tracking.rollout_groups import TaskGroups
from rllm_lightning.types import split_episode_id

MAX_FILES = 24  # of a mode
MAX_TASKS = 8  # of a file
MAX_TASKS_OF_NEWEST = 24  # of the newest file of a mode


@dataclass
class EpisodeFile:
    """What was taken of one file: its tasks' groups as JSON text, in the order in which they are preferred."""

    mode: str
    step: int
    state: tuple[int, int, int]  # of the file when it was read
    tasks: list[list[str]]
    num_tasks: int  # in the file


@dataclass
class Chosen:
    """The groups for a page, as JSON text, and what they are chosen from."""

    groups: list[str]
    num_shown_tasks: int  # that the groups are of
    num_tasks: int  # in the files that were read
    num_files: int  # that were read
    num_unread: int  # that were not


class RolloutSample:
    """The sample of one episode folder, which may not be there yet."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[Path, EpisodeFile] = {}
        self.num_unread = 0
        self._token_texts: dict[str, str] = {}
        self._tokens_state: tuple[int, int, int] | None = None

    def refresh(self) -> None:
        """Read what is new.

        Raises:
            ValueError: a line is not an episode; the message names it.
        """
        wanted, self.num_unread = _wanted_files(self.folder)
        if wanted and (state := file_state(self.folder / TOKENS)) != self._tokens_state:
            self._token_texts, self._tokens_state = read_token_texts(self.folder), state
        self.files = {path: taken for path, taken in self.files.items() if path in wanted}
        for path, (mode, step, is_newest) in wanted.items():
            state = file_state(path)
            if state is not None and (path not in self.files or self.files[path].state != state):
                num = MAX_TASKS_OF_NEWEST if is_newest else MAX_TASKS
                self.files[path] = EpisodeFile(mode, step, state, *_take(path, mode, step, num, self._token_texts))
            elif not is_newest and path in self.files:
                del self.files[path].tasks[MAX_TASKS:]

    def choose(self, max_characters: int) -> Chosen:
        """As many groups as have room: of every step some, of the newest more; of two alike the newer one. In the order of the steps."""
        newest = {mode: max(f.step for f in self.files.values() if f.mode == mode) for mode in {f.mode for f in self.files.values()}}
        share = MAX_TASKS_OF_NEWEST // MAX_TASKS
        queue = [
            (rank // share if taken.step == newest[taken.mode] else rank, -taken.step, taken.mode, rank, task)
            for taken in self.files.values()
            for rank, task in enumerate(taken.tasks)
        ]
        chosen = []
        for _, negative_step, mode, rank, task in sorted(queue):
            if (size := sum(len(group) + 2 for group in task)) <= max_characters:
                max_characters -= size
                chosen.append((mode, -negative_step, rank, task))
        groups = [group for *_, task in sorted(chosen) for group in task]
        return Chosen(groups, len(chosen), sum(taken.num_tasks for taken in self.files.values()), len(self.files), self.num_unread)


def _wanted_files(folder: Path) -> tuple[dict[Path, tuple[str, int, bool]], int]:
    """The files to read with `(mode, step, is the newest of its mode)`, and the number of those to leave unread.

    Of a mode's files every one, or every second, fourth, ... and the newest: as a run grows, none joins that was left out before.
    """
    by_mode: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.jsonl"):
        if match := re.fullmatch(r"(.+)_step_(\d+)", path.stem):
            by_mode.setdefault(match[1], []).append((int(match[2]), path))
    wanted: dict[Path, tuple[str, int, bool]] = {}
    for mode, files in by_mode.items():
        files.sort()
        stride = 1
        while len(files[::stride]) >= MAX_FILES:
            stride *= 2
        wanted |= {path: (mode, step, False) for step, path in files[::stride]}
        wanted[files[-1][1]] = (mode, files[-1][0], True)
    return wanted, sum(map(len, by_mode.values())) - len(wanted)


def _take(path: Path, mode: str, step: int, num: int, token_texts: dict[str, str]) -> tuple[list[list[str]], int]:
    """The groups of `num` tasks of a file, and how many tasks there are. Which tasks is a matter of their ids' hashes alone."""
    kept: dict[str, TaskGroups] = {}
    heap: list[tuple[int, str]] = []  # the kept tasks, that of the largest hash first
    seen: set[int] = set()

    def is_wanted(episode_id: str) -> bool:
        task, _ = split_episode_id(episode_id)
        place = _hash(task)
        seen.add(place)
        if task in kept:
            return True
        if len(kept) == num and place > -heap[0][0]:
            return False
        kept[task] = TaskGroups(mode, step, task, token_texts)
        heapq.heappush(heap, (-place, task))
        if len(kept) > num:  # a task that has gone does not come back: the largest hash only falls
            del kept[heapq.heappop(heap)[1]]
        return task in kept

    for episode in iterate_episodes(path, is_wanted):
        kept[episode.task_id].add(episode)
    tasks = [kept[task].by_role.values() for _, task in sorted(heap, reverse=True)]
    return [[script_json(group) for group in groups] for groups in tasks], len(seen)


def script_json(data: Any) -> str:
    """Strict JSON for the inside of a `<script>`: plain ASCII, without a character that could begin or end markup."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
