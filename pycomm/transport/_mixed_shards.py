"""all_gather and reduce_scatter over hosts of equal size, composed of what the transports below do best.

The buffer of the whole has a *block* for each host, and a block has a *shard* for each of its ranks. A rank swaps
shards with its *column*, its likes on the other hosts; the ranks of a host do the rest in shared memory:

- all_gather: a rank sends its shard to its column, and receives theirs where they belong in the output. Of each host's
  block a rank now has the shard that its column brought; the ranks of the host gather the blocks of these.
- reduce_scatter is the way back: of each host's block the ranks of a host reduce-scatter what they have, and a rank
  sends its part to the one of its column whose shard it is, which adds up the parts of the hosts, in their order.

Bytes sent per rank to other hosts: (m-1) * S / (m * L), for m hosts of L ranks and a whole of S bytes: the fewest there
can be. Both copy nothing but into shared memory and out of it, once.

A shard goes in segments, which take turns (``_turns.py``), so that the cable is busy while the ranks of a host work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ..ops.reduce import reduce_
from ..types import ReduceOp
from ._mixed_column import Column, shard_numel
from ._turns import WINDOW, Rounds, end_sends, left_s, run_in_turns
from .base import FIRST_OWN_TAG, Request

__all__ = ["all_gather", "reduce_scatter"]


def all_gather(column: Column, output: torch.Tensor, input: torch.Tensor, timeout_s: float) -> None:
    """``output (m * L * numel,)`` = the ranks' ``input (numel,)``; the ranks of host h are h * L to h * L + L - 1."""
    deadline = time.monotonic() + timeout_s
    inner, start, mine = column.inner, column.start, column.inner.rank
    blocks = output.view(column.hosts, inner.world_size, input.numel())
    sent: list[Request] = []

    def gather(part: slice) -> Rounds:
        shard = input[part]
        arriving = [start(blocks[host, mine, part], peer, FIRST_OWN_TAG, is_send=False) for host, peer in column.others]
        sent.extend(start(shard, peer, FIRST_OWN_TAG, is_send=True) for _, peer in column.others)
        inner.all_gather_single(blocks[column.host, :, part], shard, left_s(deadline))
        yield arriving
        for host, _ in column.others:
            inner.all_gather_single(blocks[host, :, part], blocks[host, mine, part], left_s(deadline))

    run_in_turns(map(gather, _segments(input)), deadline)
    end_sends([sent], 0, len(column.others), deadline)


def reduce_scatter(
    column: Column, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float
) -> None:
    """``output (numel,)`` = this rank's shard of the reduction of every rank's ``input (m * L * numel,)``, not AVG.

    ``output`` may be this rank's shard of the input, if ``inner`` scatters in place.
    """
    deadline = time.monotonic() + timeout_s
    inner, start = column.inner, column.start
    blocks = input.view(column.hosts, inner.world_size, output.numel())
    add = ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op
    segments = list(_segments(output))
    if not segments:
        return
    memories = column.take(min(WINDOW, len(segments)), 2 * len(column.others) * segments[0].stop, output.dtype)
    sent: list[list[Request]] = [[] for _ in memories]  # by turn

    def reduce(part: slice, turn: int) -> Rounds:
        total = output[part]
        pieces = memories[turn].view(-1, segments[0].stop)[:, : total.numel()]
        sums, received = pieces.chunk(2)
        arriving = [
            start(received[slot], peer, FIRST_OWN_TAG, is_send=False) for slot, (_, peer) in enumerate(column.others)
        ]
        for request in sent[turn]:  # of the segment before, whose memory this one takes
            request.wait(left_s(deadline))
        sent[turn].clear()
        for slot, (host, peer) in enumerate(column.others):
            inner.reduce_scatter_single(sums[slot], blocks[host, :, part], op, factor, left_s(deadline))
            sent[turn].append(start(sums[slot], peer, FIRST_OWN_TAG, is_send=True))
        inner.reduce_scatter_single(total, blocks[column.host, :, part], op, factor, left_s(deadline))
        yield arriving
        each = [*received]
        each.insert(column.host, total)
        reduce_(total, each, add)

    run_in_turns((reduce(part, index % len(sent)) for index, part in enumerate(segments)), deadline)
    end_sends(sent, len(segments), len(column.others), deadline)


def _segments(shard: torch.Tensor) -> Iterator[slice]:
    numel = shard.numel()
    step = shard_numel(numel, shard.itemsize)
    return (slice(first, min(first + step, numel)) for first in range(0, numel, step))
