"""all_reduce over hosts of equal size, composed of what the transports below do best.

Of each segment of the buffer the ranks of a host reduce-scatter among themselves, in shared memory, so that each holds
the host's sum of its own *shard*; every rank all-reduces its shard with its *column*, its likes on the other hosts; and
the host gathers the shards. It is the algorithm `hierarchical` with calls of shared memory in place of messages.

A column all-reduces directly: part h of the shard goes to host h, which adds the parts in the order of the hosts and
gives the sum to the others. So each element is added up on one rank, and the results are bit-identical.

Bytes sent per rank to other hosts: 2(m-1)/m / L * S, for m hosts of L ranks and S bytes: the fewest there can be.

Segments take turns (``_turns.py``), each with two rounds of messages. All ranks of a host do so in the same order, as
the calls of shared memory must be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from ..ops.reduce import reduce_
from ..types import ReduceOp
from ._turns import WINDOW, Rounds, left_s, run_in_turns
from .base import Request, Transport

__all__ = ["ColumnReduce"]

_SHARD_BYTES = 512 << 10


class _Start(Protocol):
    def __call__(self, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Request: ...


class ColumnReduce:
    """The all_reduces of one rank. Keeps its memory between calls."""

    def __init__(self, inner: Transport, column: Sequence[int], host: int, start: _Start, first_tag: int) -> None:
        """``column`` are the ranks, one a host, that hold this one's shard, itself at index ``host``.

        ``start`` begins a message to or from one of them; tags are ``first_tag`` to ``first_tag + WINDOW - 1``.
        """
        self._inner = inner
        self._column = column
        self._host = host
        self._start = start
        self._first_tag = first_tag
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float) -> None:
        """``output (numel,)`` = the reduction of every rank's ``input (numel,)`` by ``op``, which may not be AVG."""
        deadline = time.monotonic() + timeout_s
        local = self._inner.world_size
        even = input.numel() - input.numel() % local
        tail = torch.zeros(local, dtype=input.dtype)  # what no equal shards can be made of, in memory of its own
        tail[: input.numel() - even] = input[even:]
        step = local * self._shard_numel(input)
        segments = list(zip(torch.split(output[:even], step), torch.split(input[:even], step))) if even else []
        if even < input.numel():
            segments.append((tail, tail))
        slots = self._slots(input)
        exchanges = (
            self._reduce(target, source, op, factor, slots[index % WINDOW], index % WINDOW, deadline)
            for index, (target, source) in enumerate(segments)
        )
        run_in_turns(exchanges, deadline)
        output[even:] = tail[: input.numel() - even]

    def _reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        factor: float,
        slot: torch.Tensor,
        turn: int,
        deadline: float,
    ) -> Rounds:
        """Reduces one segment ``(L * numel,)``; yields the messages of a round, and goes on once they are complete."""
        hosts, mine, tag = len(self._column), self._host, self._first_tag + turn
        numel = input.numel() // self._inner.world_size
        shard, scratch = slot[:numel], slot[numel:]
        self._inner.reduce_scatter_single(shard, input, op, factor, left_s(deadline))
        parts = [shard[host * numel // hosts : (host + 1) * numel // hosts] for host in range(hosts)]
        width = parts[mine].numel()
        received = [scratch[host * width : (host + 1) * width] for host in range(hosts)]
        received[mine] = parts[mine]
        others = [(host, peer) for host, peer in enumerate(self._column) if host != mine]
        yield [
            *(self._start(received[host], peer, tag, is_send=False) for host, peer in others),
            *(self._start(parts[host], peer, tag, is_send=True) for host, peer in others),
        ]
        if width:
            reduce_(parts[mine], received, ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op)
        yield [
            *(self._start(parts[host], peer, tag, is_send=False) for host, peer in others),
            *(self._start(parts[mine], peer, tag, is_send=True) for host, peer in others),
        ]
        self._inner.all_gather_single(output, shard, left_s(deadline))

    def _shard_numel(self, input: torch.Tensor) -> int:
        """Returns the elements of a shard. Smaller ones did not help small buffers: 1 MiB took 13 ms in 1, 19 in 4."""
        share = -(-input.numel() // self._inner.world_size)
        return max(1, min(share, _SHARD_BYTES // input.itemsize))

    def _slots(self, input: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns memory for the shard of each turn, and for what all hosts send of a part of it."""
        hosts = len(self._column)
        numel = self._shard_numel(input)
        nbytes = WINDOW * (numel + hosts * -(-numel // hosts)) * input.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(input.dtype).chunk(WINDOW)
