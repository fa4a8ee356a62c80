"""Two binary trees, each for one half of the data; a rank that is inside one of them is a leaf of the other.

S is the number of bytes of the buffer, n the world size. The bytes are the most that any rank sends.

======================  ========================  =====================================
verb                    Rounds                    Bytes sent per rank
======================  ========================  =====================================
broadcast               floor(log2(n-1)) + 1      S
reduce                  floor(log2(n-1)) + 1      S
all_reduce              2*floor(log2(n-1)) + 2    (1 if n == 2 else 1.5 if n == 3 else 2) * S
======================  ========================  =====================================

Ranks: any number.

As few rounds as a binomial tree, but nobody sends more than twice the buffer (the root of a binomial tree: log2(n)
times), and with many segments after one another every rank sends and receives all the time: for buffers of all sizes in
large worlds. The root stands above both trees. The other places, 1 to n-1 seen from the root, form the first tree in
order: place v stands as high as 2 divides it, so odd places are leaves. The second tree is the first one mirrored, or
turned by one place where mirroring would leave leaves leaves.

Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing,
2009.
"""

from __future__ import annotations

from typing import NamedTuple

from ..topology import Topology
from ._patterns import IDLE, all_reduce_of_reduce_and_broadcast, rooted, together
from .plan import Chunk, Plan, Recv, Reduce, Round, Send, Space

__all__ = ["VERBS", "plan"]

VERBS = ("all_reduce", "broadcast", "reduce")


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns the plan of ``rank`` for ``verb``; ``root`` matters to reduce and broadcast."""
    if verb == "all_reduce":
        return all_reduce_of_reduce_and_broadcast(plan("reduce", rank, topology), plan("broadcast", rank, topology))
    n = topology.world_size
    one_tree = _broadcast if verb == "broadcast" else _reduce
    halves = [one_tree(half, _position((rank - root) % n, n, half, root)) for half in (0, 1)]
    return rooted(verb, rank, n, root, 2, together(halves))


class _Neighbour(NamedTuple):
    rank: int
    height: int  # of its place above the leaves, which are at 0


class _Position(NamedTuple):
    """Where a rank stands in one tree. The root is at height ``top``, and has one child."""

    height: int
    top: int
    parent: int  # the root has none: -1
    before: _Neighbour | None  # the child whose part of the tree lies before this place, and the one after
    after: _Neighbour | None


def _position(seat: int, n: int, half: int, root: int) -> _Position:
    """Returns the position, in tree ``half``, of the rank ``seat`` places after the root."""
    top = (n - 1).bit_length()

    def neighbour(place: int) -> _Neighbour:
        return _Neighbour((root + _seat(place, n, half)) % n, _height(place))

    if seat == 0:
        return _Position(top, top, -1, None, neighbour(1 << (top - 1)))
    place = _place(seat, n, half)
    bit = 1 << _height(place)
    parent = (place ^ bit) | (bit << 1)
    if parent >= n:  # the tree is cut off there: the child moved up
        parent = place ^ bit
    step = bit >> 1
    before = neighbour(place - step) if step else None
    while step and place + step >= n:
        step >>= 1
    after = neighbour(place + step) if step else None
    return _Position(_height(place), top, neighbour(parent).rank if parent else root, before, after)


def _height(place: int) -> int:
    return (place & -place).bit_length() - 1


def _place(seat: int, n: int, half: int) -> int:
    """Returns the place in tree ``half`` of a seat, both in 1..n-1."""
    if half == 0:
        return seat
    return n - seat if n % 2 else (seat - 2) % (n - 1) + 1


def _seat(place: int, n: int, half: int) -> int:
    """The inverse of ``_place``."""
    if half == 0:
        return place
    return n - place if n % 2 else place % (n - 1) + 1


def _reduce(half: int, at: _Position) -> list[Round]:
    """Round h is that of the places at height h: they send their part of the tree, summed in order of places."""
    rounds = [IDLE] * at.top
    own, before, after = Chunk(Space.INPUT, half), Chunk(Space.SCRATCH, half, 0), Chunk(Space.SCRATCH, half, 1)
    total = Chunk(Space.OUTPUT, half) if at.parent < 0 else after
    for child, coming in ((at.before, before), (at.after, after)):
        if child:
            transfers = (*rounds[child.height].transfers, Recv(child.rank, coming))
            rounds[child.height] = Round(transfers)
    operands = (*((before,) if at.before else ()), own, *((after,) if at.after else ()))
    if len(operands) > 1:
        rounds[at.height - 1] = rounds[at.height - 1]._replace(local=(Reduce(total, operands),))
    if at.parent >= 0:
        rounds[at.height] = Round((Send(at.parent, total if len(operands) > 1 else own),))
    return rounds


def _broadcast(half: int, at: _Position) -> list[Round]:
    """The same backwards: the places at height h are told in round top - 1 - h."""
    rounds = [IDLE] * at.top
    whole = Chunk(Space.INPUT if at.parent < 0 else Space.OUTPUT, half)
    if at.parent >= 0:
        rounds[at.top - 1 - at.height] = Round((Recv(at.parent, whole),))
    for child in (at.before, at.after):
        if child:
            transfers = (*rounds[at.top - 1 - child.height].transfers, Send(child.rank, whole))
            rounds[at.top - 1 - child.height] = Round(transfers)
    return rounds
