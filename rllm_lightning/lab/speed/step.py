"""Whole GRPO steps through `UnifiedTrainer`, each run in a process of its own, and the same steps by a peer under another interpreter.

    tasks (chain_sum) --> our run: config, trainer, metrics.csv -------------> StepRun
          '------------> folder with model and tasks.json --> peer script ---> StepRun

A peer is a script that is called as `PYTHON SCRIPT FOLDER STEPS_JSON [--bf16] ...` (see `experiments/peers/trl_grpo.py`): FOLDER is the
model in Hugging Face format with `tasks.json` beside it, a list of objects with question and answer, in the order of training.
What it writes to STEPS_JSON has the fields of `StepRun`.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import multiprocessing
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllm_lightning.config import Config, load_config
from rllm_lightning.lab.speed.machine import peak_memory
from rllm_lightning.lab.speed.report import DTYPE, SECONDS, VARIANT, Column, Report, Row
from rllm_lightning.lab.speed.workload import DTYPES, Counts, load
from rllm_lightning.registry import TASKS

PLAIN = ["rollout_engine.fast=false", "training.tree=false"]
FP32, BF16 = ["lightning.precision=32-true"], ["lightning.precision=bf16-mixed", "rollout_engine.dtype=bfloat16"]
OURS = {
    ("ours", "fp32"): FP32,
    ("ours", "bf16"): BF16,
    ("ours, fast=false, tree=false", "bf16"): [*BF16, *PLAIN],
}
PEERS = {("peer, no checkpointing", "fp32"): ["--no-checkpointing"], ("peer", "bf16"): ["--bf16"]}
COLUMNS = (
    VARIANT,
    DTYPE,
    *SECONDS,
    Column("generate_s", "rollouts s", ".3g"),
    Column("rest_s", "rest s", ".3g"),
    Column("overhead", "beside model", ".1%"),
    Column("tokens", "tokens a step", ",.0f"),
    Column("ratio_bf16", "× peer bf16", ".2f"),
    Column("ratio_fp32", "× peer fp32", ".2f"),
    Column("reward_first", "reward, first step", ".3f"),
    Column("reward_last", "reward, last steps", ".3f"),
    Column("peak_gb", "peak GB", ".2f"),
)
LEARNING_RATE = {"builtin:tiny": 3e-4}
USUAL_LEARNING_RATE = 1e-5
LAST = 1 / 3  # of the steps count as the last ones


@dataclass
class StepRun:
    """The course of one run: seconds of each step, of its rollouts, of its update (None: not told apart), mean reward, tokens."""

    seconds: list[float]
    generate_s: list[float]
    update_s: list[float] | None
    rewards: list[float]
    tokens: list[float]
    peak_gb: float


def measure(
    name: str,
    counts: Counts,
    num_steps: int = 6,
    repeats: int = 1,
    peer: Path | None = None,
    peer_script: Path | None = None,
    dtypes: Iterable[str] = DTYPES,
) -> list[Report]:
    """Each variant trains `num_steps` steps from the same weights, `repeats` times with other seeds, all variants in turns.

    Args:
        peer: the interpreter that runs `peer_script`; None: no peer.
        dtypes: variants in other ones are left out.
    """
    runs: dict[tuple[str, str], list[StepRun]] = {}
    for seed in range(repeats):
        for key, overrides in _in(dtypes, OURS):
            runs.setdefault(key, []).append(our_run(name, counts, num_steps, seed, overrides))
        if peer is not None and peer_script is not None:
            for key, flags in _in(dtypes, PEERS):
                runs.setdefault(key, []).append(peer_run(peer, peer_script, name, counts, num_steps, seed, flags))
    baselines = {dtype: statistics.median(later(runs[label, dtype], "seconds")) for label, dtype in PEERS if (label, dtype) in runs}
    words = {"model": name, **counts.in_words(), "steps": num_steps, "runs": repeats, "task": "reasoning_gym chain_sum"}
    notes = [
        "A step: rollouts, rewards, advantages, one update. Seconds are those of steps 2 and later of all runs.",
        "Beside model: the share of a step that is neither rollouts nor update.",
        f"Reward, last steps: mean over the last {_num_last(num_steps)} steps of all runs. Peak: of the process, the largest of all runs.",
    ]
    return [Report(f"A GRPO step of {name}", words, COLUMNS, [_row(key, of, baselines) for key, of in runs.items()], notes)]


def _in(dtypes: Iterable[str], variants: dict[tuple[str, str], list[str]]) -> list[tuple[tuple[str, str], list[str]]]:
    return [(key, flags) for key, flags in variants.items() if key[1] in dtypes]


# ---------------------------------------------------------------------------------------------------------------------- ours


def our_run(name: str, counts: Counts, num_steps: int, seed: int, overrides: Sequence[str]) -> StepRun:
    """A run of the real trainer in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_be_quiet) as pool:
        return pool.submit(train, command_line(name, counts, num_steps, seed, overrides), torch.get_num_threads()).result()


