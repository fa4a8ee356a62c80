"""Every rank talks to every rank that it needs, without helpers in between: the reference that others are held against.

S is the number of bytes of the largest buffer of the collective (nccl-tests' "size"), n the world size.

======================  ======  ===================
verb                    Rounds  Bytes sent per rank
======================  ======  ===================
all_reduce              2       2*(n-1)/n * S
reduce                  1       S
reduce_scatter_single   1       (n-1)/n * S
broadcast               1       (n-1) * S
all_gather_single       1       (n-1)/n * S
all_to_all_single       1       (n-1)/n * S
gather                  1       1/n * S
scatter                 1       (n-1)/n * S
barrier                 1       (n-1)/n * S
======================  ======  ===================

The bytes are those of the busiest rank: the root of broadcast and scatter, any other of reduce and gather. An
all_to_all with uneven splits sends what they say. In a barrier S is one byte a rank.

Ranks: any number. A world of one sends nothing.

all_reduce is a reduce-scatter and then an all-gather: rank r reduces chunk r, in rank order, and gives it to all. So
every element is reduced once, on one rank, and the results are bit-identical everywhere.
"""

from __future__ import annotations

from ..topology import Topology
from ..types import VERBS
from .plan import Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "plan"]

_WHOLE_INPUT = Chunk(Space.INPUT, 0)
_WHOLE_OUTPUT = Chunk(Space.OUTPUT, 0)


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``; ``root`` matters to reduce, broadcast, gather and scatter."""
    world_size = topology.world_size
    input_chunks, output_chunks, rounds = _BUILDERS[verb](rank, world_size, root)
    return Plan(
        verb=verb,
        rank=rank,
        world_size=world_size,
        input_chunks=input_chunks,
        output_chunks=output_chunks,
        rounds=rounds,
    )


_Built = tuple[int, int, tuple[Round, ...]]  # input chunks, output chunks, rounds


def _peers(rank: int, world_size: int) -> list[int]:
    # Everybody starts with the next rank, so that no rank is the first target of all others.
    return [(rank + step) % world_size for step in range(1, world_size)]


def _reduce_round(rank: int, world_size: int, output: Chunk) -> Round:
    """Chunk p of the input goes to rank p; what comes in is reduced, in rank order, into ``output``."""
    peers = _peers(rank, world_size)
    sends = [Send(peer, Chunk(Space.INPUT, peer)) for peer in peers]
    recvs = [Recv(peer, Chunk(Space.SCRATCH, rank, _lane(peer, rank))) for peer in peers]
    return Round((*recvs, *sends), (Reduce(output, _contributions(rank, rank, world_size)),))


def _lane(peer: int, rank: int) -> int:
    return peer if peer < rank else peer - 1  # the own contribution needs no lane


def _contributions(chunk: int, rank: int, world_size: int) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(Space.INPUT, chunk) if peer == rank else Chunk(Space.SCRATCH, chunk, _lane(peer, rank))
        for peer in range(world_size)
    )


def _all_reduce(rank: int, world_size: int, root: int) -> _Built:
    mine = Chunk(Space.OUTPUT, rank)
    peers = _peers(rank, world_size)
    recvs = [Recv(peer, Chunk(Space.OUTPUT, peer)) for peer in peers]
    gather = Round((*recvs, *(Send(peer, mine) for peer in peers)))
    return world_size, world_size, (_reduce_round(rank, world_size, mine), gather)


def _reduce(rank: int, world_size: int, root: int) -> _Built:
    if rank != root:
        return 1, 0, (Round((Send(root, _WHOLE_INPUT),)),)
    recvs = tuple(Recv(peer, Chunk(Space.SCRATCH, 0, _lane(peer, rank))) for peer in _peers(rank, world_size))
    return 1, 1, (Round(recvs, (Reduce(_WHOLE_OUTPUT, _contributions(0, rank, world_size)),)),)


def _reduce_scatter_single(rank: int, world_size: int, root: int) -> _Built:
    return world_size, 1, (_reduce_round(rank, world_size, _WHOLE_OUTPUT),)


def _broadcast(rank: int, world_size: int, root: int) -> _Built:
    if rank != root:
        return 0, 1, (Round((Recv(root, _WHOLE_OUTPUT),)),)
    return 1, 0, (Round(tuple(Send(peer, _WHOLE_INPUT) for peer in _peers(rank, world_size))),)


def _all_gather_single(rank: int, world_size: int, root: int) -> _Built:
    peers = _peers(rank, world_size)
    recvs = [Recv(peer, Chunk(Space.OUTPUT, peer)) for peer in peers]
    sends = [Send(peer, _WHOLE_INPUT) for peer in peers]
    return 1, world_size, (Round((*recvs, *sends), (Copy(Chunk(Space.OUTPUT, rank), _WHOLE_INPUT),)),)


def _all_to_all_single(rank: int, world_size: int, root: int) -> _Built:
    peers = _peers(rank, world_size)
    recvs = [Recv(peer, Chunk(Space.OUTPUT, peer)) for peer in peers]
    sends = [Send(peer, Chunk(Space.INPUT, peer)) for peer in peers]
    own = Copy(Chunk(Space.OUTPUT, rank), Chunk(Space.INPUT, rank))
    return world_size, world_size, (Round((*recvs, *sends), (own,)),)


def _gather(rank: int, world_size: int, root: int) -> _Built:
    if rank != root:
        return 1, 0, (Round((Send(root, _WHOLE_INPUT),)),)
    recvs = tuple(Recv(peer, Chunk(Space.OUTPUT, peer)) for peer in _peers(rank, world_size))
    return 1, world_size, (Round(recvs, (Copy(Chunk(Space.OUTPUT, rank), _WHOLE_INPUT),)),)


def _scatter(rank: int, world_size: int, root: int) -> _Built:
    if rank != root:
        return 0, 1, (Round((Recv(root, _WHOLE_OUTPUT),)),)
    sends = tuple(Send(peer, Chunk(Space.INPUT, peer)) for peer in _peers(rank, world_size))
    return world_size, 1, (Round(sends, (Copy(_WHOLE_OUTPUT, Chunk(Space.INPUT, rank)),)),)


def _barrier(rank: int, world_size: int, root: int) -> _Built:
    peers = _peers(rank, world_size)
    recvs = [Recv(peer, Chunk(Space.OUTPUT, peer)) for peer in peers]
    return 1, world_size, (Round((*recvs, *(Send(peer, _WHOLE_INPUT) for peer in peers))),)


_BUILDERS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter_single": _reduce_scatter_single,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
