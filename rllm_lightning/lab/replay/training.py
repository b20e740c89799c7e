"""Training on from a checkpoint with the rollouts that a run wrote down, under other estimators: `train_on`.

    checkpoint of step k, under the config with the other estimator --> a run of its own over the batches k+1 .. k+N
    episodes/train_step_{k+1}.jsonl, ... in place of sampling; validation samples as ever

The batch k+1 was drawn from the checkpoint's weights, so that its update is the one that the estimator would have made there. The later
ones were drawn from weights that the run's own estimator had made: their tokens are weighted by the truncated ratio of the policy to the
sampler (`rollout_correction.mode=tis`, where the run corrects nothing itself), and they are counted. The run's own estimator only
does again what it did.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rllm_lightning.algorithms.metrics import validation_score
from rllm_lightning.config import Config, as_dict_config
from rllm_lightning.lab.replay.checkpoint import PREFIX, read_given
from rllm_lightning.lab.replay.episodes import read_step
from rllm_lightning.lab.replay.results import TrainedOn, TrainingReport
from rllm_lightning.lab.replay.subjects import Subject, is_own
from rllm_lightning.registry import ESTIMATORS, TASKS, WORKFLOWS
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.checkpoints import CHECKPOINT_KEY, read_checkpoint
from rllm_lightning.trainer.data import TaskLoader
from rllm_lightning.trainer.protocol import TrainerState
from rllm_lightning.trainer.resume import plain
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.types import Episode
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine, reward_argument

OFF_POLICY = "replay/off_policy"  # metric: 1 for a batch that was drawn from another policy


class ReplayBackend(LightningBackend):
    """Trains on episodes that were written down.

    Args:
        files: the episodes of each step.
        on_policy: the steps whose episodes are this course's own.
        planned_steps: the number of batches that the learning-rate schedule is laid out for.
    """

    name = "replay"

    def __init__(self, config: Any, *, files: Mapping[int, Path], on_policy: Sequence[int], planned_steps: int):
        super().__init__(config)
        self.files, self.on_policy, self.planned_steps = files, on_policy, planned_steps
        self.step = 0
        self._configs = {True: self.cfg, False: _corrected(self.cfg)}

    async def on_train_start(self, trainer_state: TrainerState) -> None:
        total = trainer_state.total_steps
        trainer_state.total_steps = self.planned_steps
        await super().on_train_start(trainer_state)
        trainer_state.total_steps = total

    async def on_batch_start(self, trainer_state: TrainerState) -> None:
        self.step = trainer_state.global_step

    async def generate_episodes(
        self, batch: Sequence[dict[str, Any]], agent_workflow_engine: UnifiedWorkflowEngine, is_validation: bool = False
    ) -> list[Episode]:
        if is_validation:
            return await super().generate_episodes(batch, agent_workflow_engine, is_validation)
        return as_sampled(read_step(self.files[self.step]))

    async def process_backend_batch(self, trainer_state: TrainerState) -> None:
        on_policy = trainer_state.global_step in self.on_policy
        trainer_state.metrics[OFF_POLICY] = float(not on_policy)
        self.cfg = self._configs[on_policy]
        self.algorithm = self.cfg.rllm.algorithm
        await super().process_backend_batch(trainer_state)


def as_sampled(episodes: list[Episode]) -> list[Episode]:
    """Episodes as they were before their batch was trained on: without advantages, and without a KL taken from the rewards."""
    for episode in episodes:
        for trajectory in episode.trajectories:
            if (penalty := trajectory.info.pop("kl_penalty", None)) is not None and trajectory.reward is not None:
                trajectory.reward += penalty
            for step in trajectory.steps:
                step.advantage = None
    return episodes


def train_on(
    run: RunDirectory, config: Config, files: Mapping[int, Path], checkpoint: Path, subjects: Sequence[Subject], num_batches: int
) -> TrainingReport:
    """Train each subject from `checkpoint` on the next `num_batches` batches of the run's `files`; each gets a run directory beside
    the run's own, `{experiment}-replay-{label}`.

    Raises:
        ValueError: the run has too few batches after the checkpoint, its workflow made the advantages, or an estimator and the
            checkpoint do not go together (one has a value head, the other none).
    """
    content = read_given(checkpoint)
    saved = content[CHECKPOINT_KEY]
    first = saved["global_step"] + 1
    steps = list(range(first, first + num_batches))
    if missing := [step for step in steps if step not in files]:
        raise ValueError(f"--train {num_batches}: there are no episodes of step {missing[0]}, after the checkpoint of step {first - 1}")
    has_value_head = any(key.startswith(f"{PREFIX}value_head.") for key in content["state_dict"])
    for subject in subjects:
        if ("values" in ESTIMATORS.get(subject.name).needs) != has_value_head:
            raise ValueError(f"--train: {subject.label} and the checkpoint do not go together: only one of them has a value head")
    tasks = TASKS.get(config.task.name)(config.data_seed, **config.task.args)
    planned = TaskLoader(tasks.train, config, TrainerState()).total_batches
    trained, moves = [], []
    for subject in subjects:
        own = is_own(subject, config.rllm.algorithm)
        backend_args = {"files": files, "on_policy": steps if own else steps[:1], "planned_steps": planned}
        path = _train(_config_of(subject, config, steps[-1]), content, tasks, backend_args)
        weights = read_checkpoint(path / "checkpoints" / "last.ckpt")["state_dict"]
        moves.append([weights[key].double() - value.double() for key, value in content["state_dict"].items() if value.is_floating_point()])
        trained.append(_result(subject.label, path, steps, moves[-1]))
    products = np.array([[_dot(a, b) for b in moves] for a in moves])
    norms = np.sqrt(np.diag(products))
    with np.errstate(invalid="ignore", divide="ignore"):  # what did not move has no direction
        cosines = products / np.outer(norms, norms)
    return TrainingReport(first - 1, steps, _score_at(run, first - 1), trained, cosines)


def _config_of(subject: Subject, config: Config, last: int) -> Config:
    """The run's config with another estimator, in one process, and validated, saved and logged only at the end."""
    rllm = config.rllm
    label = "".join(c if c.isalnum() else "-" for c in subject.label)
    trainer = replace(
        rllm.trainer,
        experiment_name=f"{rllm.trainer.experiment_name}-replay-{label}",
        logger=["csv"],
        total_batches=last,
        test_freq=-1,
        save_freq=-1,
        val_only=False,
    )
    logging = replace(rllm.episode_logging, log_episodes=False)
    lightning = replace(config.lightning, devices=1, num_nodes=1, strategy="auto")
    return replace(config, rllm=replace(rllm, algorithm=subject.algorithm, trainer=trainer, episode_logging=logging), lightning=lightning)