def _be_quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def train(argv: Sequence[str], num_threads: int) -> StepRun:
    """Run a command line of `experiments/run.py` in this process, in a temporary folder, and read what it logged."""
    from rllm_lightning.trainer.backend import LightningBackend
    from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
    from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*argv, f"run_root={folder}"])
        tasks = _tasks(config)
        trainer = UnifiedTrainer(
            LightningBackend, config, SingleTurnWorkflow, tasks.train, workflow_args={"reward_function": tasks.reward_function}
        )
        trainer.fit()
        assert trainer.run_directory is not None
        return read_run(trainer.run_directory.metrics_csv, peak_memory() / 1e9)


def read_run(metrics_csv: Path, peak_gb: float = math.nan) -> StepRun:
    """What a run of ours logged of its steps."""
    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def column(key: str) -> list[float]:
        return [float(row[key]) for row in rows]

    return StepRun(
        seconds=column("time/step"),
        generate_s=column("time/generate"),
        update_s=column("time/update"),
        rewards=column("reward/solver/mean"),
        tokens=column("rollout/num_response_tokens"),
        peak_gb=peak_gb,
    )


def command_line(name: str, counts: Counts, num_steps: int, seed: int, overrides: Sequence[str]) -> list[str]:
    """The overrides of a run that takes `num_steps` steps of these counts."""
    return [
        f"model.name={name}",
        "task.name=reasoning_gym",
        "task.dataset=chain_sum",
        "task.params={min_terms: 2, max_terms: 3, min_digits: 1, max_digits: 1}",
        "task.instruction=Answer with just the number.",
        "task.extract=last_number",
        f"task.train_size={counts.num_prompts * num_steps}",
        "task.val_size=0",
        f"data.train_batch_size={counts.num_prompts}",
        "data.shuffle=false",
        "data.max_prompt_length=256",
        f"data.max_response_length={counts.max_tokens}",
        f"rllm.rollout.n={counts.num_samples}",
        f"rllm.trainer.total_batches={num_steps}",
        "rllm.trainer.logger=[csv]",
        "rllm.trainer.val_before_train=false",
        "rllm.episode_logging.log_episodes=false",
        f"training.learning_rate={_learning_rate(name)}",
        f"seed={seed}",
        *overrides,
    ]


def _learning_rate(name: str) -> float:
    return LEARNING_RATE.get(name, USUAL_LEARNING_RATE)


def _tasks(config: Any) -> Any:
    typed = Config.from_config(config)
    return TASKS.get(typed.task.name)(typed.data_seed, **typed.task.args)


# --------------------------------------------------------------------------------------------------------------------- a peer


def peer_run(python: Path, script: Path, name: str, counts: Counts, num_steps: int, seed: int, flags: Sequence[str]) -> StepRun:
    """A run of the peer's script on the same model, tasks and counts.

    Raises:
        ValueError: the peer failed; the message holds the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for part in load(name):
            part.save_pretrained(path)
        tasks = _tasks(load_config(command_line(name, counts, num_steps, seed, []))).train
        path.joinpath("tasks.json").write_text(json.dumps([{"question": task["question"], "answer": task["answer"]} for task in tasks]))
        command = [str(python), str(script), folder, str(path / "steps.json"), *flags]
        for option, value in (
            ("prompts", counts.num_prompts),
            ("samples", counts.num_samples),
            ("max-tokens", counts.max_tokens),
            ("steps", num_steps),
            ("seed", seed),
            ("threads", torch.get_num_threads()),
            ("learning-rate", _learning_rate(name)),
        ):
            command += [f"--{option}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode:
            raise ValueError(f"--peer: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return StepRun(**json.loads((path / "steps.json").read_text()))


# ------------------------------------------------------------------------------------------------------------------- the table


def _row(key: tuple[str, str], runs: Sequence[StepRun], baselines: dict[str, float]) -> Row:
    seconds, generate = later(runs, "seconds"), later(runs, "generate_s")
    median = statistics.median(seconds)
    num_last = _num_last(len(runs[0].rewards))
    row: Row = {
        "variant": key[0],
        "dtype": key[1],
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "generate_s": statistics.median(generate),
        "rest_s": statistics.median(_each(seconds, generate, lambda step, part: step - part)),
        "tokens": statistics.mean(later(runs, "tokens")),
        "reward_first": statistics.mean(run.rewards[0] for run in runs),
        "reward_last": statistics.mean(reward for run in runs for reward in run.rewards[-num_last:]),
        "peak_gb": max(run.peak_gb for run in runs),
    }
    if all(run.update_s is not None for run in runs):
        model = _each(generate, later(runs, "update_s"), lambda rollouts, update: rollouts + update)
        row["overhead"] = statistics.median(_each(seconds, model, lambda step, part: 1 - part / step))
    return row | {f"ratio_{dtype}": baseline / median for dtype, baseline in baselines.items()}


def _num_last(num_steps: int) -> int:
    return max(1, round(num_steps * LAST))


def later(runs: Sequence[StepRun], field: str) -> list[float]:
    """The field of steps 2 and later of all runs; the first one warms up."""
    return [value for run in runs for value in (getattr(run, field)[1:] or getattr(run, field))]


def _each(left: Sequence[float], right: Sequence[float], combine: Callable[[float, float], float]) -> list[float]:
    return [combine(a, b) for a, b in zip(left, right, strict=True)]
