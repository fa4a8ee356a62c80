"""Pairs at distance p/2, p/4, ... 1 swap halves of what is left and add; then the sums come back by doubling.

S is the number of bytes of the largest buffer, n the world size, p the largest power of two in n. The bytes are those
of the busiest rank; where n is no power of two, n - p ranks are served by a neighbour (``_patterns.Fold``).

======================  ======================  ====================================================================
verb                    Rounds                  Bytes sent per rank
======================  ======================  ====================================================================
all_reduce              2*log2(p) + 2*(n > p)   2*(p-1)/p * S + (n > p) * S
reduce_scatter_single   log2(p) + 2*(n > p)     ((n-1)/n if n == p else 1) * S
all_gather_single       log2(p) + 2*(n > p)     (p-1 + sum(min(2**k, n-p) for k in range(log2(p))) + (n>p)*n)/n * S
======================  ======================  ====================================================================

Ranks: any number.

For a power of two it sends as little as a ring, in log2 as many rounds: for buffers of all sizes where every pair of
ranks has a good link.

Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Callable

from ..topology import Topology
from ._patterns import IDLE, Fold, doubling_all_gather
from .plan import Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "plan"]

VERBS = ("all_reduce", "reduce_scatter_single", "all_gather_single")


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``."""
    n = topology.world_size
    if verb == "all_gather_single":
        return doubling_all_gather(rank, n)
    fold = Fold(rank, n)
    chunks = fold.power if verb == "all_reduce" else n
    rounds = _all_reduce(fold) if verb == "all_reduce" else _reduce_scatter(fold, rank, n)
    return Plan(
        verb=verb,
        rank=rank,
        world_size=n,
        input_chunks=chunks,
        output_chunks=chunks if verb == "all_reduce" else 1,
        rounds=tuple(rounds),
    )


def _all_reduce(fold: Fold) -> list[Round]:
    """Member v reduces chunk v of p; then members swap, and paired ranks get, what they lack."""
    rounds = _halving(fold, lambda member: member, fold.power)
    own = Copy(Chunk(Space.OUTPUT, fold.member), Chunk(Space.SCRATCH, fold.member))
    rounds[-1] = rounds[-1]._replace(local=(*rounds[-1].local, own)) if fold.is_member else IDLE
    distance = 1
    while distance < fold.power:
        mine = fold.member & ~(distance - 1)  # the first of the members whose chunks I have
        peer = fold.rank_of(fold.member ^ distance)
        have, get = (Chunk(Space.OUTPUT, first, 0, distance) for first in (mine, mine ^ distance))
        rounds.append(Round((Recv(peer, get), Send(peer, have))) if fold.is_member else IDLE)
        distance *= 2
    if fold.extra:
        everything = Chunk(Space.OUTPUT, 0, 0, fold.power)
        give = Send(fold.partner, everything) if fold.is_member else Recv(fold.partner, everything)
        rounds.append(Round((give,)) if fold.is_paired else IDLE)
    return rounds


def _reduce_scatter(fold: Fold, rank: int, n: int) -> list[Round]:
    """A member reduces its own chunk and that of the rank it is paired with, and hands that one over."""
    rounds = _halving(fold, fold.rank_of, n)
    if fold.is_member:
        own = Copy(Chunk(Space.OUTPUT, 0), Chunk(Space.SCRATCH, rank))
        rounds[-1] = rounds[-1]._replace(local=(*rounds[-1].local, own))
    if fold.extra:
        sent = Send(fold.partner, Chunk(Space.SCRATCH, fold.partner))
        give = sent if fold.is_member else Recv(fold.partner, Chunk(Space.OUTPUT, 0))
        rounds.append(Round((give,)) if fold.is_paired else IDLE)
    return rounds


def _halving(fold: Fold, start: Callable[[int], int], chunks: int) -> list[Round]:
    """Reduces the chunks ``start(v)`` to ``start(v + 1) - 1`` of member v into lane 0 of its scratch.

    Each round halves the range of members whose chunks a member still sums: it gives away the half that it is not in,
    with what it has summed there.
    """
    rounds = []
    total = Space.INPUT
    if fold.extra:
        everything = Chunk(Space.INPUT, 0, 0, chunks)
        coming, kept = (Chunk(Space.SCRATCH, 0, lane, chunks) for lane in (1, 0))
        if not fold.is_paired:
            rounds.append(IDLE)
        elif fold.is_member:
            rounds.append(Round((Recv(fold.partner, coming),), (Reduce(kept, (everything, coming)),)))
            total = Space.SCRATCH
        else:
            rounds.append(Round((Send(fold.partner, everything),)))
    distance = fold.power // 2
    while distance:
        if fold.is_member:
            keep = fold.member & ~(distance - 1)  # the first member of the half that I am in
            give, keep_from = start(keep ^ distance), start(keep)
            give_span, span = start((keep ^ distance) + distance) - give, start(keep + distance) - keep_from
            peer = fold.rank_of(fold.member ^ distance)
            coming, kept = (Chunk(Space.SCRATCH, keep_from, lane, span) for lane in (1, 0))
            mine = Chunk(total, keep_from, 0, span)
            operands = (mine, coming) if fold.member & distance == 0 else (coming, mine)
            transfers = (Recv(peer, coming), Send(peer, Chunk(total, give, 0, give_span)))
            rounds.append(Round(transfers, (Reduce(kept, operands),)))
            total = Space.SCRATCH
        else:
            rounds.append(IDLE)
        distance //= 2
    return rounds
