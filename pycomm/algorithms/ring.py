"""Every rank talks to its two neighbours alone: data goes round a ring, and all links are busy all the time.

S is the number of bytes of the largest buffer of the collective (nccl-tests' "size"), n the world size.

======================  =============  ===================
verb                    Rounds         Bytes sent per rank
======================  =============  ===================
all_reduce              2*(n-1)        2*(n-1)/n * S
reduce_scatter_single   n-1            (n-1)/n * S
all_gather_single       n-1            (n-1)/n * S
broadcast               n-1            S
reduce                  n-1            S
all_to_all_single       n-1            (n-1)/n * S
======================  =============  ===================

Ranks: any number. Neighbours share a host where they can, so one rank a host sends to another host.

all_reduce sends no byte more than it must, in many rounds: for large buffers. Chunk c starts its way at the rank after
c, every rank adds its part, and it ends, reduced, at rank c; then the sums go round once more.
broadcast and reduce are a chain: slow for one piece, fast once the executor sends many segments after one another.

Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
all_to_all_single: round t serves the ranks at distance t, as in Bruck et al., IEEE TPDS 1997, section 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..topology import Topology
from ._patterns import IDLE
from .plan import Chunk, Copy, Outline, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "outline", "plan"]

VERBS = ("all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast", "reduce", "all_to_all_single")


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``; ``root`` matters to reduce and broadcast."""
    ring = _ring_from(root if verb in ("broadcast", "reduce") else rank, topology)
    n = len(ring)
    match verb:
        case "all_reduce":
            own = Chunk(Space.OUTPUT, rank)
            chunks, rounds = (n, n), [*_reduce_scatter(ring, own), *_all_gather(ring, own)]
        case "reduce_scatter_single":
            chunks, rounds = (n, 1), [*_reduce_scatter(ring, Chunk(Space.OUTPUT, 0))]
        case "all_gather_single":
            chunks, rounds = (1, n), [*_all_gather(ring, Chunk(Space.INPUT, 0))]
        case "all_to_all_single":
            chunks, rounds = (n, n), _all_to_all(ring)
        case "broadcast":
            chunks, rounds = (int(rank == root), int(rank != root)), _broadcast(ring, ring.index(rank))
        case _:
            chunks, rounds = (1, int(rank == root)), _reduce(ring, ring.index(rank))
    return Plan(
        verb=verb,
        rank=rank,
        world_size=n,
        input_chunks=chunks[0],
        output_chunks=chunks[1],
        rounds=tuple(rounds),
    )


def outline(verb: str, ranks: Sequence[int], topology: Topology, root: int = 0) -> list[Outline] | None:
    """Returns the rounds of ``ranks``, those that differ in nothing but the chunk once. None: they all differ."""
    n = topology.world_size
    if verb == "all_to_all_single":
        return None
    if verb in ("broadcast", "reduce"):  # each link of the chain has its round: of those of equal length, one
        chain = _ring_from(root, topology)
        links = [(topology.distance(near, far), near, far) for near, far in zip(chain, chain[1:])]
        whole = Chunk(Space.OUTPUT, 0)
        add = (Reduce(whole, (whole, whole)),) if verb == "reduce" else ()
        outlines = []
        for distance, near, far in {link[0]: link for link in links}.values():
            source, target = (near, far) if verb == "broadcast" else (far, near)
            rounds = {source: Round((Send(target, whole),)), target: Round((Recv(source, whole),), add)}
            outlines.append(Outline(sum(link[0] == distance for link in links), rounds, 1))
        return outlines
    halves = {"reduce_scatter_single": (_reduce_scatter,), "all_gather_single": (_all_gather,)}
    phases = halves.get(verb, (_reduce_scatter, _all_gather))
    own = Chunk(Space.OUTPUT, 0)
    rings = {rank: _ring_from(rank, topology) for rank in ranks}
    return [Outline(n - 1, {rank: next(phase(rings[rank], own)) for rank in ranks}, n - 1) for phase in phases]


def _ring_from(rank: int, topology: Topology) -> list[int]:
    """Returns all ranks, host by host, ``rank`` first."""
    ring = [each for host in topology.hosts for each in host]
    start = ring.index(rank)
    return ring[start:] + ring[:start]


def _reduce_scatter(ring: list[int], own: Chunk) -> Iterator[Round]:
    """Sums move forward: each round sends the one that came last, plus the own part; this rank's ends in ``own``.

    ``ring[0]`` is this rank, ``ring[-1]`` the one before it, whose chunk starts here.
    """
    sent = Chunk(Space.INPUT, ring[-1])
    for step in range(2, len(ring) + 1):
        chunk = ring[-step]  # the last to come is ring[-n], this rank's own
        coming = Chunk(Space.SCRATCH, chunk)
        total = own if chunk == ring[0] else coming
        add = Reduce(total, (coming, Chunk(Space.INPUT, chunk)))
        yield Round((Recv(ring[-1], coming), Send(ring[1], sent)), (add,))
        sent = total


def _all_gather(ring: list[int], own: Chunk) -> Iterator[Round]:
    """Parts move forward, this rank's ``own`` first: each round sends the one that came last."""
    kept = Chunk(Space.OUTPUT, ring[0])
    copies = () if own == kept else (Copy(kept, own),)
    sent = own
    for step in range(1, len(ring)):
        coming = Chunk(Space.OUTPUT, ring[-step])
        yield Round((Recv(ring[-1], coming), Send(ring[1], sent)), copies if step == 1 else ())
        sent = coming


def _all_to_all(ring: list[int]) -> list[Round]:
    """Round t: to the rank t places ahead, from the one t places behind. ``ring[0]`` is this rank."""
    rounds = []
    for step in range(1, len(ring)):
        ahead, behind = ring[step], ring[-step]
        transfers = (Recv(behind, Chunk(Space.OUTPUT, behind)), Send(ahead, Chunk(Space.INPUT, ahead)))
        own = (Copy(Chunk(Space.OUTPUT, ring[0]), Chunk(Space.INPUT, ring[0])),) if step == 1 else ()
        rounds.append(Round(transfers, own))
    return rounds


def _broadcast(ring: list[int], place: int) -> list[Round]:
    """Down the chain that starts at the root: ``place`` hears in round place - 1 and tells in the next."""
    rounds = [IDLE] * (len(ring) - 1)
    whole = Chunk(Space.OUTPUT if place else Space.INPUT, 0)
    if place:
        rounds[place - 1] = Round((Recv(ring[place - 1], whole),))
    if place < len(ring) - 1:
        rounds[place] = Round((Send(ring[place + 1], whole),))
    return rounds


def _reduce(ring: list[int], place: int) -> list[Round]:
    """Up the chain that ends at the root: the last place starts, and every rank adds its part."""
    last = len(ring) - 1
    rounds = [IDLE] * last
    total = Chunk(Space.INPUT, 0)
    if place < last:
        coming = Chunk(Space.SCRATCH, 0)
        total = coming if place else Chunk(Space.OUTPUT, 0)
        add = Reduce(total, (coming, Chunk(Space.INPUT, 0)))
        rounds[last - 1 - place] = Round((Recv(ring[place + 1], coming),), (add,))
    if place:
        rounds[last - place] = Round((Send(ring[place - 1], total),))
    return rounds
