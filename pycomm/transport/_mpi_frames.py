"""The swap of frames over MPI: one prepared collective, as long as the ranks expect the call to be.

[Note: lengths of frames]
An Allgather takes one length from all ranks, and ranks that disagree about what they call do not have one. So they
expect one: the length that followed the last time after a call of such a length as the last one. That is a function of
the calls before, on which all of them agreed, so they expect the same. Each frame says how long it is (``LENGTH_AT``),
and where one is longer than what was swapped every rank sees it, and all swap again, at the length of the longest. So
calls that are made again and again, or in turns, take one trip each; one that was not expected takes two, or one that
is longer than it need be.

Two ranks on two cores: 1 KiB takes 1.7 us prepared, 8 by an Iallgather, and MPI's own Iallreduce 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import _mpi_memory as memory
from .base import FRAME_HEADER_BYTES

if TYPE_CHECKING:
    from .mpi import MpiTransport

__all__ = ["Expected", "FrameSwap", "FrameSwaps", "frame_bytes_for"]

LENGTH_AT = 56  # in the frame: of all that the agreement writes there, the last eight bytes are the transport's
SHORTEST_BYTES = 1024  # of payload
_LONGEST_BYTES = 512 << 10  # of payload, to all other ranks together; beyond, MPI's own reductions move less


def frame_bytes_for(world_size: int) -> int:
    """Returns the longest frame of a group of ``world_size`` ranks."""
    return FRAME_HEADER_BYTES + max(SHORTEST_BYTES, 1 << (_LONGEST_BYTES // max(1, world_size - 1)).bit_length() - 1)


class Expected:
    """What length comes next, as an index into those that there are; see [Note: lengths of frames]."""

    def __init__(self) -> None:
        self._last = 0
        self._after: dict[int, int] = {}

    def next(self) -> int:
        """Returns what came after the last one, the time before; at first the shortest."""
        return self._after.get(self._last, 0)

    def was(self, length: int) -> None:
        """Tells what came."""
        self._after[self._last] = length
        self._last = length


class FrameSwaps:
    """The swaps of one frame's memory, of each length that it has been swapped at."""

    def __init__(self, transport: MpiTransport, frame: torch.Tensor) -> None:
        self.frame = frame
        self._transport = transport
        self._length = frame[LENGTH_AT:FRAME_HEADER_BYTES].view(torch.int64).numpy().data
        self._expected = Expected()
        self._swaps: dict[int, FrameSwap] = {}

    def run(
        self, nbytes: int, verb: str, timeout_s: float | None, swap: Callable[[FrameSwap, str, float | None], None]
    ) -> Sequence[torch.Tensor]:
        """Returns all ranks' frames; of this one ``nbytes`` count. ``swap`` carries out a swap."""
        self._length[0] = nbytes
        expected = self._expected.next()
        swapped = self._swaps.get(expected) or self._prepare(expected)
        swap(swapped, verb, timeout_s)
        longest = max(swapped.lengths)
        needed = (max(longest - FRAME_HEADER_BYTES - 1, 0) // SHORTEST_BYTES).bit_length()
        self._expected.was(needed)
        if needed > expected:
            swapped = self._swaps.get(needed) or self._prepare(needed)
            swap(swapped, verb, timeout_s)
        return swapped.frames

    def free(self) -> None:
        """Gives back what MPI prepared."""
        for swap in self._swaps.values():
            swap.free()

    def _prepare(self, index: int) -> FrameSwap:
        """Makes the swap that carries ``SHORTEST_BYTES << index`` of payload; on all ranks at once."""
        length = FRAME_HEADER_BYTES + (SHORTEST_BYTES << index)
        swap = self._swaps[index] = FrameSwap(self._transport, self.frame[:length])
        return swap


class FrameSwap:
    """The swap of one piece of memory again and again: what MPI can prepare of it is prepared, from MPI 4 on."""

    def __init__(self, transport: MpiTransport, frame: torch.Tensor) -> None:
        communicator = transport.open_communicator()
        frames = torch.empty((transport.world_size, frame.numel()), dtype=torch.uint8, device="cpu")
        self.frames = frames.unbind()
        self.lengths = frames.view(torch.int64)[:, LENGTH_AT // 8].numpy().data  # what each rank's frame says
        buffers = memory.as_bytes(frame), memory.as_bytes(frames, transport.world_size)
        self._request = communicator.Allgather_init(*buffers) if transport.mpi.Get_version() >= (4, 0) else None
        self._begin = partial(communicator.Iallgather, *buffers) if self._request is None else self._request.Start

    def start(self) -> Any:
        """Starts one swap; returns MPI's request."""
        return self._begin() or self._request

    def free(self) -> None:
        """Gives back what MPI prepared."""
        if self._request is not None:
            self._request.Free()