def _train(config: Config, content: dict[str, Any], tasks: Any, backend_args: dict[str, Any]) -> Path:
    """A run from the checkpoint's content on; its folder."""
    saved = content[CHECKPOINT_KEY] | {"config": plain(config)}
    if content[CHECKPOINT_KEY]["config"]["rllm"]["algorithm"]["adv_estimator"] != config.rllm.algorithm.estimator_of(""):
        saved["extra_info"] = {**saved["extra_info"], "estimator_state": {}}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start.ckpt")
        torch.save(content | {CHECKPOINT_KEY: saved}, start)
        config = replace(config, rllm=replace(config.rllm, trainer=replace(config.rllm.trainer, resume=str(start))))
        workflow = WORKFLOWS.get(config.rllm.workflow.name)
        scoring = reward_argument(workflow, tasks.reward_function)
        trainer = UnifiedTrainer(
            ReplayBackend, as_dict_config(config), workflow, tasks.train, tasks.val, workflow_args=scoring, backend_args=backend_args
        )
        trainer.fit()
    return Path(trainer.run_path)


def _corrected(config: Config) -> Config:
    """With weights between sampler and trainer, where the run has none and does not take the sampler's log-probs as the old ones."""
    algorithm = config.rllm.algorithm
    correction = algorithm.rollout_correction
    if correction.bypass_mode or correction.mode != "none":
        return config
    algorithm = replace(algorithm, rollout_correction=replace(correction, mode="tis"))
    return replace(config, rllm=replace(config.rllm, algorithm=algorithm))


def _result(label: str, path: Path, steps: Sequence[int], move: Sequence[Tensor]) -> TrainedOn:
    rows = {int(row["step"]): row for row in read_metrics(path / "metrics.csv")}
    off_policy = [step for step in steps if rows.get(step, {}).get(OFF_POLICY) == 1]
    return TrainedOn(
        label=label,
        path=path,
        off_policy=off_policy,
        score=_score(rows.get(steps[-1], {})),
        moved=math.sqrt(_dot(move, move)),
        drift=max((rows[step].get("rollout/correction/kl_k3", math.nan) for step in off_policy), default=math.nan),
        effective=min((rows[step].get("rollout/correction/ess", math.nan) for step in off_policy), default=math.nan),
    )


def _score_at(run: RunDirectory, step: int) -> float:
    """The run's validation at a step, NaN where it had none then."""
    rows = read_metrics(run.metrics_csv) if run.metrics_csv.exists() else []
    return next((_score(row) for row in rows if row["step"] == step), math.nan)


def _score(row: dict[str, float]) -> float:
    score = validation_score({key: value for key, value in row.items() if not math.isnan(value)})
    return score if math.isfinite(score) else math.nan


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
