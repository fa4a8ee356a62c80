"""Two algorithms in one: inside a host, where messages are cheap, and between hosts, where they are not.

"hierarchical(INNER,OUTER)" names the two; "hierarchical" alone is "hierarchical(direct,ring)". S is the number of bytes
of the largest buffer of the collective, m the number of hosts, L the ranks of a host. The figures are those of the
default parts, of hosts of equal size and of the busiest rank.

======================  =============================  ======================================================
verb                    Rounds                         Bytes sent per rank
======================  =============================  ======================================================
all_reduce              2*(L > 1) + 2*(m-1)            2*(L-1)/L * S + 2*(m-1)/m / L * S
reduce_scatter_single   (L > 1) + m-1                  (L-1)/L * S + (m-1)/m / L * S
all_gather_single       (L > 1) + m-1                  (L-1)/L * S + (m-1)/m / L * S
broadcast               (L > 1) + m-1                  (L-1 + (m > 1)) * S
reduce                  (L > 1) + m-1                  S
======================  =============================  ======================================================

Ranks: any number on any hosts; reduce_scatter and all_gather need hosts of equal size.

all_reduce: the ranks of a host reduce-scatter among themselves, so that each holds the host's sum of its own shard;
then every rank all-reduces its shard with the ranks of the other hosts that hold it; then the host gathers the shards.
What leaves a host is what one rank with a host's link to itself would send, and every rank carries its share of it at
once. Hosts of unequal size cut the buffer at different places: the pieces between cuts cross between those that hold
them.
broadcast and reduce go through one rank a host.

Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018, section 3.3 (hierarchical
all-reduce); Thakur et al., 2005, for the phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import lcm

from ..errors import ConfigError
from ..topology import Topology
from . import Algorithm, find_algorithm
from ._patterns import moved, padded, place, row, together
from .plan import Chunk, Plan, Round, Space

__all__ = ["VERBS", "of_parts", "plan", "supports"]

_SCATTER = "reduce_scatter_single"
_GATHER = "all_gather_single"
# The verbs that the inner and the outer part must have.
_NEEDS = {
    "all_reduce": ((_SCATTER, _GATHER), ("all_reduce",)),
    _SCATTER: ((_SCATTER,), (_SCATTER,)),
    _GATHER: ((_GATHER,), (_GATHER,)),
    "broadcast": (("broadcast",), ("broadcast",)),
    "reduce": (("reduce",), ("reduce",)),
}
VERBS = tuple(_NEEDS)


def supports(verb: str, topology: Topology) -> bool:
    """Says whether the hosts are of equal size, where ``verb`` needs it."""
    return verb not in (_SCATTER, _GATHER) or len(set(map(len, topology.hosts))) == 1


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb`` with the default parts."""
    return of_parts("direct", "ring").build(verb, rank, topology, root)


