"""What this library itself costs for each episode: everything of a batch but the model and its update.

The pipeline of a training step runs stage by stage on answers from a script, which cost next to nothing; each stage is timed apart.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.metrics import rollout_metrics, termination_metrics, workflow_metrics
from rllm_lightning.algorithms.rejection_sampling import RejectionSamplingState, apply_rejection_sampling_and_filtering
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, RejectionSamplingConfig, TransformConfig
from rllm_lightning.lab.speed.report import Column, Report
from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.trainer.batch import make_train_batch
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

ANSWERS = ["forty-two", "41", "I do not know."]
COLUMNS = (
    Column("variant", "stage"),
    Column("median_us", "median µs an episode", ".1f"),
    Column("min_us", "min µs", ".1f"),
    Column("max_us", "max µs", ".1f"),
    Column("share", "share", ".0%"),
)
Stages = dict[str, float]  # seconds of each stage, in order


def measure(num_episodes: int = 10_000, group_size: int = 8, repeats: int = 3) -> list[Report]:
    """Batches of `num_episodes` episodes of one turn; a first batch does not count."""
    num_tasks = max(1, num_episodes // group_size)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [dict(stages(num_tasks, group_size, number, Path(folder))) for number in range(repeats + 1)][1:]
    per_episode = {name: [1e6 * found[name] / (num_tasks * group_size) for found in rounds] for name in rounds[0]}
    per_episode["all"] = [sum(values) for values in zip(*per_episode.values(), strict=True)]
    whole = statistics.median(per_episode["all"])
    rows = [
        {
            "variant": name,
            "median_us": statistics.median(values),
            "min_us": min(values),
            "max_us": max(values),
            "share": statistics.median(values) / whole,
        }
        for name, values in per_episode.items()
    ]
    counts = {"episodes": num_tasks * group_size, "groups of": group_size, "turns": 1, "repeats": repeats}
    notes = ["Rollouts are those of a scripted engine, whose own work is in them; logging writes each episode as a line of JSON."]
    return [Report("What the library itself costs for each episode", counts, COLUMNS, rows, notes)]


def stages(num_tasks: int, group_size: int, step: int, folder: Path) -> Iterator[tuple[str, float]]:
    """The stages of one batch, in the order of a training step, with the seconds each took."""
    engine = UnifiedWorkflowEngine(
        SingleTurnWorkflow,
        {"reward_function": lambda task, response: float(response == task["answer"])},
        ScriptedEngine(EngineSetup(), answers=ANSWERS),
    )
    tasks = [{"id": f"task:{i}", "question": f"What is {i} - {i} + 42? Answer in words.", "answer": ANSWERS[0]} for i in range(num_tasks)]
    tasks = [task for task in tasks for _ in range(group_size)]

    start = time.perf_counter()
    episodes = asyncio.run(engine.execute_tasks(tasks, [task["id"] for task in tasks], global_step=step))
    yield "rollouts", time.perf_counter() - start
    engine.shutdown()

    start = time.perf_counter()
    groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig())
    yield "grouping", time.perf_counter() - start

    start = time.perf_counter()
    groups, _, _ = apply_rejection_sampling_and_filtering(episodes, groups, RejectionSamplingConfig(), RejectionSamplingState())
    yield "filtering", time.perf_counter() - start

    start = time.perf_counter()
    batch = make_train_batch(groups)
    yield "rows", time.perf_counter() - start

    start = time.perf_counter()
    collect_reward_and_advantage_from_trajectory_groups(groups, AlgorithmConfig())
    batch.with_advantages()
    yield "advantages", time.perf_counter() - start

    start = time.perf_counter()
    workflow_metrics(episodes).means(), termination_metrics(episodes).means(), rollout_metrics(episodes)
    yield "metrics", time.perf_counter() - start

    start = time.perf_counter()
    EpisodeLogger(folder).log(episodes, "train", step)
    yield "logging", time.perf_counter() - start
