"""Frames of all ranks, swapped by way of hosts of equal size.

The ranks of a host gather their frames in shared memory; each rank then swaps its host's with its *column*, its likes
on the other hosts. So it sends one message to each other host, where it would send one to each other rank: for four
ranks on two hosts, whose cores carry the TCP as well, four messages in place of twelve.

[Note: long frames]
A small collective is its frames and no more: one trip between hosts, where the transport's own all_reduce takes three,
each some wake-ups of threads that share the cores. So frames are as long as leaves a host ``_MOST_SENT_BYTES`` to send,
1 ms at 1 Gbit/s, if ``outer`` can swap some that are longer than others. How long one is its rank alone knows: what a
host's ranks gather first is the short beginning of each frame, with its length, and the rest where they agree.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import CollectiveTimeoutError, TransportError
from . import _wording as wording
from ._turns import left_s
from .base import FRAME_COMPARED_BYTES, FRAME_HEADER_BYTES

if TYPE_CHECKING:
    from ..topology import Topology
    from .base import MeanwhileOnHost, Transport

__all__ = ["HostFrames"]

_VERB = "barrier"  # by which shared memory compares: alike on ranks whose calls differ, since the frames say how
_SHORT_BYTES = 1024
_MOST_SENT_BYTES = 64 << 10
_MOST_KEPT = 16
_LENGTH = struct.Struct("q")  # in the transport's own bytes of a frame: its length; of a block's first: of all of it
_LENGTH_AT = FRAME_HEADER_BYTES - _LENGTH.size


class HostFrames:
    """The swaps of one rank, which all ranks of ``outer`` make alike. ``frame_bytes`` is the longest frame's length."""

    def __init__(self, inner: Transport, outer: Transport, topology: Topology, column: Sequence[int]) -> None:
        """``inner`` joins the ranks of this host, ``outer`` all ranks of ``topology``."""
        self._inner = inner
        self._outer = outer
        self._hosts = topology.hosts
        self.frame_bytes = _SHORT_BYTES
        if outer.exchanges_parts and "all_gather_single" in inner.native:
            messages = inner.world_size * (len(column) - 1)  # that leave a host, each with the frames of all its ranks
            room = _MOST_SENT_BYTES // (messages * inner.world_size) // FRAME_HEADER_BYTES * FRAME_HEADER_BYTES
            self.frame_bytes = max(_SHORT_BYTES, room + FRAME_HEADER_BYTES)
        self._swap = outer.exchanger_among(column, inner.world_size * self.frame_bytes)
        self._rows: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def swap(
        self, frame: torch.Tensor, verb: str, nbytes: int, timeout_s: float, meanwhile: MeanwhileOnHost | None
    ) -> Sequence[torch.Tensor]:
        """As ``Transport.exchange_frames``, ``nbytes`` of ``frame``."""
        deadline = time.monotonic() + timeout_s
        try:
            short, block = self._gather(frame, nbytes, deadline)
        except CollectiveTimeoutError as error:
            if wording.why(error)[1] is not None:  # another one's time was over
                raise
            raise wording.timed_out(self._outer.place(verb), timeout_s, wording.whom_awaited(error)) from error
        begin = None if meanwhile is None else partial(meanwhile, short.unbind())
        return self._rows_of(self._swap(block.view(-1), verb, left_s(deadline), begin))

    def _gather(self, frame: torch.Tensor, nbytes: int, deadline: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the frames of this host's ranks, ``(ranks, length)``: their beginnings, and as much as is needed."""
        _LENGTH.pack_into(frame.numpy().data, _LENGTH_AT, nbytes)
        short = self._inner.exchange(frame[:_SHORT_BYTES], _VERB, left_s(deadline))
        raw = [row.data for row in short.numpy()]
        longest = max(_LENGTH.unpack_from(row, _LENGTH_AT)[0] for row in raw)
        block = short
        if longest > _SHORT_BYTES and all(row[:FRAME_COMPARED_BYTES] == raw[0][:FRAME_COMPARED_BYTES] for row in raw):
            rest = torch.empty((len(raw), longest - _SHORT_BYTES), dtype=torch.uint8, device="cpu")
            self._inner.all_gather_single(rest.view(-1), frame[_SHORT_BYTES:longest], left_s(deadline))
            block = torch.cat((short, rest), dim=1)
        _LENGTH.pack_into(block[0].numpy().data, _LENGTH_AT, block.shape[1])
        return short, block

    def _rows_of(self, swapped: torch.Tensor) -> list[torch.Tensor]:
        """Returns all ranks' frames, which lie in the hosts' blocks; what swaps keeps its memory, and so are they."""
        lengths = [_LENGTH.unpack_from(block.data, _LENGTH_AT)[0] for block in swapped.numpy()]
        key = (id(swapped), *lengths)
        if key in self._rows:
            return self._rows[key][1]
        if not all(_SHORT_BYTES <= length <= self.frame_bytes for length in lengths):
            raise TransportError(
                f"{self._outer.place('a call')}: frames are {lengths} bytes long by host, expected {_SHORT_BYTES} "
                f"to {self.frame_bytes}; see whether all hosts run the same version of pycomm"
            )
        rows: list[torch.Tensor] = [swapped] * self._outer.world_size
        for ranks, block, length in zip(self._hosts, swapped, lengths):
            for rank, row in zip(ranks, block[: len(ranks) * length].view(len(ranks), length)):
                rows[rank] = row
        if len(self._rows) == _MOST_KEPT:
            self._rows.clear()
        self._rows[key] = swapped, rows
        return rows
