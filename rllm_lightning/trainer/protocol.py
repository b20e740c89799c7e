"""What the loop asks of a backend, and what travels through the loop.

`BackendProtocol` is the seam between the loop (`module.py`) and whatever samples and trains: the loop calls its methods in the
order of the eight stages, and hands each the one `TrainerState`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rllm_lightning.algorithms.rejection_sampling import RejectionSamplingState
from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.types import Episode, TrajectoryGroup

if TYPE_CHECKING:
    import torch

    from rllm_lightning.rollout.engine import RolloutEngine
    from rllm_lightning.trainer.ranks import Ranks
    from rllm_lightning.workflows.engine import UnifiedWorkflowEngine


@dataclass
class TrainerState:
    """Where the run stands, and the batch that is being worked on.

    `global_step` counts batches from 1 (0: validation before training) and is the x-axis of every metric; during a batch it is
    that batch's number. `weight_version` counts policy updates that changed the weights. `extra_info` is kept in checkpoints
    (plain containers only); `episodes`, `trajectory_groups`, `backend_batch`, `metrics` and `timing_dict` belong to one batch.
    """

    rs_state: RejectionSamplingState = field(default_factory=RejectionSamplingState)
    global_step: int = 0
    epoch: int = 0
    total_steps: int = 0
    is_training: bool = True
    weight_version: int = 0
    timing_dict: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra_info: dict[str, Any] = field(default_factory=dict)
    episodes: list[Episode] | None = None
    trajectory_groups: list[TrajectoryGroup] | None = None
    backend_batch: Any = None

    def reset_batch(self) -> None:
        """Forget the former batch."""
        self.timing_dict, self.metrics = {}, {}
        self.episodes = self.trajectory_groups = self.backend_batch = None

    @property
    def has_episodes(self) -> bool:
        return bool(self.episodes)

    @property
    def has_trajectory_groups(self) -> bool:
        return bool(self.trajectory_groups)

    @property
    def has_backend_batch(self) -> bool:
        return self.backend_batch is not None


class BackendProtocol(ABC):
    """What samples and trains. Constructed with the full config (`DictConfig`) and the trainer's `backend_args`."""

    name = "backend"

    def __init__(self, config: Any, **kwargs: Any):
        self.config = config

    # -- set-up -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def init_rollout_engine(self, **configs: Any) -> RolloutEngine:
        """Make the engine that workflows sample from; called once, before training."""

    def validate_config(self) -> None:
        """Refuse a config that cannot run, before anything expensive. Raises `ValueError`."""

    @abstractmethod
    def get_dataloader(self, dataset: Sequence[dict[str, Any]], trainer_state: TrainerState) -> Iterable[Any]:
        """Batches of tasks, beginning after `trainer_state.global_step` finished ones."""

    def shutdown(self) -> None:
        """Release everything; called on every way out, once or more."""

    # -- what Lightning owns and a backend borrows --------------------------------------------------------------------

    def build_policy(self) -> torch.nn.Module | None:
        """The trained module, for the LightningModule to own (None: nothing is trained in this process)."""
        return None

    def configure_optimizers(self, policy: torch.nn.Module) -> Any:
        """What `LightningModule.configure_optimizers` returns."""
        return None

    def bind(self, policy: Any, optimizer: Any, backward: Callable[..., None], ranks: Ranks) -> None:
        """Called when Lightning has placed and wrapped the policy, before `on_train_start`.

        `backward(loss, sync=True)` adds a gradient. The gradients of all ranks are averaged at a call with `sync`, of which every
        rank makes exactly one for each optimizer step: the last one. Those of a sharded policy are averaged at every call, of which
        all ranks make equally many.
        """

    async def warm_up(self, trainer_state: TrainerState) -> None:
        """Prepare the policy of a fresh run. Called on the first rank alone; the others then get its weights."""

    # -- the stages ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def generate_episodes(
        self, batch: Sequence[dict[str, Any]], agent_workflow_engine: UnifiedWorkflowEngine, is_validation: bool = False
    ) -> list[Episode]:
        """Stage 1: run the workflow on every task of the batch, equally often on each, and keep the episodes in the order of the
        tasks. With several ranks, `batch` is this rank's share of the tasks and may be empty; all other stages see the whole."""

    @abstractmethod
    def transform_to_backend_batch(self, trainer_state: TrainerState) -> Any:
        """Stage 4: `trainer_state.trajectory_groups` -> training rows, without advantages."""

    @abstractmethod
    async def process_backend_batch(self, trainer_state: TrainerState) -> None:
        """Stage 5: what the loss needs besides advantages (old and reference log-probs, values)."""

    @abstractmethod
    def compute_advantages(self, trainer_state: TrainerState, algorithm_config: AlgorithmConfig) -> None:
        """Stage 6: write advantages to the steps of the groups, metrics to `trainer_state.metrics`."""

    @abstractmethod
    def update_policy(self, trainer_state: TrainerState) -> None:
        """Stage 7: loss, backward, optimizer steps; `weight_version` goes up when weights changed."""

    # -- hooks ---------------------------------------------------------------------------------------------------------

    async def on_train_start(self, trainer_state: TrainerState) -> None: ...

    async def on_train_end(self, trainer_state: TrainerState) -> None: ...

    async def on_epoch_start(self, trainer_state: TrainerState) -> None: ...

    async def on_epoch_end(self, trainer_state: TrainerState) -> None: ...

    async def on_batch_start(self, trainer_state: TrainerState) -> None: ...

    async def on_batch_end(self, trainer_state: TrainerState) -> None: ...

    async def on_policy_updated(self, trainer_state: TrainerState) -> None: ...

    async def on_validation_start(self, trainer_state: TrainerState) -> bool:
        """Whether to validate now: False skips this validation."""
        return True

    async def on_validation_end(self, trainer_state: TrainerState) -> None: ...
