"""The same steps by one process and by two, each process with one core: what a second one gains.

Both are the real command with the same global batch, so rollouts, update and all that ranks tell each other count. What they sample
and learn is the same.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rllm_lightning.lab.speed.report import DTYPE, SECONDS, VARIANT, Column, Report, Row
from rllm_lightning.lab.speed.step import BF16, FP32, StepRun, command_line, later, read_run
from rllm_lightning.lab.speed.workload import Counts
from rllm_lightning.trainer.precision import has_bf16_instructions

COLUMNS = (
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("generate_s", "rollouts s", ".3g"),
    Column("update_s", "update s", ".3g"),
    Column("ratio", "× one process", ".2f"),
    Column("reward_last", "reward, last step", ".3f"),
)


def measure(name: str, counts: Counts, num_steps: int, repeats: int, script: Path, processes: int = 2) -> list[Report]:
    """`num_steps` steps by one process and by `processes`, `repeats` times with other seeds, in turns.

    Args:
        script: `experiments/run.py`.

    Raises:
        ValueError: a run failed; the message holds the end of what it said.
    """
    dtype = "bf16" if name != "builtin:tiny" and has_bf16_instructions() else "fp32"
    runs: dict[int, list[StepRun]] = {1: [], processes: []}
    for seed in range(repeats):
        for count, found in runs.items():
            overrides = [*(BF16 if dtype == "bf16" else FP32), f"lightning.devices={count}", "lightning.accelerator=cpu"]
            found.append(_run(script, command_line(name, counts, num_steps, seed, overrides)))
    words = {"model": name, **counts.in_words(), "steps": num_steps, "runs": repeats, "threads a process": 1}
    notes = ["Seconds are those of steps 2 and later of all runs; rollouts and update are the first rank's, its waiting included."]
    rows = [_row(count, dtype, found, runs[1]) for count, found in runs.items()]
    return [Report(f"A GRPO step of {name} by {processes} processes", words, COLUMNS, rows, notes)]


def _run(script: Path, argv: list[str]) -> StepRun:
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder, "nothing.yaml")  # a preset of its own, so that the default job's keys are not ours
        nothing.write_text("{}\n")
        command = [sys.executable, str(script), str(nothing), *argv, f"run_root={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (table,) = Path(folder).glob("*/*/metrics.csv")
        return read_run(table)


def _row(count: int, dtype: str, runs: list[StepRun], alone: list[StepRun]) -> Row:
    seconds = later(runs, "seconds")
    return {
        "variant": "1 process" if count == 1 else f"{count} processes",
        "dtype": dtype,
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "generate_s": statistics.median(later(runs, "generate_s")),
        "update_s": statistics.median(later(runs, "update_s")),
        "ratio": statistics.median(later(alone, "seconds")) / statistics.median(seconds),
        "reward_last": statistics.mean(run.rewards[-1] for run in runs),
    }
