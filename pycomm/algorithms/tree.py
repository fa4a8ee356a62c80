"""A binomial tree: whoever has the data gives it on, so that twice as many have it after each round.

S is the number of bytes of the buffer, n the world size. The bytes are those of the root, the busiest rank.

======================  ==================  ===================
verb                    Rounds              Bytes sent per rank
======================  ==================  ===================
broadcast               ceil(log2(n))       ceil(log2(n)) * S
reduce                  ceil(log2(n))       S
all_reduce              2*ceil(log2(n))     ceil(log2(n)) * S
======================  ==================  ===================

Ranks: any number.

The fewest rounds that a broadcast can have, and few messages in all: for small buffers. reduce is broadcast backwards;
all_reduce is a reduce to rank 0 and a broadcast from it. Number the ranks from the root: in the round with distance d,
rank v < d gives to v + d.

Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005, section 4.
"""

from __future__ import annotations

from ..topology import Topology
from ._patterns import IDLE, all_reduce_of_reduce_and_broadcast, rooted
from .plan import Chunk, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "plan"]

VERBS = ("all_reduce", "broadcast", "reduce")


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``; ``root`` matters to reduce and broadcast."""
    if verb == "all_reduce":
        return all_reduce_of_reduce_and_broadcast(plan("reduce", rank, topology), plan("broadcast", rank, topology))
    n = topology.world_size
    ring = [(root + step) % n for step in range(n)]
    rounds = _broadcast if verb == "broadcast" else _reduce
    return rooted(verb, rank, n, root, 1, rounds(ring, (rank - root) % n))


def _distances(n: int) -> list[int]:
    return [1 << step for step in range((n - 1).bit_length())]


def _broadcast(ring: list[int], place: int) -> list[Round]:
    rounds = []
    for distance in reversed(_distances(len(ring))):
        # Places that are multiples of 2 * distance have the data, and give it to the one in the middle of their span.
        whole = Chunk(Space.OUTPUT if place else Space.INPUT, 0)
        round_ = IDLE
        if place % (2 * distance) == 0 and place + distance < len(ring):
            round_ = Round((Send(ring[place + distance], whole),))
        elif place % (2 * distance) == distance:
            round_ = Round((Recv(ring[place - distance], whole),))
        rounds.append(round_)
    return rounds


def _reduce(ring: list[int], place: int) -> list[Round]:
    rounds = []
    total = Chunk(Space.INPUT, 0)
    coming, kept = Chunk(Space.SCRATCH, 0, lane=0), Chunk(Space.SCRATCH, 0, lane=1)
    for distance in _distances(len(ring)):
        round_ = IDLE
        if place % (2 * distance) == 0 and place + distance < len(ring):
            so_far, total = total, kept if place else Chunk(Space.OUTPUT, 0)
            round_ = Round((Recv(ring[place + distance], coming),), (Reduce(total, (so_far, coming)),))
        elif place % (2 * distance) == distance:
            round_ = Round((Send(ring[place - distance], total),))
        rounds.append(round_)
    return rounds
