"""Quick trials, waiting, and what the stand-in for a run noted."""

import json
import time
from pathlib import Path

from tests.quick import QUICK as QUICK_JOB

ROOT = Path(__file__).parents[2]
FAKE_RUN = Path(__file__).parent / "fake_run.py"
QUICK = [
    *QUICK_JOB,
    "rllm.algorithm.lr_schedule=constant",
    "rllm.algorithm.warmup_steps=0",
    "rllm.trainer.logger=[csv,wandb]",
    "rllm.episode_logging.log_episodes=false",
]


def wait_until(condition, timeout=60.0):
    """Wait until `condition()` is true, and return what it returned."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def starts_of(folder):
    """What the stand-in noted each time that a trial was started: `{trial: [note, ...]}`."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("trials/*/starts.jsonl"))
    }
