"""What is fuzzed: functions of bytes that return, or raise on a bug. Whatever a reader refuses, it must refuse in its own words.

A name of `TARGETS` is a folder of `corpus/` too. To add a target: a function here, its name in `TARGETS`, and one example at least.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.lab.replay.episodes import read_step
from rllm_lightning.tracking.episode_logger import EpisodeLogger, read_episodes
from rllm_lightning.tracking.episode_rows import episode_rows
from rllm_lightning.tracking.metrics_table import MetricsTable, read_metrics
from rllm_lightning.tracking.run_directory import config_text

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
CORPUS = Path(__file__).parent / "corpus"


def _file(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def _check(holds: bool, error: Exception) -> None:
    if not holds:
        raise AssertionError("not the words of who refused it") from error


def _load(argv: list[str]) -> None:
    """A config, which is written down and read back as itself; or a `ConfigError` of one line a problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            config = Config.from_config(load_config(argv))
        except ConfigError as error:
            _check(bool(error.problems) and all(problem and "\n" not in problem for problem in error.problems), error)
            return
        text = config_text(config)
        if "***" not in text:  # nothing was masked
            again = _file("again.yaml", text.encode("utf-8"))
            assert Config.from_config(load_config([str(again)])) == config, text


def config_yaml(data: bytes) -> None:
    if b"plugins" not in data:  # they are imported, whatever they are
        _load([str(_file("preset.yaml", data))])


def config_argv(data: bytes) -> None:
    """Words between NULs, as a process gets them; `{...` is a word too."""
    words = os.fsdecode(data).split("\0")
    if not any("plugins" in word or word.endswith((".yaml", ".yml", ".json")) for word in words):
        _load(words)


def episode_log(data: bytes) -> None:
    """Both readers agree; what they take can be shown, and is written as strict JSON that comes back."""
    path = _file("train_step_1.jsonl", data)
    try:
        episodes = read_step(path)
    except ValueError as error:
        _check(str(path) in str(error), error)
        try:
            read_episodes(path)
        except ValueError:
            return
        raise AssertionError("one reader takes what the other refuses") from error
    dicts = [episode.to_dict() for episode in episodes]
    assert [episode.to_dict() for episode in read_episodes(path)] == dicts
    episode_rows(episodes)
    if b"://" not in data and b"\\u" not in data:  # else what looks like a password in an address is masked
        again = EpisodeLogger(FOLDER).log(episodes, "again", 1)
        assert [json.loads(line) for line in again.read_text(encoding="utf-8").splitlines()] == dicts


def metrics_csv(data: bytes) -> None:
    """What can be read is the same after the table was opened for further rows."""
    path = _file("metrics.csv", data)
    try:
        rows = read_metrics(path)
    except ValueError as error:
        _check(str(path) in str(error), error)
        return
    try:
        table = MetricsTable(path)
    except ValueError:  # steps that are no whole numbers
        return
    assert repr(read_metrics(path)) == repr(rows)
    table.append(table._last_step + 1, {"loss": 0.5})
    assert read_metrics(path)[-1]["loss"] == 0.5


TARGETS: dict[str, Callable[[bytes], None]] = {f.__name__: f for f in (config_yaml, config_argv, episode_log, metrics_csv)}
