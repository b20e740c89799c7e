"""Under a W&B sweep: are the values that the sweep shows for this run the ones it uses? And: the run ends with its agent.

W&B locks the swept keys to the values it issued, whatever the run does with them, so a run whose command line lost one would be
shown, and judged by the optimiser, under a value it never used. `check_swept_values` refuses to start such a run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rllm_lightning import schema
from rllm_lightning.config import Config, ConfigError, load_config

SWEEP_ID = "WANDB_SWEEP_ID"
SWEEP_VALUES = "WANDB_SWEEP_PARAM_PATH"  # a YAML file {key: {value: ...}}, written by W&B's agents and by ours

WATCH_S = 1.0  # how often a run looks whether its agent lives


def end_with_agent() -> None:
    """Under a W&B agent: send this process SIGTERM when the agent dies, however it dies. Agents start trials in process groups of their
    own, and one that is terminated or killed leaves them training."""
    if not os.environ.get(SWEEP_ID):
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)

    # not the kernel's signal for a parent's death: it comes once for each thread of an agent, and a second SIGTERM ends a run unsaved
    threading.Thread(target=watch, name="agent-watch", daemon=True).start()


def check_swept_values(config: Config) -> None:
    """Compare `config` with the values that the sweep around this process issued. Without a sweep: nothing.

    Raises:
        ConfigError: a value differs, or a swept key is no key of the config; the message names each.
    """
    if not (path := os.environ.get(SWEEP_VALUES)):
        return
    entries = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    swept = {key: entry["value"] for key, entry in entries.items() if isinstance(entry, Mapping) and "value" in entry}
    used = schema.to_plain_tree(config)
    try:  # the swept values take the way of command-line arguments, so that `1e-3` or a nested mapping mean the same
        shown = load_config([json.dumps(used), json.dumps(swept)])
    except ConfigError as error:
        raise ConfigError([f"in the sweep's parameters: {problem}" for problem in error.problems]) from error
    differing = [
        f"{key}: the sweep says {_select(shown, key)!r}, this run uses {_select(used, key)!r}; W&B would show the sweep's: "
        "pass its values on (command: [..., ${args_no_hyphens}]) and set nothing over them"
        for key in schema.differences(used, shown)
    ]
    if differing:
        raise ConfigError(differing)


def _select(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree
