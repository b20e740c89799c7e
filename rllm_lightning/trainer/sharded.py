"""FSDP2 (`lightning.strategy=fsdp2`): every process keeps a part of each weight, of its gradient and of its optimizer state.

    load, whole, in host memory --shard--> DTensors, a part of each parameter on every rank
    a pass        the weights of one block at a time are gathered, used, and dropped; a backward leaves each rank its part of the gradient
    rollouts      `RolloutReplica`: a whole copy on every rank, made up to date tensor by tensor after each update
    checkpoints   one file, written by the first rank, the same as without sharding
    model folder  written by the first rank from whole tensors

What all ranks must do at once, because weights travel: every forward and backward pass (`ShardedPolicy.micro_batches` gives all
ranks equally many), refreshing the replica, checkpoints, saving the model. Sampling is not among it.

With P parameters (4 bytes each in float32), W ranks and AdamW, a rank's device holds 16·P/W bytes of weights, gradients and moments,
the gathered weights of two blocks and of the embedding (with its gradient, in a backward), activations, and the replica: P parameters
in `rollout_engine.dtype`. Gradients are reduced at every micro-batch, not at the last one alone: whole gradients would have to be
kept until then. Host memory holds the whole model once a process while it is loaded (twice where there is a reference policy); on the
first rank also when a checkpoint (weights and moments, 12·P bytes, and the reference) or the model is written. A warm start is computed
by the first rank from whole weights, for which its device needs room: 16·P bytes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rllm_lightning.config import Config, ConfigError
from rllm_lightning.trainer.batch import MicroBatch, Row
from rllm_lightning.trainer.layout import collate_rows
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.ranks import TIMEOUT, Ranks
from rllm_lightning.types import Step

logger = logging.getLogger(__name__)

NAMES = ("fsdp2", "model_parallel")  # of the strategy: ours, and Lightning's


def is_sharded(config: Config) -> bool:
    return config.lightning.strategy in NAMES


def check_sharded(config: Config) -> None:
    """Refuse what does not go together with sharding. Raises `ConfigError`."""
    if not is_sharded(config):
        return
    problems, strategy = [], f"lightning.strategy={config.lightning.strategy}"
    if config.model.compile:
        problems.append(f"model.compile: must be false with {strategy}")
    if config.lightning.precision in ("bf16-true", "16-true"):  # Lightning would convert what is sharded already
        problems.append(f"lightning.precision: {config.lightning.precision} does not go with {strategy}; set model.dtype instead")
    if problems:
        raise ConfigError(problems)


# -------------------------------------------------------------------------------------------------------- whole tensors


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank (a collective call where it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, model: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, sharded as `model` is; no communication."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def whole_state(tree: Any, keep: bool) -> Any:
    """A tree of dicts and lists with every tensor whole and in host memory, one after the other (a collective call).

    Args:
        keep: whether this rank wants the result; else it takes part only, and the tensors of its tree are None.
    """
    known: dict[int, Tensor | None] = {}  # tied weights stay one tensor, in memory and in the file

    def gathered(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: gathered(value) for key, value in node.items()}
        if isinstance(node, list):
            return [gathered(value) for value in node]
        if not isinstance(node, Tensor):
            return node
        if id(node) not in known:
            full = whole(node.detach())
            known[id(node)] = full.cpu() if keep else None
        return known[id(node)]

    return gathered(tree)


@torch.no_grad()
def load_whole(module: nn.Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
    """`module.load_state_dict` of whole tensors that every rank has."""
    own = module.state_dict()
    module.load_state_dict({name: part_like(value, own[name]) if name in own else value for name, value in weights.items()}, strict=strict)


# ------------------------------------------------------------------------------------------------------------ strategy


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy, all processes being data-parallel. Its checkpoints are files as any other strategy writes them,
    and it reads those of any other: weights and optimizer states are whole in them, and each rank takes its part."""

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False, timeout=TIMEOUT)

    def _configure_launcher(self) -> None:
        """None: see `launch.py`."""

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def shard(self, policy: nn.Module | None, ranks: Ranks) -> None:
        """Shard a policy that has just been built.

        Raises:
            ConfigError: it is none of ours.
        """
        if isinstance(policy, ShardedPolicy):
            policy.shard(self.device_mesh["data_parallel"], ranks)
        elif policy is not None:
            raise ConfigError([f"lightning.strategy: this strategy shards no {type(policy).__name__} of another backend; use ddp"])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return whole_state(self.model.state_dict(keep_vars=True), self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return whole_state(getattr(optimizer, "optimizer", optimizer).state_dict(), self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # mapped: of a rank's memory it takes only what its parts are cut from
        return torch.load(checkpoint_path, mmap=True, map_location="cpu", weights_only=True)  # whatever the environment says

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        load_whole(self.model, checkpoint["state_dict"], strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {
                    key: part_like(value, parameters[number]) if value.shape == parameters[number].shape else value
                    for key, value in entries.items()
                }
                for number, entries in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


# -------------------------------------------------------------------------------------------------------------- policy


class ShardedPolicy(Policy):
    """A `Policy` that can be sharded once, after it has been built from whole weights."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ranks = Ranks()
        self._shell: list[nn.Module] = []  # the model without weights; in a list, so that it is no submodule
        self._build_whole: Callable[[], Policy] | None = None
        self._whole: list[Policy] = []  # on the first rank, during a warm start
        self._has_reference = False

    @classmethod
    def from_config(cls, config: Config, value_head: bool = False) -> ShardedPolicy:
        policy = super().from_config(config, value_head)
        assert isinstance(policy, ShardedPolicy)
        policy._build_whole = lambda: Policy.from_config(config, value_head)
        if config.rllm.algorithm.kl_beta > 0:
            Policy.keep_reference(policy)  # its weights come later; sharded models cannot be copied
        return policy

    def shard(self, mesh: DeviceMesh, ranks: Ranks) -> None:
        """Keep a part of each parameter, on this rank's device. Blocks are gathered one by one, all else with the whole."""
        self._ranks = ranks
        self._shell = [without_weights(self.model)]
        for policy in (self, *self._reference):
            blocks = blocks_of(policy._causal_lm)
            # the value head has a precision of its own, which one group of FSDP must not mix with another
            for part in (*blocks, *([] if policy.value_head is None else [policy.value_head])):
                fully_shard(part, mesh=mesh)
            fully_shard(policy, mesh=mesh, reshard_after_forward=True)  # at rest every parameter is sharded, whatever ran last

    def micro_batches(self, rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
        """As many on each rank: those that have fewer get some without rows, to be computed for the others' sake. All are laid out
        before the first is computed, so that they can be counted."""
        own = list(super().micro_batches(rows, max_tokens))
        num_idle = max(self._ranks.gather(len(own))) - len(own)
        yield from own
        for _ in range(num_idle):
            yield idle_micro_batch(self.device)

    # ------------------------------------------------------------------------------------------------- reference policy

    @torch.no_grad()
    def keep_reference(self) -> None:
        if self._reference and not self._has_reference:
            for theirs, ours in zip(self._reference[0].model.parameters(), self.model.parameters(), strict=True):
                theirs.copy_(ours)
        self._has_reference = True

    @property
    def reference_weights(self) -> dict[str, Tensor] | None:
        """Whole, on the first rank (a collective call)."""
        if not self._reference:
            return None
        weights: dict[str, Tensor] = whole_state(self._reference[0].model.state_dict(keep_vars=True), self._ranks.is_first)
        return weights

    def load_reference(self, weights: dict[str, Tensor]) -> None:
        load_whole(self._reference[0].model, weights)
        self._has_reference = True

    # ---------------------------------------------------------------------------------------------------- whole weights

    def unsharded(self) -> Policy:
        """The policy as it was built, with whole weights on this rank's device; `take_over` ends it."""
        if not self._whole:
            assert self._build_whole is not None, "made by from_config"
            self._whole = [self._build_whole().to(self.device)]
        return self._whole[0]

    @torch.no_grad()
    def take_over(self) -> None:
        """Get the weights of the first rank's `unsharded` policy (a collective call)."""
        theirs = dict(self._whole[0].named_parameters()) if self._ranks.is_first else {}
        for name, parameter in self.named_parameters():
            assert isinstance(parameter, DTensor)
            source = theirs[name].detach() if theirs else torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.copy_(distribute_tensor(source, parameter.device_mesh, parameter.placements, src_data_rank=0))
        self._whole = []

    def replica(self, dtype: torch.dtype | None, device: torch.device | str) -> RolloutReplica:
        """A whole copy of the model; see `RolloutReplica`."""
        return RolloutReplica(self._shell[0], list(self.model.parameters()), dtype, device)

    def save(self, folder: Path) -> None:
        """As `Policy.save`, by the first rank (a collective call)."""
        if self._ranks.is_first:
            replica = self.replica(None, "cpu")
            replica.refresh()
            self.write(replica.module, folder)
        else:
            for parameter in self.model.parameters():
                whole(parameter.detach())


class RolloutReplica:
    """The whole model for rollouts, in a module tree of its own (`module`), which FSDP knows nothing of: each rank samples as many
    tokens as its workflows ask for, while the others do what they do.

    Its memory is that of the weights in `dtype`, and during `refresh` of the largest one more, in its own precision.

    Args:
        shell: the model without weights.
        sources: its sharded parameters, in the order of the module tree.
        dtype: None: that of the sources.
    """

    def __init__(self, shell: nn.Module, sources: list[nn.Parameter], dtype: torch.dtype | None, device: torch.device | str):
        self._sources = sources
        own = {
            id(theirs): nn.Parameter(torch.empty(theirs.shape, dtype=dtype or theirs.dtype, device=device), requires_grad=False)
            for theirs in shell.parameters()
        }
        self.module: Any = copy.deepcopy(shell, own).to(device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the present weights (a collective call)."""
        for ours, theirs in zip(self.module.parameters(), self._sources, strict=True):
            ours.copy_(whole(theirs.detach()))


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a module tree whose parameters have shape and dtype only (device meta)."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}).eval()


def blocks_of(model: Any) -> list[nn.Module]:
    """The repeated layers of a Hugging Face model, as it names them itself."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        logger.warning("%s names no blocks: in every pass its weights are gathered all at once", type(model).__name__)
    return blocks


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """A micro-batch without rows, whose pass over one made-up token the other ranks wait for."""
    row = Row(Step(prompt_ids=[0], response_ids=[0]), 0, 0, "", None)
    return replace(collate_rows([row], device), rows=[])
