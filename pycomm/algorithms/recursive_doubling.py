"""Pairs at distance 1, 2, 4, ... swap all that they have: after log2(n) rounds everybody has everything.

S is the number of bytes of the largest buffer, n the world size, p the largest power of two in n. The bytes are those
of the busiest rank; where n is no power of two, n - p ranks are served by a neighbour (``_patterns.Fold``).

======================  ======================  ====================================================================
verb                    Rounds                  Bytes sent per rank
======================  ======================  ====================================================================
all_reduce              log2(p) + 2*(n > p)     (log2(p) + (n > p)) * S
all_gather_single       log2(p) + 2*(n > p)     (p-1 + sum(min(2**k, n-p) for k in range(log2(p))) + (n>p)*n)/n * S
======================  ======================  ====================================================================

Ranks: any number.

all_reduce sends the whole buffer each round: the fewest rounds there are, for small buffers. Both ranks of a pair add,
the lower block of ranks first, so that they get the same bits.

Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005, section 4.5.
"""

from __future__ import annotations

from ..topology import Topology
from ._patterns import IDLE, Fold, doubling_all_gather
from .plan import Chunk, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "plan"]

VERBS = ("all_reduce", "all_gather_single")

_INPUT = Chunk(Space.INPUT, 0)
_OUTPUT = Chunk(Space.OUTPUT, 0)
_COMING = Chunk(Space.SCRATCH, 0)


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``."""
    n = topology.world_size
    if verb == "all_gather_single":
        return doubling_all_gather(rank, n)
    return Plan(verb=verb, rank=rank, world_size=n, input_chunks=1, output_chunks=1, rounds=_all_reduce(rank, n))


def _all_reduce(rank: int, n: int) -> tuple[Round, ...]:
    fold = Fold(rank, n)
    rounds = []
    total = _INPUT
    if fold.extra:
        if not fold.is_paired:
            rounds.append(IDLE)
        elif fold.is_member:
            rounds.append(Round((Recv(fold.partner, _COMING),), (Reduce(_OUTPUT, (_INPUT, _COMING)),)))
            total = _OUTPUT
        else:
            rounds.append(Round((Send(fold.partner, _INPUT),)))
    distance = 1
    while distance < fold.power:
        if fold.is_member:
            other = fold.member ^ distance
            peer = fold.rank_of(other)
            operands = (total, _COMING) if fold.member < other else (_COMING, total)
            rounds.append(Round((Recv(peer, _COMING), Send(peer, total)), (Reduce(_OUTPUT, operands),)))
            total = _OUTPUT
        else:
            rounds.append(IDLE)
        distance *= 2
    if fold.extra:
        result = Send(fold.partner, _OUTPUT) if fold.is_member else Recv(fold.partner, _OUTPUT)
        rounds.append(Round((result,)) if fold.is_paired else IDLE)
    return tuple(rounds)