@lru_cache(maxsize=64)
def of_parts(*names: str) -> Algorithm:
    """Returns the algorithm that goes by ``names[0]`` inside a host and by ``names[1]`` between hosts.

    Raises ConfigError for an unknown name, for other than two, and for parts that have no verb in common.
    """
    if len(names) != 2:
        raise ConfigError(f"hierarchical({','.join(names)}): expected two parts, as in hierarchical(direct,ring)")
    inner, outer = map(find_algorithm, names)
    verbs = []
    for verb, needs in _NEEDS.items():
        if all(set(need) <= set(part.verbs) for need, part in zip(needs, (inner, outer))):
            verbs.append(verb)
    if not verbs:
        raise ConfigError(f"hierarchical({','.join(names)}): the two have no collective that can be made of both")

    def build(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
        return _BUILDERS[verb](_Parts(inner, outer, rank, topology), root)

    return Algorithm(f"hierarchical({inner.name},{outer.name})", tuple(verbs), build, supports)


class _Parts:
    """The two parts, as seen from one rank: ``local`` of the ranks ``mates`` on host ``host``."""

    def __init__(self, inner: Algorithm, outer: Algorithm, rank: int, topology: Topology) -> None:
        self.inner = inner
        self.outer = outer
        self.rank = rank
        self.topology = topology
        self.hosts = topology.hosts
        self.host = topology.host_of(rank)
        self.mates = self.hosts[self.host]
        self.local = topology.local_rank_of(rank)

    def inside(self, verb: str, root: int = 0) -> Plan:
        """The plan of this rank among those of its host."""
        return self.inner.plan(verb, self.local, Topology.flat(len(self.mates)), root)

    def between(self, verb: str, root: int = 0) -> Plan:
        """The plan of one rank a host, this rank's host being ``host``."""
        return self.outer.plan(verb, self.host, _one_rank_a_host(self.topology), root)

    def leaders(self, root: int) -> list[int]:
        """One rank a host: the root on its own, else the first."""
        host = self.topology.host_of(root)
        return [root if index == host else ranks[0] for index, ranks in enumerate(self.hosts)]

    def common_chunks(self, verb: str) -> int:
        """How many chunks both parts, on hosts of any size, can be cut into."""
        plans = [self.inner.plan(verb, 0, Topology.flat(size)) for size in set(map(len, self.hosts))]
        return lcm(*(max(plan.input_chunks, plan.output_chunks) for plan in (*plans, self.between(verb))))

    def scaled(self, part: Plan, chunks: int, source: Space, target: Space, lane: int = 0) -> Callable[[Chunk], Chunk]:
        """Where the chunks of ``part`` lie if there are ``chunks`` in all; ``lane`` is for what lies in scratch."""
        count = max(part.input_chunks, part.output_chunks)
        lanes = {Space.SCRATCH: lane}
        inputs, outputs = (row(space, count, chunks // count, lane=lanes.get(space, 0)) for space in (source, target))
        return place(inputs, outputs)

    def free_lane(self, *parts: Plan) -> int:
        """A lane of scratch that none of ``parts`` uses."""
        return max((lane + 1 for part in parts for lane in part.lanes()), default=0)

    def pad(self, rounds: tuple[Round, ...], verb: str) -> tuple[Round, ...]:
        """Makes ``rounds``, of a plan inside this host, as many as on the host where they are most."""
        plans = (self.inner.plan(verb, 0, Topology.flat(size)) for size in set(map(len, self.hosts)))
        return padded(rounds, max(len(plan.rounds) for plan in plans))

    def whole(self, verb: str, chunks: tuple[int, int], *phases: Sequence[Round]) -> Plan:
        """The plan that goes through ``phases``, with ``chunks`` of input and output."""
        return Plan(
            verb=verb,
            rank=self.rank,
            world_size=self.topology.world_size,
            input_chunks=chunks[0],
            output_chunks=chunks[1],
            rounds=tuple(round_ for phase in phases for round_ in phase),
        )


@lru_cache(maxsize=16)
def _one_rank_a_host(topology: Topology) -> Topology:
    return Topology(tuple((host,) for host in range(len(topology.hosts))), topology.racks)


def _all_reduce(at: _Parts, root: int) -> Plan:
    crossing = at.between("all_reduce")
    units = lcm(*map(len, at.hosts))  # every host's shards are whole units
    chunks = units * crossing.input_chunks
    shard = chunks // len(at.mates)
    own = [Chunk(Space.OUTPUT, at.local * shard, 0, shard)]
    scatter = moved(at.inside(_SCATTER), at.mates, place(row(Space.INPUT, len(at.mates), shard), own))
    gather = moved(at.inside(_GATHER), at.mates, place(own, row(Space.OUTPUT, len(at.mates), shard)))
    # The cuts of all hosts that fall in my shard, in units: what lies between two of them crosses to the same ranks.
    sizes = set(map(len, at.hosts))
    cuts = sorted({local * units // size for size in sizes for local in range(size + 1)})
    mine = [cut for cut in cuts if at.local * units <= cut * len(at.mates) <= (at.local + 1) * units]
    crossings = []
    for first, stop in zip(mine, mine[1:]):
        column = [ranks[first * len(ranks) // units] for ranks in at.hosts]
        piece = row(Space.OUTPUT, crossing.input_chunks, stop - first, first * crossing.input_chunks)
        crossings.append(moved(crossing, column, place(piece, piece)))
    phases = at.pad(scatter, _SCATTER), together(crossings), at.pad(gather, _GATHER)
    return at.whole("all_reduce", (chunks, chunks), *phases)


def _reduce_scatter(at: _Parts, root: int) -> Plan:
    """Local rank l gets the host's sums of the chunks of all hosts' l-th ranks; then these add them up."""
    inside, between = at.inside(_SCATTER), at.between(_SCATTER)
    lane = at.free_lane(inside, between)
    column = [ranks[at.local] for ranks in at.hosts]
    sums = [Chunk(Space.SCRATCH, rank, lane) for rank in column]
    scatters = []
    for ranks, total in zip(at.hosts, sums):
        scatters.append(moved(inside, at.mates, place([Chunk(Space.INPUT, rank) for rank in ranks], [total])))
    crossing = moved(between, column, place(sums, row(Space.OUTPUT, 1)))
    return at.whole(_SCATTER, (at.topology.world_size, 1), together(scatters), crossing)


def _all_gather(at: _Parts, root: int) -> Plan:
    """The l-th ranks of all hosts gather their chunks; then each host gathers these columns."""
    column = [Chunk(Space.OUTPUT, ranks[at.local]) for ranks in at.hosts]
    crossing = moved(at.between(_GATHER), [rank.first for rank in column], place(row(Space.INPUT, 1), column))
    gathers = []
    for ranks, had in zip(at.hosts, column):
        got = [Chunk(Space.OUTPUT, rank) for rank in ranks]
        gathers.append(moved(at.inside(_GATHER), at.mates, place([had], got)))
    return at.whole(_GATHER, (1, at.topology.world_size), crossing, together(gathers))


def _broadcast(at: _Parts, root: int) -> Plan:
    """The root tells one rank a host; these tell the others."""
    leaders = at.leaders(root)
    leader, is_root = leaders[at.host], at.rank == root
    inside = at.inside("broadcast", at.topology.local_rank_of(leader))
    between = at.between("broadcast", at.topology.host_of(root))
    chunks = at.common_chunks("broadcast")
    have = Space.INPUT if is_root else Space.OUTPUT
    crossing = padded((), len(between.rounds))
    if at.rank == leader:
        crossing = moved(between, leaders, at.scaled(between, chunks, have, Space.OUTPUT))
    telling = moved(inside, at.mates, at.scaled(inside, chunks, have, Space.OUTPUT))
    sizes = (chunks, 0) if is_root else (0, chunks)
    return at.whole("broadcast", sizes, crossing, at.pad(telling, "broadcast"))


def _reduce(at: _Parts, root: int) -> Plan:
    """Every host adds up on one rank; the root adds up theirs."""
    leaders = at.leaders(root)
    leader = leaders[at.host]
    inside = at.inside("reduce", at.topology.local_rank_of(leader))
    between = at.between("reduce", at.topology.host_of(root))
    chunks = at.common_chunks("reduce")
    lane = at.free_lane(inside, between)  # holds the host's sum
    adding = moved(inside, at.mates, at.scaled(inside, chunks, Space.INPUT, Space.SCRATCH, lane))
    crossing = padded((), len(between.rounds))
    if at.rank == leader:
        crossing = moved(between, leaders, at.scaled(between, chunks, Space.SCRATCH, Space.OUTPUT, lane))
    return at.whole("reduce", (chunks, chunks if at.rank == root else 0), at.pad(adding, "reduce"), crossing)


_BUILDERS = {
    "all_reduce": _all_reduce,
    _SCATTER: _reduce_scatter,
    _GATHER: _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
}
