"""The processes of a run (ranks), and what they do together.

    tasks of a batch  --share-->  those of one rank  --rollouts-->  episodes  --gather, merge-->  the episodes of all, on every rank
    rows of a minibatch  --share_rows-->  those of one rank, about equally many tokens each

Every rank holds the whole batch: grouping, filtering, the estimator and all metrics see what one process would see, so that the
number of processes changes no result. Only sampling and scoring are shared out.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.layout import make_chains

T = TypeVar("T")

# Ranks wait for the slowest rollout; what has died is noticed by `watch.py`, not by a clock.
TIMEOUT = timedelta(days=7)


class Ranks:
    """This process among all of the run. `Ranks()` is a run of one process; `Ranks.of_process_group()` all that have joined."""

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None):
        self.rank, self.world_size = rank, world_size
        self._group = group

    @classmethod
    def of_process_group(cls) -> Ranks:
        """To be called by all ranks at once: objects travel over a gloo group of their own beside NCCL's."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T, what: str = "a value") -> list[T]:
        """The values of all ranks, in rank order, on every rank.

        Raises:
            ValueError: `value` (named `what`) cannot be pickled.
        """
        if self.world_size == 1:
            return [value]
        try:
            data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"{what} cannot be sent to the other processes: {error}; keep plain containers and numbers in it") from error
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, data, group=self._group)
        return [pickle.loads(part) for part in gathered]

    def broadcast(self, value: T) -> T:
        """The first rank's value."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def send_weights(self, module: nn.Module | None) -> None:
        """Give all ranks the first one's parameters and buffers. Sharded ones stay: each rank has a part of its own."""
        if self.world_size > 1 and module is not None:
            for tensor in module.state_dict().values():
                if not isinstance(tensor, DTensor):
                    dist.broadcast(tensor, src=0)

    def share(self, items: Sequence[T]) -> list[T]:
        """Those of this rank: every `world_size`-th."""
        return [items[index] for index in range(self.rank, len(items), self.world_size)]

    def share_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that this rank computes: whole groups, dealt out so that all ranks have about equally many tokens."""
        if self.world_size == 1:
            return list(rows)
        groups: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            groups[row.group].append(row)
        sizes = {group: _num_tokens(members) for group, members in groups.items()}
        loads, mine = [0] * self.world_size, set()
        for group in sorted(sizes, key=lambda group: -sizes[group]):
            rank = loads.index(min(loads))
            loads[rank] += sizes[group]
            if rank == self.rank:
                mine.add(group)
        return [row for row in rows if row.group in mine]


def merge(shares: Sequence[Sequence[T]], num_items: int) -> list[T]:
    """Undo `share`: what each rank made of its items, equally much of each item, back in the order of the items.

    Raises:
        ValueError: a rank made different numbers of things of its items.
    """
    world_size = len(shares)
    counts = {rank: len(range(rank, num_items, world_size)) for rank in range(world_size)}
    sizes = {len(share) / counts[rank] for rank, share in enumerate(shares) if counts[rank]}
    if len(sizes) > 1 or any(size != int(size) for size in sizes):
        raise ValueError(
            f"generate_episodes: {[len(share) for share in shares]} episodes of {num_items} tasks; each task needs equally many"
        )
    size = int(sizes.pop()) if sizes else 0
    return [
        thing
        for item in range(num_items)
        for thing in shares[item % world_size][(item // world_size) * size : (item // world_size + 1) * size]
    ]


def _num_tokens(rows: Sequence[Row]) -> int:
    """Of one group, a prompt that its rows share counted once."""
    chains = make_chains(rows)
    prompts = {tuple(chain.rows[0].prompt_ids) for chain in chains}
    return sum(len(chain) - len(chain.rows[0].prompt_ids) for chain in chains) + sum(map(len, prompts))
