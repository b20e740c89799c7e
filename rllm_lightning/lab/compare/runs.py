"""Run folders as `Run`s: what was configured, how it ended, and its metrics.

    paths  ->  find_runs (a run folder, or any folder below which some lie)  ->  read_run  ->  Run

Nothing here needs the plugins, tasks or estimators of a run to be installed: its `config.yaml` is read as plain data.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.run_directory import RunDirectory

UNKNOWN = "unknown"
SOFTWARE = ("rllm-lightning", "torch", "transformers")  # packages whose version may change a run's numbers


@dataclass(frozen=True)
class Run:
    """A run as its folder tells.

    `status` is `summary.json`'s: `done`, `failed`, `interrupted`, or `running` also where the process was killed; `unknown` where there is
    no summary. `loss`: the name of the policy loss, with the default filled in. `software`: what made it, name -> version. `questions`:
    a digest of the tasks of the first validation; None where no episodes were written.
    """

    path: Path
    config: dict[str, Any]
    seed: int
    status: str
    loss: str | None
    software: dict[str, str]
    questions: str | None
    rows: list[dict[str, float]]

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """Every dotted key of the config with its value, as JSON text."""
        return {key: json.dumps(value, ensure_ascii=False) for key, value in _leaves(self.config)}

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The run folders at and below `paths`, each once, in the order of their names.

    Raises:
        ValueError: a path is no folder, or no run folder lies there.
    """
    found: set[Path] = set()
    for path in paths:
        root = Path(path).expanduser().resolve()
        if not root.is_dir():
            raise ValueError(f"{path}: not a folder")
        below = set(_walk(root))
        if not below:
            raise ValueError(f"{path}: no run folder here or below (a run folder holds the config.yaml that run.py writes)")
        found |= below
    return sorted(found)


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        if "config.yaml" in files and _read_config(Path(folder)) is not None:
            subfolders.clear()  # W&B keeps a config.yaml of its own inside
            yield Path(folder)


def _read_config(folder: Path) -> dict[str, Any] | None:
    """None where it is somebody else's."""
    path = folder / "config.yaml"
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    rllm = config.get("rllm") if isinstance(config, dict) and "seed" in config else None
    return config if isinstance(rllm, dict) and "episode_logging" in rllm else None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


def read_run(path: Path) -> Run:
    """A run folder's content.

    Raises:
        ValueError: a file is not what it should be; the message names it.
    """
    run = RunDirectory.open(path)
    config = _read_config(path)
    if config is None:
        raise ValueError(f"{run.config_yaml}: not the configuration of a run")
    summary = _read_json(run.summary_json) if run.summary_json.exists() else {}
    return Run(
        path=path,
        config=config,
        seed=int(config["seed"]),
        status=summary["status"] if summary else UNKNOWN,
        loss=summary["loss_fn"] if summary else None,
        software=_software(summary) if summary else {},
        questions=_questions(run, config),
        rows=read_metrics(run.metrics_csv) if run.metrics_csv.exists() else [],
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or not {"status", "loss_fn", "versions", "git_commit"} <= content.keys():
        raise ValueError(f"{path}: not the summary of a run")
    return content


def _software(summary: Mapping[str, Any]) -> dict[str, str]:
    versions = {package: summary["versions"][package] for package in SOFTWARE if package in summary["versions"]}
    return versions | ({"commit": summary["git_commit"][:10]} if summary["git_commit"] else {})


def _questions(run: RunDirectory, config: Mapping[str, Any]) -> str | None:
    """Read from what was asked, since a file of tasks may change under the same name."""
    folder = run.episodes_under(config["rllm"]["episode_logging"]["episode_log_dir"])
    steps = [int(match[1]) for path in folder.glob("*.jsonl") if (match := re.fullmatch(r"val_step_(\d+)", path.stem))]
    if not steps:
        return None
    path = folder / f"val_step_{min(steps)}.jsonl"
    try:
        tasks = {json.dumps(json.loads(line)["task"], sort_keys=True) for line in path.read_text(encoding="utf-8").splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of episodes ({error})") from error
    return hashlib.sha256("\n".join(sorted(tasks)).encode()).hexdigest()
