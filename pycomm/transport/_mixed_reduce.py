"""all_reduce over hosts of equal size, composed of what the transports below do best.

Of each segment of the buffer the ranks of a host reduce-scatter among themselves, in shared memory, so that each holds
the host's sum of its own *shard*; every rank all-reduces its shard with its *column*, its likes on the other hosts; and
the host gathers the shards. It is the algorithm `hierarchical` with calls of shared memory in place of messages.

A column all-reduces directly: part h of the shard goes to host h, which adds the parts in the order of the hosts and
gives the sum to the others. So each element is added up on one rank, and the results are bit-identical.

Bytes sent per rank to other hosts: 2(m-1)/m / L * S, for m hosts of L ranks and S bytes: the fewest there can be.

Segments take turns (``_turns.py``), each with two rounds of messages. All ranks of a host do so in the same order, as
the calls of shared memory must be. Receives are posted a round ahead: gloo's sender waits for word of the receiver's
room, which would queue behind the megabytes on their way.

[Note: sends are not waited for]
Who sends me its sums of a segment has had my part of it; who sends me its part of a later segment in the same memory
has completed the earlier one, and so has had my sums. So once a segment's memory is needed again all that was sent from
it has arrived. What was sent last is waited for all the same: a rank may end after the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from ..ops.reduce import reduce_
from ..types import ReduceOp
from ._turns import WINDOW, Rounds, left_s, run_in_turns
from .base import FIRST_OWN_TAG, Request, Transport

__all__ = ["ColumnReduce"]

_SHARD_BYTES = 512 << 10, 1 << 20  # of a segment: at least and at most
_SEGMENTS = 16  # where the bounds allow it


class _Start(Protocol):
    def __call__(self, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Request: ...


class ColumnReduce:
    """The all_reduces of one rank. Keeps its memory between calls."""

    def __init__(self, inner: Transport, column: Sequence[int], host: int, start: _Start) -> None:
        """``column`` are the ranks, one a host, that hold this one's shard, itself at index ``host``.

        ``start`` begins a message to or from one of them; tags are those of messages of agreed size.
        """
        self._inner = inner
        self._column = column
        self._host = host
        self._start = start
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float) -> None:
        """``output (numel,)`` = the reduction of every rank's ``input (numel,)`` by ``op``, which may not be AVG."""
        deadline = time.monotonic() + timeout_s
        local = self._inner.world_size
        even = input.numel() - input.numel() % local
        tail = torch.zeros(local, dtype=input.dtype)  # what no equal shards can be made of, in memory of its own
        tail[: input.numel() - even] = input[even:]
        numel = _shard_numel(even // local, input.itemsize)
        halves = (torch.split(flat[:even], local * numel) for flat in (output, input))
        segments = list(zip(*halves)) if even else []
        if even < input.numel():
            segments.append((tail, tail))
        slots = self._slots(input.dtype, numel, min(WINDOW, len(segments)))
        turns: list[tuple[torch.Tensor, list[Request]]] = [(slot, []) for slot in slots]
        exchanges = (
            self._reduce(target, source, op, factor, *turns[index % len(turns)], deadline)
            for index, (target, source) in enumerate(segments)
        )
        run_in_turns(exchanges, deadline)
        for _, sent in turns:
            for request in sent:
                request.wait(left_s(deadline))
        output[even:] = tail[: input.numel() - even]

    def _reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        factor: float,
        slot: torch.Tensor,
        sent: list[Request],
        deadline: float,
    ) -> Rounds:
        """Reduces one segment ``(L * numel,)``; yields what is to come in a round, and goes on once it is there.

        ``slot`` is this turn's memory, ``sent`` what was sent from it last, and then what is sent of this segment.
        """
        hosts, mine = len(self._column), self._host
        numel = input.numel() // self._inner.world_size
        shard, total, scratch = slot[:numel], slot[numel : 2 * numel], slot[2 * numel :]
        bounds = [host * numel // hosts for host in range(hosts + 1)]
        parts, sums = ([flat[a:b] for a, b in pairwise(bounds)] for flat in (shard, total))
        width = parts[mine].numel()
        received = [scratch[host * width : (host + 1) * width] for host in range(hosts)]
        received[mine] = parts[mine]
        others = [(host, peer) for host, peer in enumerate(self._column) if host != mine]
        first, second = FIRST_OWN_TAG, FIRST_OWN_TAG + 1  # every rank sends the messages of a round in the same order
        arriving = [self._start(received[host], peer, first, is_send=False) for host, peer in others]
        for request in sent:
            request.settle()  # see [Note: sends are not waited for]
        self._inner.reduce_scatter_single(shard, input, op, factor, left_s(deadline))
        sent[:] = [self._start(parts[host], peer, first, is_send=True) for host, peer in others]
        summed = [self._start(sums[host], peer, second, is_send=False) for host, peer in others]
        yield arriving
        if width:
            reduce_(sums[mine], received, ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op)
        sent += [self._start(sums[mine], peer, second, is_send=True) for host, peer in others]
        yield summed
        self._inner.all_gather_single(output, total, left_s(deadline))

    def _slots(self, dtype: torch.dtype, numel: int, number: int) -> Sequence[torch.Tensor]:
        """Returns memory for ``number`` turns: the shard, its sum over the hosts, and what the hosts send of a part."""
        hosts = len(self._column)
        nbytes = number * (2 * numel + hosts * -(-numel // hosts)) * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).chunk(number)


def _shard_numel(numel: int, itemsize: int) -> int:
    """Returns the elements of a segment's shard, where a rank's shards are ``numel`` in all.

    Long ones spare cores that carry the TCP as well, short ones are sooner on their way. Between two hosts at 1 Gbit/s,
    16 MiB took 1.10 of bytes / rate in 16 segments, 1.12 in 8; 64 MiB took 139 ms of each rank's core in 64, 108 in 32.
    """
    least, most = (nbytes // itemsize for nbytes in _SHARD_BYTES)
    return max(1, min(numel, most, max(least, numel // _SEGMENTS)))
