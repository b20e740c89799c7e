"""`UnifiedLightningModule`: the loop. One `training_step` is one batch, and reads as the list of its eight stages.

    rollout -> grouping -> filtering -> rows -> old and reference log-probs -> advantages -> update -> metrics

Lightning owns devices, precision and checkpoints. Optimization is manual: Lightning's own `global_step` counts optimizer steps (none
for a batch that was filtered out, several for several minibatches), so nothing here goes by it; `TrainerState.global_step` counts
batches, is the x-axis, and decides about validation, saving and stopping.

With several processes (ranks) each samples the answers to a share of the tasks; then all hold the episodes of the whole batch, and
every line below does on each of them what it would do in the only one. The first rank alone writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision

from rllm_lightning import schema
from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.metrics import (
    rollout_metrics,
    solve_counts,
    termination_metrics,
    validation_metrics,
    validation_score,
    workflow_metrics,
)
from rllm_lightning.algorithms.rejection_sampling import apply_rejection_sampling_and_filtering
from rllm_lightning.algorithms.transform import GroupingHook, group_by_task_and_name, transform_episodes_to_trajectory_groups
from rllm_lightning.config import Config, ConfigError, RejectionSamplingConfig, TransformConfig
from rllm_lightning.rollout.chat import token_texts
from rllm_lightning.tasks.task import AdaptiveTasks
from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.run_directory import RunDirectory, writing
from rllm_lightning.tracking.summary import RunSummary
from rllm_lightning.tracking.tracker import Tracker
from rllm_lightning.trainer.checkpoints import CHECKPOINT_KEY, prune, publish, random_state, restore_random_state
from rllm_lightning.trainer.data import TaskBatch
from rllm_lightning.trainer.interruption import Interrupted, StopSignal
from rllm_lightning.trainer.precision import AUTO, MIXED, choose_precision
from rllm_lightning.trainer.protocol import BackendProtocol, TrainerState
from rllm_lightning.trainer.ranks import Ranks, merge
from rllm_lightning.trainer.resume import forbidden_changes, plain
from rllm_lightning.trainer.sharded import ShardedPolicy, ShardedStrategy
from rllm_lightning.trainer.watch import RankWatch
from rllm_lightning.types import Episode, TerminationReason
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine
from rllm_lightning.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

FLAT_BATCHES = 5  # in a row without any advantage, until a warning says so
T = TypeVar("T")


class UnifiedLightningModule(L.LightningModule):
    """Drives a backend through the batches of a run. Made by `UnifiedTrainer`.

    Args:
        backend: samples and trains; its policy becomes this module's.
        config: the typed config.
        workflow_class, workflow_args: what is run on each task.
        train_dataset, val_dataset: tasks (dicts); an empty validation set means no validation.
        run: where files go; summary: follows the run. Both are None on other ranks than the first.
        stop: set when the run was asked to stop.
        emergency: ends what must be ended where a failed rank leaves this one no other way.
        traj_grouping_hook: makes the trajectory groups.
    """

    def __init__(
        self,
        backend: BackendProtocol,
        config: Config,
        workflow_class: type[Workflow],
        workflow_args: dict[str, Any],
        train_dataset: Sequence[dict[str, Any]],
        val_dataset: Sequence[dict[str, Any]],
        run: RunDirectory | None,
        summary: RunSummary | None,
        stop: StopSignal,
        traj_grouping_hook: GroupingHook = group_by_task_and_name,
        emergency: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.backend = backend
        self.config = config
        self.workflow_class, self.workflow_args = workflow_class, workflow_args
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.run_directory, self.summary, self.stop = run, summary, stop
        self.traj_grouping_hook, self.emergency = traj_grouping_hook, emergency
        self.ranks = Ranks()
        rejection = config.rllm.rejection_sample
        self.rejection_config = rejection if rejection.enable else RejectionSamplingConfig()
        self.episode_logger: EpisodeLogger | None = None
        if run is not None and config.rllm.episode_logging.log_episodes:
            self.episode_logger = EpisodeLogger(run.episodes_under(config.rllm.episode_logging.episode_log_dir), self._token_texts)
        self.trainer_state = TrainerState()
        self.policy: torch.nn.Module | None = None
        self.workflow_engine: UnifiedWorkflowEngine | None = None
        self.interrupted: Interrupted | None = None
        self._runner = asyncio.Runner()
        self._last_validation = -1
        self._score, self._best_score = -math.inf, -math.inf  # of the last validation, of the best one that was saved
        self._best_step = -1  # at which that was
        self._num_flat_batches = 0  # the last ones in a row in which all advantages were 0
        self._saved = (-1, -1)  # step and last validation at the last save
        self._random_state: dict[str, Any] | None = None  # of a checkpoint, until training goes on

    # ------------------------------------------------------------------------------------------ what Lightning asks for

    def setup(self, stage: str) -> None:
        """The ranks meet: they watch each other, and must have one config; files lie where the first one puts them."""
        self.ranks = Ranks.of_process_group()
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        address = environment.main_address if environment is not None else "localhost"
        self.stop.join(self.ranks, RankWatch.start(self.ranks, address, self.stop.heard, self.emergency))
        self._check_same_config()
        folder = self.ranks.broadcast(self.run_directory.path if self.run_directory else None)
        assert folder is not None, "the first rank has a run directory"
        self.run_directory = RunDirectory(folder)

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = self.backend.build_policy()
            if self.config.lightning.precision == AUTO:
                self._settle_precision()
            if isinstance(self.trainer.strategy, ShardedStrategy):
                self.trainer.strategy.shard(self.policy, self.ranks)

    def train_dataloader(self) -> Any:
        tasks = self.train_dataset if len(self.train_dataset) else self.val_dataset  # val_only; Lightning skips a fit without batches
        return self.backend.get_dataloader(tasks, self.trainer_state)

    def configure_optimizers(self) -> Any:
        return self.backend.configure_optimizers(self.policy) if self.policy is not None else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = self.trainer_state
        checkpoint[CHECKPOINT_KEY] = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "weight_version": state.weight_version,
            "extra_info": state.extra_info,
            "rejection_sampling": state.rs_state.state_dict(),
            "tasks": self.train_dataset.state_dict() if isinstance(self.train_dataset, AdaptiveTasks) else None,
            "last_validation": self._last_validation,
            "best_score": self._best_score,
            "best_step": self._best_step,
            "random_state": random_state(),
            "config": plain(self.config),
            "reference": getattr(self.policy, "reference_weights", None),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved, state = checkpoint[CHECKPOINT_KEY], self.trainer_state
        if problems := forbidden_changes(saved["config"], self.config):
            raise ConfigError([f"{problem}; leave it as it was" for problem in problems])
        state.global_step, state.epoch = saved["global_step"], saved["epoch"]
        state.weight_version, state.extra_info = saved["weight_version"], saved["extra_info"]
        state.rs_state.load_state_dict(saved["rejection_sampling"])
        if isinstance(self.train_dataset, AdaptiveTasks):
            self.train_dataset.load_state_dict(saved["tasks"])
        self._last_validation, self._best_score, self._best_step = saved["last_validation"], saved["best_score"], saved["best_step"]
        self._random_state = saved["random_state"]
        if saved["reference"] is not None and self.policy is not None:
            self.policy.load_reference(saved["reference"])  # type: ignore[operator]

    # ----------------------------------------------------------------------------------------------------- start and end

    def on_train_start(self) -> None:
        state, trainer_config = self.trainer_state, self.config.rllm.trainer
        state.total_steps = len(self.trainer.train_dataloader)  # type: ignore[arg-type]
        self.backend.bind(self.policy, self._optimizer(), self.add_gradient, self.ranks)
        engine = self.backend.init_rollout_engine()
        engine.weight_version = state.weight_version
        self.workflow_engine = UnifiedWorkflowEngine(self.workflow_class, self.workflow_args, engine, self.config)
        if self.summary is not None:
            self.summary.precision = str(self.trainer.precision)
            self.summary.begin(state.global_step)
        for tracker in self._trackers():
            tracker.begin(state.global_step, state.total_steps)
        with self._ending_on_interruption():
            if state.global_step == 0:
                if self.ranks.is_first:
                    self.wait(self.stop.wait(self.backend.warm_up(state)))
                self.stop.check()
                self.ranks.send_weights(self.policy)
            self.run(self.backend.on_train_start(state))
            if self._random_state is not None:
                restore_random_state(self._random_state)
            if not trainer_config.val_only:
                self._restore_best()
            if self._is_validation_due_at_start():
                self.log_step(self.validate())
                if self._is_save_due() and not trainer_config.val_only:
                    self.save_checkpoint()
        if trainer_config.val_only or state.global_step >= state.total_steps:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        state, val_only = self.trainer_state, self.config.rllm.trainer.val_only
        with self._ending_on_interruption():
            if not self.interrupted and not val_only and self._last_validation != state.global_step:
                self.log_step(self.validate())
        self.wait(self.backend.on_train_end(state))
        if not val_only:
            if self._saved != (state.global_step, self._last_validation):
                self.save_checkpoint()
            if self.interrupted is None:
                self.save_model()

    def close(self) -> None:
        """End the workflows and the event loop. Idempotent."""
        if self.workflow_engine is not None:
            self.workflow_engine.shutdown()
        self._runner.close()

    # ------------------------------------------------------------------------------------------------------------- a batch

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        state = self.trainer_state
        state.reset_batch()
        state.global_step += 1
        state.epoch, state.is_training = batch.epoch, True
        start = time.perf_counter()
        try:
            self._pipeline(batch)
        except Interrupted as interrupted:  # in stage 1: nothing of this batch has been learnt, it is sampled again after a resume
            state.global_step -= 1
            self.interrupted, self.trainer.should_stop = interrupted, True
            return
        finally:
            if self.episode_logger is not None and state.has_episodes:
                self.episode_logger.log(state.episodes or [], "train", state.global_step)
        state.timing_dict["step"] = time.perf_counter() - start

    def _pipeline(self, batch: TaskBatch) -> None:
        state, backend = self.trainer_state, self.backend
        engine = self.workflow_engine
        assert engine is not None, "on_train_start made it"

        engine.set_training_step(state.global_step, "train")
        if batch.first_of_epoch:
            self.run(backend.on_epoch_start(state))
        self.run(backend.on_batch_start(state))

        # 1. rollouts
        with self.timed("generate"):
            state.episodes = self.rollouts(batch.tasks)
        if not state.has_episodes:
            logger.warning("step %d: no episodes", state.global_step)
            return
        # 2. grouping
        with self.timed("group"):
            state.trajectory_groups, metrics = transform_episodes_to_trajectory_groups(
                state.episodes, TransformConfig(), self.config.rllm.compact_filtering, traj_grouping_hook=self.traj_grouping_hook
            )
            state.metrics.update(metrics)
        # 3. filtering
        with self.timed("filter"):
            state.trajectory_groups, _, metrics = apply_rejection_sampling_and_filtering(
                state.episodes, state.trajectory_groups, self.rejection_config, state.rs_state
            )
            state.metrics.update(metrics)
        if state.has_trajectory_groups:
            # 4. training rows
            with self.timed("transform"):
                state.backend_batch = backend.transform_to_backend_batch(state)
            # 5. what the loss needs besides advantages
            with self.timed("process"):
                self.wait(backend.process_backend_batch(state))
            # 6. advantages
            with self.timed("advantage"):
                backend.compute_advantages(state, self.config.rllm.algorithm)
            # 7. update
            with self.timed("update"):
                backend.update_policy(state)
                self.wait(backend.on_policy_updated(state))
        else:
            reasons = Counter((episode.termination_reason or TerminationReason.UNKNOWN).value for episode in state.episodes)
            ends = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            too_long = TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED.value in reasons
            remedy = f"; raise data.max_prompt_length, which is {self.config.data.max_prompt_length}" if too_long else ""
            logger.warning(
                "step %d: nothing is left to train on; the %d episodes ended as: %s%s", state.global_step, len(state.episodes), ends, remedy
            )
        # 8. metrics and a look at two trajectories
        state.metrics["batch/skipped"] = float(not state.has_trajectory_groups)
        state.metrics.update(workflow_metrics(state.episodes).means() | termination_metrics(state.episodes).means())
        state.metrics.update(rollout_metrics(state.episodes))
        self._warn_where_nothing_is_learnt()
        if isinstance(self.train_dataset, AdaptiveTasks):
            rates = {task_id: correct / count for task_id, (count, correct) in solve_counts(state.episodes).items()}
            state.metrics.update(self.train_dataset.observe(rates))
        self._look_at(state.episodes[:2])

    def _warn_where_nothing_is_learnt(self) -> None:
        """Say once when all advantages were 0 for several batches in a row: the run looks busy, and no reward moves it."""
        shares = [value for key, value in self.trainer_state.metrics.items() if re.fullmatch("advantage/.*/fraction_zero", key)]
        self._num_flat_batches = self._num_flat_batches + 1 if shares and min(shares) == 1 else 0
        if self._num_flat_batches == FLAT_BATCHES:
            logger.warning(
                "step %d: all advantages of the last %d batches were 0, so nothing is learnt from rewards: within each group they are all "
                "equal (see reward/*/mean). Easier tasks, a warm start, graded rewards or a larger rllm.rollout.n bring differences",
                self.trainer_state.global_step,
                FLAT_BATCHES,
            )

    def on_train_batch_end(self, outputs: Any, batch: TaskBatch, batch_idx: int) -> None:
        """Validate, log and save, in this order; stop after the last batch."""
        state = self.trainer_state
        if self.interrupted:
            return
        self.wait(self.backend.on_batch_end(state))
        if batch.last_of_epoch:
            self.wait(self.backend.on_epoch_end(state))
        metrics = dict(state.metrics)
        last = state.global_step >= state.total_steps
        with self._ending_on_interruption():
            self.stop.check()
            if self._is_validation_due():
                metrics |= self.validate()
        metrics |= {f"time/{name}": seconds for name, seconds in state.timing_dict.items()}
        metrics["train/epoch"] = float(state.epoch)
        self.log_step(metrics)
        if self._is_save_due():
            self.save_checkpoint()
        if last:
            self.trainer.should_stop = True

    # ---------------------------------------------------------------------------------------------------------- validation

    def validate(self) -> dict[str, float]:
        """Run `rollout.n_val` episodes of every validation task with the policy as it is.

        Returns:
            `val/{data_source}/...`, `val/reward/{role}/...` and `time/testing`; empty where the backend skips it or there are no tasks.
        """
        state, backend = self.trainer_state, self.backend
        if not len(self.val_dataset) or not self.wait(backend.on_validation_start(state)):
            return {}
        assert self.workflow_engine is not None, "on_train_start made it"
        self.workflow_engine.set_training_step(state.global_step, "val")
        state.is_training = False
        episodes: list[Episode] = []
        tasks = [self.val_dataset[index] for index in range(len(self.val_dataset))]
        size = self.config.data.val_batch_size or len(tasks)
        with self.timed("testing"), torch.no_grad():
            for start in range(0, len(tasks), size):
                episodes += self.rollouts(tasks[start : start + size], is_validation=True)
        state.is_training = True
        if self.episode_logger is not None:
            self.episode_logger.log(episodes, "val", state.global_step)
        groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig(), traj_grouping_hook=self.traj_grouping_hook)
        rewards = collect_reward_and_advantage_from_trajectory_groups(groups, self.config.rllm.algorithm, collect_advantage=False)
        metrics = validation_metrics(episodes, self.config.rllm.rollout.n_val) | {f"val/{key}": value for key, value in rewards.items()}
        self.wait(backend.on_validation_end(state))
        self._last_validation, self._score = state.global_step, validation_score(metrics)
        return metrics | {"time/testing": state.timing_dict["testing"]}

    # --------------------------------------------------------------------------------------------------- logging and saving

    def log_step(self, metrics: dict[str, float]) -> None:
        """Everything known of the present step, once a step."""
        if not metrics or self.summary is None:
            return
        step = self.trainer_state.global_step
        for tracker in self.trainer.loggers:
            tracker.log_metrics(metrics, step)
        self.summary.add(metrics, step)
        if self._last_validation == step and self.trainer_state.episodes:
            for tracker in self._trackers():
                tracker.log_episodes(self.trainer_state.episodes, step)

    def save_checkpoint(self) -> None:
        """Write `step_{n}.ckpt`, make it `last.ckpt`, and `best.ckpt` where this step's validation is the best so far; prune old
        ones. What only an interruption saves is not the best: the run would not be the one that was not stopped."""
        assert self.run_directory is not None, "setup made it"
        folder = self.run_directory.checkpoints
        path = folder / f"step_{self.trainer_state.global_step}.ckpt"
        self._saved = (self.trainer_state.global_step, self._last_validation)
        counts = self._last_validation == self.trainer_state.global_step and (not self.interrupted or self._is_save_due())
        is_best = counts and self._score > self._best_score
        if is_best:
            self._best_score, self._best_step = self._score, self.trainer_state.global_step
        with writing(path):
            self.trainer.save_checkpoint(path, weights_only=False)  # Lightning's word for "without the optimizer"
            if self.ranks.is_first:
                publish(path, "last.ckpt")
                if is_best:
                    publish(path, "best.ckpt")
                prune(folder, self.config.rllm.trainer.keep_checkpoints, self.trainer_state.global_step)

    def _restore_best(self) -> None:
        """Make `best.ckpt` what it was at the checkpoint that is resumed: the process may have been killed before it wrote it, or may have
        gone on to a better one on the course that is given up."""
        if self.ranks.is_first and self.run_directory is not None and self._best_step >= 0:
            path = self.run_directory.checkpoints / f"step_{self._best_step}.ckpt"
            if path.exists():
                publish(path, "best.ckpt")

    def save_model(self) -> None:
        """The trained model in Hugging Face format."""
        takes_part = self.ranks.is_first or isinstance(self.policy, ShardedPolicy)  # whose weights are with all ranks
        if takes_part and self.run_directory is not None and hasattr(self.policy, "save"):
            folder = self.run_directory.checkpoints / "model"
            with writing(folder):
                self.policy.save(folder)  # type: ignore[operator,union-attr]
            for tracker in self._trackers():
                tracker.log_model(folder)

    def _trackers(self) -> list[Tracker]:
        return [tracker for tracker in self.trainer.loggers if isinstance(tracker, Tracker)]

    def _token_texts(self, ids: Sequence[int]) -> list[str] | None:
        tokenizer = getattr(self.policy, "tokenizer", None)  # a backend of another kind may have none
        return None if tokenizer is None else token_texts(tokenizer, ids)

    def _look_at(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            for trajectory in episode.trajectories:
                for step in trajectory.steps:
                    logger.info(
                        "%s %s: %r -> reward %s, advantage %s",
                        episode.id,
                        trajectory.name,
                        step.model_response,
                        trajectory.reward,
                        step.advantage,
                    )

    # --------------------------------------------------------------------------------------------------------------- helpers

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop that this module owns."""
        return self._runner.run(work)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """`wait` that ends with `Interrupted` on all ranks when one is asked to stop."""
        self.wait(self.stop.wait(work))
        self.stop.check()

    def rollouts(self, tasks: Sequence[dict[str, Any]], is_validation: bool = False) -> list[Episode]:
        """Stage 1 on all ranks at once: each samples its share of the tasks; all get the episodes of all, in the order of the tasks.

        `timing_dict["rank_wait"]`: the mean over the ranks of the seconds they waited for the slowest.

        Raises:
            Interrupted: on all ranks, when one is asked to stop.
        """
        assert self.workflow_engine is not None, "on_train_start made it"
        start = time.perf_counter()
        share = self.ranks.share(tasks)
        work = self.backend.generate_episodes(share, self.workflow_engine, is_validation=is_validation)
        episodes = self.wait(self.stop.wait(work))
        seconds = time.perf_counter() - start
        answers = self.ranks.gather((self.stop.signum, seconds, episodes), "an episode")
        signums, times, shares = zip(*answers, strict=True)
        self.stop.settle(signums)
        if self.ranks.world_size > 1:
            timing = self.trainer_state.timing_dict
            timing["rank_wait"] = timing.get("rank_wait", 0.0) + max(times) - sum(times) / len(times)
        return merge(shares, len(tasks))

    def add_gradient(self, loss: torch.Tensor, sync: bool = True) -> None:
        """Add the gradient of `loss`; with `sync` the gradients of all ranks, as they are then, are averaged."""
        blocked = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if sync else blocked():
            self.manual_backward(loss)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `timing_dict[name]`, in seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            timing = self.trainer_state.timing_dict
            timing[name] = timing.get(name, 0.0) + time.perf_counter() - start

    def _is_validation_due_at_start(self) -> bool:
        """Before the first batch, and where an interruption kept the one of the last finished batch from ending."""
        step, trainer_config = self.trainer_state.global_step, self.config.rllm.trainer
        if step == 0 or trainer_config.val_only:
            return trainer_config.val_before_train or trainer_config.val_only
        return self._last_validation < step and self._is_validation_due()

    def _is_validation_due(self) -> bool:
        """After the batch of the present step."""
        step, test_freq = self.trainer_state.global_step, self.config.rllm.trainer.test_freq
        return step >= self.trainer_state.total_steps or (test_freq > 0 and step % test_freq == 0)

    def _is_save_due(self) -> bool:
        """After the batch of the present step."""
        step, save_freq = self.trainer_state.global_step, self.config.rllm.trainer.save_freq
        return save_freq > 0 and step > 0 and step % save_freq == 0

    @contextlib.contextmanager
    def _ending_on_interruption(self) -> Iterator[None]:
        try:
            yield
        except Interrupted as interrupted:
            self.interrupted, self.trainer.should_stop = interrupted, True

    def _check_same_config(self) -> None:
        theirs = self.ranks.gather(schema.to_plain_tree(self.config))
        for rank, config in enumerate(theirs):
            if keys := schema.differences(theirs[0], config):
                raise ConfigError(
                    [f"{key}: rank {rank} has another value than rank 0; give all processes one command line" for key in keys]
                )

    def _settle_precision(self) -> None:
        """What `auto` means depends on the model, which is there only now; all ranks do as the first."""
        device = self.trainer.strategy.root_device
        if self.ranks.broadcast(choose_precision(self.policy, device)) == MIXED:
            self.trainer.strategy.precision_plugin = MixedPrecision("bf16-mixed", device.type)

    def _optimizer(self) -> Any:
        optimizers = self.optimizers()
        return optimizers or None
