"""Swaps of frames over gloo: those that calls begin with, and small ones that are one trip where the wire is full.

[Note: one trip]
gloo sends a message's data when it knows that the receiver has room for it: two trips, if the receive is not posted
before the send. Behind a megabyte on its way to the same host a trip takes as long as that. So the receives of the next
swap are posted at the end of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from ctypes import memmove
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CollectiveTimeoutError
from . import _wording as wording
from ._torch_messages import EXCHANGE_TAG, Posted, timeout_of, wait_for

if TYPE_CHECKING:
    from .base import Meanwhile
    from .torch import TorchTransport

__all__ = ["FrameSwap", "PostedExchange"]

c10d: Any = torch._C._distributed_c10d  # which torch.distributed does not export whole


class FrameSwap:
    """``exchange_frames`` of one frame's memory, as an all-to-all of gloo's; what a call needs is made once.

    It does what ``TorchTransport.run`` does with less Python: gloo's threads have put this thread's code out of the
    core's caches each time, so that a line of it takes several times what it takes in a loop.
    """

    def __init__(self, transport: TorchTransport, frame: torch.Tensor) -> None:
        self.frame = frame
        self._transport = transport
        self._address = frame.data_ptr()
        peers, most, rank = transport.world_size - 1, transport.frame_bytes, transport.rank
        self._sent = torch.empty(peers * most, dtype=torch.uint8)
        self._copies = [self._sent.data_ptr()] * peers
        self._received = torch.empty(peers * most, dtype=torch.uint8)
        self._frames = list(self._received.view(peers, most).unbind())
        self._frames.insert(rank, frame)
        # A receive of gloo's takes what is shorter. What a rank keeps is not sent: the split of its own is 0.
        self._room = [0 if member == rank else most for member in range(peers + 1)]
        self._start = transport.group.alltoall_base
        self._options = c10d.AllToAllOptions()
        self._limit_s = -1.0  # in the options
        self._nbytes = -1  # of the last call, that there is what follows
        self._parts = self._sent
        self._lengths: list[int] = []

    def __call__(self, nbytes: int, verb: str, timeout_s: float | None) -> list[torch.Tensor]:
        """Returns all ranks' frames; of this one ``nbytes`` are sent."""
        transport = self._transport
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._lengths = [0 if room == 0 else nbytes for room in self._room]
            self._parts = self._sent[: (transport.world_size - 1) * nbytes]
            self._copies = [self._sent.data_ptr() + peer * nbytes for peer in range(transport.world_size - 1)]
        for copy in self._copies:
            memmove(copy, self._address, nbytes)
        limit_s = transport.timeout_s if timeout_s is None else timeout_s
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._options.timeout = timeout_of(limit_s)
        try:
            work = self._start(self._received, self._parts, self._room, self._lengths, self._options)
        except (RuntimeError, ValueError) as error:
            raise transport.error_of(error, verb, limit_s) from error
        transport.await_work(work, verb, limit_s)
        return self._frames


class PostedExchange:
    """Swaps frames of one size among ``ranks``, each of which makes one with the same, and then makes the same calls.

    Two that a rank has at once differ in ``kind``.
    """

    def __init__(self, transport: TorchTransport, ranks: Sequence[int], nbytes: int, kind: int = 0) -> None:
        self._transport = transport
        self._tag = EXCHANGE_TAG + kind
        self._place = ranks.index(transport.rank)
        self._peers = [(place, rank) for place, rank in enumerate(ranks) if rank != transport.rank]
        self._frames = torch.empty((len(ranks), nbytes), dtype=torch.uint8)
        self._received = torch.empty_like(self._frames)
        # Of two rounds, this one and the last, gloo may still read the memory and needs the handles.
        self._own = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
        self._sends: list[Any] = [None, None]
        self._turn = 0
        self._receives = self._post()

    def __call__(
        self, frame: torch.Tensor, verb: str, timeout_s: float | None, meanwhile: Meanwhile | None = None
    ) -> torch.Tensor:
        """As ``Transport.exchange``; ``meanwhile`` is called while the frames travel."""
        group, own = self._transport.open_group(), self._own[self._turn]
        memmove(own.data_ptr(), frame.data_ptr(), frame.numel())  # torch lets go of Python's lock in each of its calls
        try:
            self._sends[self._turn] = [group.send([own], peer, self._tag) for _, peer in self._peers]
        except RuntimeError as error:
            raise self._transport.error_of(error, verb, self._transport.timeout_s) from error
        self._turn = 1 - self._turn

        def finish(_: Posted, left_s: float) -> None:
            deadline = time.monotonic() + left_s
            for work in self._receives:
                wait_for(work, self._received, deadline - time.monotonic())

        if meanwhile is not None:
            meanwhile()
        limit_s = self._transport.timeout_s if timeout_s is None else timeout_s
        try:
            Posted(verb, None, self._transport, finish).wait(limit_s)
        except CollectiveTimeoutError as error:  # unlike a message's, it breaks the group
            self._transport.watch.announce("timeout", self._transport.rank)
            raise wording.timed_out(self._transport.place(verb), limit_s) from error
        memmove(self._frames.data_ptr(), self._received.data_ptr(), self._frames.numel())
        memmove(self._frames.data_ptr() + self._place * frame.numel(), frame.data_ptr(), frame.numel())
        self._receives = self._post()
        return self._frames

    def close(self) -> None:
        """Lets go of what torch gave for the last rounds; there are no more."""
        self._sends, self._receives = [], []

    def _post(self) -> list[Any]:
        group = self._transport.open_group()
        return [group.recv([self._received[place]], peer, self._tag) for place, peer in self._peers]
