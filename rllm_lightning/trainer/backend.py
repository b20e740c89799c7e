"""`LightningBackend`: rollouts with the policy in this process, and its update, on whatever device Lightning gave it.

    generate_episodes          workflows sample n answers a task (and a greedy one where the estimator wants it)
    transform_to_backend_batch groups -> rows
    process_backend_batch      old, reference and value passes, where something needs them
    compute_advantages         algorithms/advantage over all groups
    update_policy              minibatches -> micro-batches -> loss -> backward -> clip -> optimizer step -> schedule step

What Lightning owns is handed in by `bind`: the wrapped policy, the optimizer, and `backward`. Every rank holds the rows of the whole
batch; the passes over them (`process_backend_batch`, `update_policy`) are shared out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, Config, ConfigError
from rllm_lightning.models.load import check_model
from rllm_lightning.registry import ENGINES, ESTIMATORS
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine, SamplingParams
from rllm_lightning.trainer.batch import Row, TrainBatch, make_train_batch, split_minibatches
from rllm_lightning.trainer.data import TaskLoader, task_id_of
from rllm_lightning.trainer.optimization import make_optimizer, schedule_factor, warmup_steps_of
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.protocol import BackendProtocol, TrainerState
from rllm_lightning.trainer.ranks import Ranks
from rllm_lightning.trainer.sharded import RolloutReplica, ShardedPolicy, check_sharded, is_sharded, whole
from rllm_lightning.trainer.update import MinibatchUpdate, UpdateMetrics
from rllm_lightning.trainer.warm_start import warm_start
from rllm_lightning.types import Episode
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine

logger = logging.getLogger(__name__)


class LightningBackend(BackendProtocol):
    """Samples with and trains a Hugging Face causal LM in this process. `config`: the full `DictConfig`."""

    name = "lightning"

    def __init__(self, config: Any, **kwargs: Any):
        if kwargs:
            raise TypeError(f"LightningBackend: unknown backend_args {sorted(kwargs)}")
        super().__init__(config)
        self.cfg = Config.from_config(config)
        self.algorithm = self.cfg.rllm.algorithm
        self.policy: Policy | None = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.engine: RolloutEngine | None = None
        self.replica: RolloutReplica | None = None  # what is sampled from where the policy is sharded
        self.backward: Callable[..., None] | None = None
        self.ranks = Ranks()
        self.train_dataset: Sequence[dict[str, Any]] = ()

    # ------------------------------------------------------------------------------------------------------------ set-up

    @property
    def needs(self) -> set[str]:
        """What the estimators of this run need beyond one reward a trajectory."""
        names = [self.algorithm.estimator_of(""), *(self.algorithm.estimator_of(role) for role in self.algorithm.estimator_map)]
        return {need for name in names for need in ESTIMATORS.get(name).needs}

    def validate_config(self) -> None:
        check_model(self.cfg.model)
        check_sharded(self.cfg)
        if "values" in self.needs and self.algorithm.value_coeff <= 0:
            raise ConfigError(
                ["rllm.algorithm.value_coeff: must be above 0, an estimator of this run needs values and they are learnt by it"]
            )

    def build_policy(self) -> Policy:
        kind = ShardedPolicy if is_sharded(self.cfg) else Policy
        return kind.from_config(self.cfg, value_head="values" in self.needs)

    def configure_optimizers(self, policy: torch.nn.Module) -> Any:
        return make_optimizer(policy, self.cfg.training)

    def bind(self, policy: Any, optimizer: Any, backward: Callable[..., None], ranks: Ranks) -> None:
        self.policy, self.optimizer, self.backward, self.ranks = policy, optimizer, backward, ranks

    async def warm_up(self, trainer_state: TrainerState) -> None:
        assert self.policy is not None, "bind() comes first"
        if self.cfg.warm_start.steps > 0:
            await warm_start(self.policy.unsharded(), self.train_dataset, self.cfg)

    def init_rollout_engine(self, **configs: Any) -> RolloutEngine:
        assert self.policy is not None, "bind() comes first"
        if isinstance(self.policy, ShardedPolicy):
            self.replica = self.policy.replica(self._rollout_dtype, self.policy.device)
        setup = EngineSetup(
            model=self.policy.model if self.replica is None else self.replica.module,
            tokenizer=self.policy.tokenizer,
            train=self._sampling(self.cfg.sampling.train),
            val=self._sampling(self.cfg.sampling.val),
            max_prompt_length=self.cfg.data.max_prompt_length,
            chat_template_kwargs=self.cfg.model.chat_template_kwargs,
        )
        self.engine = ENGINES.get(self.cfg.rollout_engine.name)(setup, **{**self.cfg.rollout_engine.args, **configs})
        return self.engine

    @property
    def _rollout_dtype(self) -> torch.dtype | None:
        """The precision that the engine samples in, where it has a key for it: a replica in that precision needs no copy."""
        name = self.cfg.rollout_engine.args.get("dtype")
        return None if name is None else getattr(torch, name)

    def _sampling(self, sampling: Any) -> SamplingParams:
        return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, self.cfg.data.max_response_length)

    def get_dataloader(self, dataset: Sequence[dict[str, Any]], trainer_state: TrainerState) -> Iterable[Any]:
        self.train_dataset = dataset
        return TaskLoader(dataset, self.cfg, trainer_state)

    async def on_train_start(self, trainer_state: TrainerState) -> None:
        assert self.policy is not None
        assert self.engine is not None
        if isinstance(self.policy, ShardedPolicy) and trainer_state.global_step == 0 and self.cfg.warm_start.steps > 0:
            self.policy.take_over()
        self._update_rollout_weights(trainer_state.weight_version)  # the engine was made before they were loaded or warmed up
        if self.algorithm.kl_beta > 0:
            self.policy.keep_reference()
        total = trainer_state.total_steps * self.cfg.training.num_minibatches * self.cfg.training.num_epochs_per_batch
        factor = schedule_factor(self.algorithm.lr_schedule, warmup_steps_of(self.algorithm, total), total)
        done = int(trainer_state.extra_info.get("optimizer_steps", 0))
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        for group in inner.param_groups:
            group["initial_lr"] = self.cfg.training.learning_rate
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(inner, factor, last_epoch=done - 1)

    def shutdown(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            asyncio.run(engine.shutdown())

    # ------------------------------------------------------------------------------------------------------------- stages

    async def generate_episodes(
        self, batch: Sequence[dict[str, Any]], agent_workflow_engine: UnifiedWorkflowEngine, is_validation: bool = False
    ) -> list[Episode]:
        """`rollout.n` (validation: `n_val`) episodes of each task, those of one task next to each other."""
        n = self.cfg.rllm.rollout.n_val if is_validation else self.cfg.rllm.rollout.n
        tasks = [task for task in batch for _ in range(n)]
        ids = [task_id_of(task) for task in tasks]
        episodes = await agent_workflow_engine.execute_tasks(tasks, ids, is_validation=is_validation)
        if not is_validation and "greedy_rewards" in self.needs:
            greedy = await agent_workflow_engine.execute_tasks(list(batch), [task_id_of(task) for task in batch], mode="greedy")
            _attach_greedy_rewards(episodes, greedy)
        await agent_workflow_engine.rollout_engine.rest()
        return episodes

    def transform_to_backend_batch(self, trainer_state: TrainerState) -> TrainBatch:
        return make_train_batch(trainer_state.trajectory_groups or [])

    async def process_backend_batch(self, trainer_state: TrainerState) -> None:
        """Score the rows with the policy as it is (old log-probs, values) and with the reference, where something needs it.

        With one optimizer step a batch nothing changes between this pass and the update, whose own detached log-probs then serve.
        """
        batch: TrainBatch = trainer_state.backend_batch
        assert self.policy is not None
        correction, training = self.algorithm.rollout_correction, self.cfg.training
        want_old = self._want_old
        want_reference = self.algorithm.kl_beta > 0
        if correction.bypass_mode:
            if missing := sum(row.rollout_logprobs is None for row in batch.rows):
                raise ValueError(f"rollout_correction.bypass_mode: the engine gave no log-probs for {missing} of {len(batch.rows)} rows")
            for row in batch.rows:
                row.old_logprobs = row.rollout_logprobs
        if not (want_old or want_reference or "values" in self.needs):
            return
        rows = self.ranks.share_rows(batch.rows)
        for micro in self.policy.micro_batches(rows, training.micro_batch_tokens):
            with torch.no_grad():
                scores = self.policy(micro) if want_old or "values" in self.needs else None
            reference = self.policy.reference_logprobs(micro).tolist() if want_reference else None
            for index, row in enumerate(micro.rows):
                length = len(row.response_ids)
                if scores is not None and want_old:
                    row.old_logprobs = scores.logprobs[index, :length].tolist()
                if scores is not None and scores.values is not None:
                    row.step.info["values"] = scores.values[index, :length].tolist()
                if reference is not None:
                    row.ref_logprobs = reference[index][:length]
        self._exchange_scores(batch.rows, rows)
        if want_old and self.cfg.rllm.episode_logging.log_episodes:
            for row in batch.rows:
                row.step.info["old_logprobs"] = row.old_logprobs

    @property
    def _want_old(self) -> bool:
        """Whether the log-probs before the update take a pass of their own."""
        training = self.cfg.training
        several_steps = training.num_minibatches * training.num_epochs_per_batch > 1
        wanted = several_steps or bool(self.needs & {"values", "logprobs"}) or self._kl_in_reward
        return wanted and not self.algorithm.rollout_correction.bypass_mode

    def _exchange_scores(self, rows: Sequence[Row], mine: Sequence[Row]) -> None:
        """All ranks get what each has computed of its rows."""
        if self.ranks.world_size == 1:
            return
        number = {id(row): index for index, row in enumerate(rows)}
        scores = [(number[id(row)], row.old_logprobs, row.ref_logprobs, row.step.info.get("values")) for row in mine]
        for index, old, reference, values in chain.from_iterable(self.ranks.gather(scores)):
            rows[index].old_logprobs, rows[index].ref_logprobs = old, reference
            if values is not None:
                rows[index].step.info["values"] = values

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl_beta > 0 and self.algorithm.kl_in == "reward"

    def compute_advantages(self, trainer_state: TrainerState, algorithm_config: AlgorithmConfig) -> None:
        if self._kl_in_reward:
            trainer_state.metrics.update(self._subtract_kl_from_rewards(trainer_state))
        metrics = collect_reward_and_advantage_from_trajectory_groups(
            trainer_state.trajectory_groups or [],
            algorithm_config,
            estimator_state=trainer_state.extra_info.setdefault("estimator_state", {}),
        )
        trainer_state.metrics.update(metrics)

    def _subtract_kl_from_rewards(self, trainer_state: TrainerState) -> dict[str, float]:
        """Take beta times the summed KL estimate of its tokens from each trajectory's reward."""
        from rllm_lightning.algorithms.kl import kl_penalty

        batch: TrainBatch = trainer_state.backend_batch
        trajectories = [trajectory for group in trainer_state.trajectory_groups or [] for trajectory in group.trajectories]
        penalties = [0.0] * len(trajectories)
        for row in batch.rows:
            old = torch.tensor(row.old_logprobs, dtype=torch.float64)
            reference = torch.tensor(row.ref_logprobs, dtype=torch.float64)
            penalties[row.sequence] += float(kl_penalty(old, reference, self.algorithm.kl_estimator).sum())
        for trajectory, penalty in zip(trajectories, penalties, strict=True):
            assert trajectory.reward is not None, "the grouping stage filled rewards"
            trajectory.info["kl_penalty"] = self.algorithm.kl_beta * penalty
            trajectory.reward -= self.algorithm.kl_beta * penalty
        return {"reward/kl_penalty/mean": self.algorithm.kl_beta * sum(penalties) / max(1, len(penalties))}

    def update_policy(self, trainer_state: TrainerState) -> None:
        """One optimizer step for each minibatch and epoch; minibatches without a trainable token are skipped."""
        assert self.policy is not None
        assert self.backward is not None
        training, metrics = self.cfg.training, UpdateMetrics()
        batch: TrainBatch = trainer_state.backend_batch.with_advantages()
        steps = 0
        for epoch in range(training.num_epochs_per_batch):
            key = (self.cfg.seed, trainer_state.global_step, epoch)
            for rows in split_minibatches(batch, training.num_minibatches, key):
                update = MinibatchUpdate(rows, self.cfg, self.policy, self.backward, metrics, self.ranks)
                self.optimizer.zero_grad(set_to_none=True)
                with self.policy.training_mode():
                    update.backward()
                metrics.add_grad_norm(self._clip())
                metrics.learning_rate = self.scheduler.get_last_lr()[0]
                self.optimizer.step()
                self.scheduler.step()
                steps += 1
        self._exchange_logged(batch.rows)
        info = trainer_state.extra_info
        info["optimizer_steps"] = int(info.get("optimizer_steps", 0)) + steps
        trainer_state.metrics.update(metrics.compute(self.ranks))
        trainer_state.metrics["optim/steps"] = float(info["optimizer_steps"])
        trainer_state.metrics["actor/skipped"] = float(steps == 0)
        if steps:
            self.optimizer.zero_grad(set_to_none=True)
            trainer_state.weight_version += 1
            self._update_rollout_weights(trainer_state.weight_version)

    def _exchange_logged(self, rows: Sequence[Row]) -> None:
        """The first rank, which writes the episodes, gets the log-probs that the update itself found where there was no pass before it."""
        if self.ranks.world_size == 1 or self._want_old or not self.cfg.rllm.episode_logging.log_episodes:
            return
        found = {index: row.step.info["old_logprobs"] for index, row in enumerate(rows) if "old_logprobs" in row.step.info}
        for part in self.ranks.gather(found):
            for index, values in part.items():
                rows[index].step.info["old_logprobs"] = values

    def _update_rollout_weights(self, version: int) -> None:
        assert self.engine is not None
        if self.replica is not None:
            self.replica.refresh()
        self.engine.on_weights_updated(version)

    def _clip(self) -> torch.Tensor:
        """The global gradient norm before clipping."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]  # type: ignore[union-attr]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if (limit := self.cfg.training.max_grad_norm) > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm


def _attach_greedy_rewards(episodes: Sequence[Episode], greedy: Sequence[Episode]) -> None:
    """Put the greedy answer's reward on every trajectory of the same task and role, as `info["greedy_reward"]`."""
    rewards = {
        (episode.task_id, trajectory.name): sum(step.reward for step in trajectory.steps)
        if trajectory.reward is None
        else trajectory.reward
        for episode in greedy
        for trajectory in episode.trajectories
    }
    for episode in episodes:
        for trajectory in episode.trajectories:
            if (key := (episode.task_id, trajectory.name)) in rewards:
                trajectory.info["greedy_reward"] = rewards[key]
