"""Ranks with different numbers of steps: one that has ended goes through the others' collectives with zeros.

Before each forward pass, and before gradients are reduced, the ranks tell each other what they do (one byte each):
nothing any more, a forward pass, one inside ``no_sync``, for which nothing moves, or a reduction. So a rank that has
ended knows which calls the others are about to make, however many forward passes a step has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import pycomm

if TYPE_CHECKING:
    from .ddp import DistributedDataParallel

__all__ = ["Join"]

_ENDED, _NO_SYNC, _FORWARD, _REDUCTION = range(4)


class Join:
    """One ``join()`` context of one rank."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._source = 0  # the first rank that still has data

    def announce_forward(self, is_syncing: bool) -> int:
        """Says that this rank is about to make a forward pass. Returns the first rank that still has data."""
        self._tell(_FORWARD if is_syncing else _NO_SYNC)
        return self._source

    def announce_reduction(self) -> None:
        """Says that this rank is about to reduce its gradients."""
        self._tell(_REDUCTION)

    def follow_the_others(self) -> None:
        """Takes part in the others' steps until all have ended; then all take the parameters of the last."""
        ddp = self._ddp
        while (others := self._tell(_ENDED)) != _ENDED:
            if others == _FORWARD:
                ddp.prepare_step(self._source, is_joined=True)
            elif others == _REDUCTION:
                for parameter in ddp.module.parameters():
                    parameter.grad = None
                ddp.reducer.reduce_now(is_joined=True)
        ddp.sync_parameters(self._source)

    def _tell(self, mine: int) -> int:
        """Exchanges what the ranks are about to do; returns what those do that still have data."""
        device = self._ddp.group.control_device
        told = torch.empty(self._ddp.group.world_size, dtype=torch.uint8, device=device)
        pycomm.all_gather_single(told, torch.tensor([mine], dtype=torch.uint8, device=device), self._ddp.group)
        active = told.nonzero().flatten().tolist()
        if not active:
            return _ENDED  # the source stays the rank that ended last
        self._source = active[0]
        self._ddp.reducer.scale = len(told) / len(active)
        return int(told[active].max()) if mine == _ENDED else mine
