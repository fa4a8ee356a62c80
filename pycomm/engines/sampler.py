"""Which samples a rank trains on: ``torch.utils.data.DistributedSampler``'s rule, and a place to go on from.

Every epoch has an order of its own, the same on every rank; rank r of n takes entries r, r + n, r + 2 n, ... of it. The
state is the epoch and the number of samples that all ranks together have used, so a job goes on where it was, also
with another number of ranks: none twice, none left out, but for the padding that makes the shares equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

import pycomm

from ..errors import CheckpointError, ConfigError

__all__ = ["DistributedSampler"]


class DistributedSampler(Sampler[int]):
    """Yields this rank's share of the indices of ``dataset``; takes what torch's class of that name takes.

    ``num_replicas`` and ``rank`` are those of ``group`` unless given. All ranks yield equally many indices: with
    ``drop_last`` what is left over is dropped, else the first samples are repeated. ``shuffle``: each ``set_epoch``
    is another order, drawn from ``seed``. ``state_dict`` counts what was yielded: take it where a step is complete on
    every rank.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        group: Any = None,
    ) -> None:
        self.dataset = dataset
        self.num_replicas = pycomm.world_size(group) if num_replicas is None else num_replicas
        self.rank = pycomm.rank(group) if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"DistributedSampler: expected a rank in 0..{self.num_replicas - 1}, got {self.rank}")
        if len(dataset) < (self.num_replicas if drop_last else 1):
            raise ConfigError(
                f"DistributedSampler: {len(dataset)} samples are too few for {self.num_replicas} ranks with "
                f"drop_last={drop_last}"
            )
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        self._start = self._used = 0  # by all ranks, in this epoch: when this iteration began, or begins; and by now
        self._goes_on = False  # the next iteration is in the middle of the epoch, by a state that was loaded

    def set_epoch(self, epoch: int) -> None:
        """Begins ``epoch``; without effect if it is the one that a loaded state is in the middle of."""
        if epoch != self.epoch:
            self.epoch, self._start, self._used, self._goes_on = epoch, 0, 0, False

    def __len__(self) -> int:
        """Returns how many indices this rank has in this epoch, or in what is left of it by a state that was loaded."""
        left = len(self.dataset) - self._start
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        if not self._goes_on:  # also behind an iteration that was left in the middle
            self._start = 0
        self._used, self._goes_on = self._start, False
        order = self._order()
        rest = order[self._start :]
        for turn in range(len(self)):
            place = turn * self.num_replicas + self.rank
            self._used = min(self._used + self.num_replicas, len(order))
            yield rest[place] if place < len(rest) else order[(place - len(rest)) % len(order)]
        self._start = self._used = 0  # the next iteration, with another epoch or not, begins anew

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        return list(torch.randperm(len(self.dataset), generator=draw, device="cpu").tolist())

    def state_dict(self) -> dict[str, int]:
        """Returns where this epoch stands; the same on every rank that has yielded equally many."""
        return {"epoch": self.epoch, "used": self._used, "seed": self.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from ``state``, in a world of any size. Raises CheckpointError if it is of other data."""
        if state.get("samples") != len(self.dataset) or state.get("seed") != self.seed:
            raise CheckpointError(
                f"DistributedSampler: the state is of {state.get('samples')} samples with seed {state.get('seed')}, "
                f"expected {len(self.dataset)} and {self.seed}; load it for the same data"
            )
        self.epoch, self._start, self._goes_on = state["epoch"], state["used"], True
        self._used = self._start
