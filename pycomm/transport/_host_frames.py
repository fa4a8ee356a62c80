"""Frames of all ranks, swapped by way of hosts of equal size.

The ranks of a host gather their frames in shared memory; each rank then swaps its host's with its *column*, its likes
on the other hosts. So it sends one message to each other host, where it would send one to each other rank: for four
ranks on two hosts, whose cores carry the TCP as well, four messages in place of twelve.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import CollectiveTimeoutError
from . import _wording as wording
from ._turns import left_s

if TYPE_CHECKING:
    import torch

    from ..topology import Topology
    from .base import MeanwhileOnHost, Transport

__all__ = ["HostFrames"]

_VERB = "barrier"  # by which shared memory compares: alike on ranks whose calls differ, since the frames say how


class HostFrames:
    """The swaps of one rank, which all ranks of ``outer`` make alike."""

    def __init__(
        self, inner: Transport, outer: Transport, topology: Topology, column: Sequence[int], nbytes: int
    ) -> None:
        """``inner`` joins the ranks of this host, ``outer`` all ranks of ``topology``; frames have ``nbytes``."""
        self._inner = inner
        self._outer = outer
        self._hosts = topology.hosts
        self._swap = outer.exchanger_among(column, inner.world_size * nbytes)
        self._swapped: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []

    def swap(
        self, frame: torch.Tensor, verb: str, timeout_s: float, meanwhile: MeanwhileOnHost | None
    ) -> Sequence[torch.Tensor]:
        """As ``Transport.exchange_frames``; all of the frame is sent."""
        deadline = time.monotonic() + timeout_s
        try:
            own = self._inner.exchange(frame, _VERB, timeout_s)
        except CollectiveTimeoutError as error:
            raise wording.timed_out(self._outer.place(verb), timeout_s, "a rank of this host") from error
        begin = None if meanwhile is None else partial(meanwhile, own.unbind())
        swapped = self._swap(own.view(-1), verb, left_s(deadline), begin)
        if swapped is not self._swapped:  # kept by what swaps, where that can be; and then so are the rows
            rows: list[torch.Tensor] = [swapped] * self._outer.world_size
            for ranks, block in zip(self._hosts, swapped):
                for rank, row in zip(ranks, block.view(len(ranks), -1)):
                    rows[rank] = row
            self._swapped, self._rows = swapped, rows
        return self._rows
