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
Who sends me its sums of a segment has had my part of it, so that memory is free. Who sends me its part of a later
segment of the same turn has completed the earlier one, and so has had my sums; until then I keep the handles, as gloo
sends nothing more to a rank once a message to it has lost its handle. The last message to each rank is waited for all
the same, as a rank may end after the call, and with it all before it: they leave in the order in which they were sent.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from ..ops.reduce import reduce_
from ..types import ReduceOp
from ._mixed_column import Column, shard_numel
from ._turns import WINDOW, Rounds, end_sends, left_s, run_in_turns
from .base import FIRST_OWN_TAG, Request

__all__ = ["ColumnReduction"]


class _Turn:
    """The memory of a segment under way, and what was sent of it: host h's part and sum are at index h of each list."""

    def __init__(self, memory: torch.Tensor, numel: int, host: int, hosts: int) -> None:
        self._memory, self._host, self._hosts = memory, host, hosts
        self.sent: list[Request] = []
        self.lay_out(numel)

    @staticmethod
    def memory_numel(numel: int, hosts: int) -> int:
        """Returns the elements of the memory of a shard of ``numel``."""
        return 2 * numel + hosts * -(-numel // hosts)

    def lay_out(self, numel: int) -> None:
        """Makes it the memory of a shard of ``numel``, no longer than the first."""
        memory, hosts = self._memory, self._hosts
        self.numel = numel
        self.shard, self.total, scratch = memory[:numel], memory[numel : 2 * numel], memory[2 * numel :]
        bounds = [host * numel // hosts for host in range(hosts + 1)]
        self.parts, self.sums = ([flat[a:b] for a, b in pairwise(bounds)] for flat in (self.shard, self.total))
        width = self.parts[self._host].numel()
        self.received = [scratch[host * width : (host + 1) * width] for host in range(hosts)]
        self.received[self._host] = self.parts[self._host]


class ColumnReduction:
    """One all_reduce: ``output (numel,)`` = the reduction of every rank's ``input (numel,)`` by ``op``, not AVG."""

    def __init__(self, column: Column, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float) -> None:
        self._column, self._inner = column, column.inner
        self._op, self._factor = op, factor
        local = self._inner.world_size
        even = input.numel() - input.numel() % local
        # What no equal shards can be made of, in memory of its own.
        tail = torch.zeros(local, dtype=input.dtype, device=input.device)
        tail[: input.numel() - even] = input[even:]
        self._rest, self._tail = output[even:], tail
        numel = shard_numel(even // local, input.itemsize)
        halves = (torch.split(flat[:even], local * numel) for flat in (output, input))
        self._segments = list(zip(*halves)) if even else []
        if even < input.numel() or not even:  # also of no elements there is one to move
            self._segments.append((tail, tail))
        turns = min(WINDOW, len(self._segments))
        memories = column.take(turns, _Turn.memory_numel(numel, column.hosts), input.dtype)
        self._turns = [_Turn(memory, numel, column.host, column.hosts) for memory in memories]
        self._has_begun = False

    def begin(self, timeout_s: float) -> None:
        """Adds up the first segment inside the host. Nobody but these ranks sees it, so the others may yet disagree.

        All ranks of a host call it, or none.
        """
        self._add_up(self._turns[0], self._segments[0][1], timeout_s)
        self._has_begun = True

    def run(self, timeout_s: float) -> None:
        """All of it, or all that ``begin`` has left."""
        deadline = time.monotonic() + timeout_s
        turns = self._turns
        run_in_turns(
            (
                self._reduce(turns[index % len(turns)], output, input, self._has_begun and index == 0, deadline)
                for index, (output, input) in enumerate(self._segments)
            ),
            deadline,
        )
        # See [Note: sends are not waited for].
        end_sends([turn.sent for turn in turns], len(self._segments), len(self._column.others), deadline)
        self._rest.copy_(self._tail[: self._rest.numel()])

    def _reduce(
        self, turn: _Turn, output: torch.Tensor, input: torch.Tensor, is_added_up: bool, deadline: float
    ) -> Rounds:
        """Reduces one segment ``(L * numel,)``; yields what is to come in a round, and goes on once it is there."""
        others, mine, start = self._column.others, self._column.host, self._column.start
        first, second = FIRST_OWN_TAG, FIRST_OWN_TAG + 1  # every rank sends the messages of a round in the same order
        if turn.numel * self._inner.world_size != input.numel():  # the last segments are shorter
            turn.lay_out(input.numel() // self._inner.world_size)
        arriving = [start(turn.received[host], peer, first, is_send=False) for host, peer in others]
        if not is_added_up:
            self._add_up(turn, input, left_s(deadline))
        sent = [start(turn.parts[host], peer, first, is_send=True) for host, peer in others]
        summed = [start(turn.sums[host], peer, second, is_send=False) for host, peer in others]
        yield arriving
        for request in turn.sent:  # of the segment before
            request.settle()
        turn.sent = sent
        if turn.parts[mine].numel():
            op = ReduceOp.SUM if self._op is ReduceOp.PREMUL_SUM else self._op
            reduce_(turn.sums[mine], turn.received, op)
        turn.sent += [start(turn.sums[mine], peer, second, is_send=True) for host, peer in others]
        yield summed
        self._inner.all_gather_single(output, turn.total, left_s(deadline))

    def _add_up(self, turn: _Turn, input: torch.Tensor, timeout_s: float) -> None:
        self._inner.reduce_scatter_single(turn.shard, input, self._op, self._factor, timeout_s)
