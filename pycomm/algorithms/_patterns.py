"""What algorithms share: joining plans into larger ones, and patterns that more than one of them uses.

A *part* is a plan of fewer ranks or fewer chunks that becomes a phase of a larger plan: ``moved`` gives its ranks and
chunks the places that they have there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from .plan import Action, Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space, chunks_of

__all__ = [
    "IDLE",
    "Fold",
    "all_reduce_of_reduce_and_broadcast",
    "doubling_all_gather",
    "moved",
    "padded",
    "place",
    "rooted",
    "row",
    "together",
]

IDLE = Round()


# -- joining plans -----------------------------------------------------------------------------------------------------


def place(inputs: Sequence[Chunk], outputs: Sequence[Chunk]) -> Callable[[Chunk], Chunk]:
    """Returns where a part's chunks lie in the whole plan: input chunk i at ``inputs[i]``, output i at ``outputs[i]``.

    Scratch lies beside the input that it is as large as, in the lane that the part says.
    """

    def to(chunk: Chunk) -> Chunk:
        if chunk.space is Space.OUTPUT:
            return outputs[chunk.first]
        there = inputs[chunk.first]
        return there if chunk.space is Space.INPUT else Chunk(Space.SCRATCH, there.first, chunk.lane, there.span)

    return to


def row(space: Space, chunks: int, span: int = 1, start: int = 0, lane: int = 0) -> list[Chunk]:
    """Returns ``chunks`` pieces of ``span`` chunks each, side by side."""
    return [Chunk(space, start + index * span, lane, span) for index in range(chunks)]


def moved(part: Plan, ranks: Sequence[int], to: Callable[[Chunk], Chunk]) -> tuple[Round, ...]:
    """Returns the rounds of ``part``, whose rank i is ``ranks[i]`` of the whole and whose single chunk c is ``to(c)``.

    Pieces that are no longer neighbours there become several; a copy onto itself goes.
    """
    rounds = []
    for round_ in part.rounds:
        transfers: list[Send | Recv] = []
        for transfer in round_.transfers:
            for (chunk,) in _pieces(transfer, to):
                transfers.append(transfer._replace(peer=ranks[transfer.peer], chunk=chunk))
        local: list[Reduce | Copy] = []
        for action in round_.local:
            for output, *inputs in _pieces(action, to):
                if len(inputs) > 1:
                    local.append(Reduce(output, tuple(inputs)))
                elif output != inputs[0]:
                    local.append(Copy(output, inputs[0]))
        rounds.append(Round(tuple(transfers), tuple(local)))
    return tuple(rounds)


def _pieces(action: Action, to: Callable[[Chunk], Chunk]) -> Iterable[list[Chunk]]:
    """Yields the chunks of ``action`` in their new places, as few pieces as they can be."""
    chunks = chunks_of(action)
    piece: list[Chunk] = []
    for step in range(chunks[0].span):
        unit = [to(Chunk(space, first + step, lane)) for space, first, lane, _ in chunks]
        if piece and all(_are_neighbours(left, right) for left, right in zip(piece, unit)):
            piece = [left._replace(span=left.span + right.span) for left, right in zip(piece, unit)]
            continue
        if piece:
            yield piece
        piece = unit
    yield piece


def _are_neighbours(left: Chunk, right: Chunk) -> bool:
    return (left.space, left.lane, left.first + left.span) == (right.space, right.lane, right.first)


def together(parts: Iterable[Sequence[Round]]) -> tuple[Round, ...]:
    """Returns rounds that do what the rounds of all ``parts`` do, side by side."""
    joined = []
    for rounds in zip_longest(*parts, fillvalue=IDLE):
        transfers = tuple(transfer for round_ in rounds for transfer in round_.transfers)
        joined.append(Round(transfers, tuple(action for round_ in rounds for action in round_.local)))
    return tuple(joined)


def padded(rounds: Sequence[Round], length: int) -> tuple[Round, ...]:
    """Returns ``rounds`` and as many idle ones as make them ``length``: rounds of all ranks go by one number."""
    return (*rounds, *[IDLE] * (length - len(rounds)))


def rooted(verb: str, rank: int, world_size: int, root: int, chunks: int, rounds: Sequence[Round]) -> Plan:
    """Returns the plan of a reduce (every rank has an input, the root the output) or a broadcast (the other way)."""
    return Plan(
        verb=verb,
        rank=rank,
        world_size=world_size,
        input_chunks=chunks if verb == "reduce" or rank == root else 0,
        output_chunks=chunks if (verb == "reduce") == (rank == root) else 0,
        rounds=tuple(rounds),
    )


def all_reduce_of_reduce_and_broadcast(reduce: Plan, broadcast: Plan) -> Plan:
    """Returns the all_reduce that reduces everything on one rank and then broadcasts it from there."""
    chunks = reduce.input_chunks
    everything = row(Space.OUTPUT, chunks)
    return Plan(
        verb="all_reduce",
        rank=reduce.rank,
        world_size=reduce.world_size,
        input_chunks=chunks,
        output_chunks=chunks,
        rounds=reduce.rounds + moved(broadcast, range(reduce.world_size), place(everything, everything)),
    )


# -- powers of two -----------------------------------------------------------------------------------------------------


class Fold:
    """The largest power of two of ranks, ``power``, that a butterfly can have, and how the others take part.

    There are ``extra`` ranks too many. Of the first 2 * extra ranks each odd one hands its data to the even one before
    it (round one) and gets the result from it (last round); the even ones and all later ranks are the *members*.
    Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004, section 4.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.power = 1 << (world_size.bit_length() - 1)
        self.extra = world_size - self.power
        self.is_paired = rank < 2 * self.extra
        self.is_member = not (self.is_paired and rank % 2)
        self.partner = rank ^ 1  # of a paired rank
        self.member = rank // 2 if self.is_paired else rank - self.extra

    def rank_of(self, member: int) -> int:
        """Returns the rank of a member."""
        return member + min(member, self.extra)


def doubling_all_gather(rank: int, world_size: int) -> Plan:
    """Returns the all_gather in which members at distance 1, 2, 4, ... swap all that they have so far."""
    fold = Fold(rank, world_size)
    own = Copy(Chunk(Space.OUTPUT, rank), Chunk(Space.INPUT, 0))
    rounds = []
    if fold.extra:  # an odd rank's part goes to the even one before it
        if fold.is_paired and fold.is_member:
            rounds.append(Round((Recv(fold.partner, Chunk(Space.OUTPUT, fold.partner)),), (own,)))
        else:
            rounds.append(Round((Send(fold.partner, own.input),) if fold.is_paired else (), (own,)))
    distance = 1
    while distance < fold.power:
        if fold.is_member:
            mine = fold.member & ~(distance - 1)  # the first of the members whose parts I have
            peer = fold.rank_of(fold.member ^ distance)
            have, get = (_parts(fold, first, first + distance) for first in (mine, mine ^ distance))
            is_first = not rounds
            send = Send(peer, own.input if is_first else have)
            rounds.append(Round((Recv(peer, get), send), (own,) if is_first else ()))
        else:
            rounds.append(IDLE)
        distance *= 2
    if fold.extra:
        everything = Chunk(Space.OUTPUT, 0, 0, world_size)
        give = Send(fold.partner, everything) if fold.is_member else Recv(fold.partner, everything)
        rounds.append(Round((give,)) if fold.is_paired else IDLE)
    return Plan(
        verb="all_gather_single",
        rank=rank,
        world_size=world_size,
        input_chunks=1,
        output_chunks=world_size,
        rounds=tuple(rounds),
    )


def _parts(fold: Fold, member: int, stop: int) -> Chunk:
    """Returns the chunks of the output that members ``member`` to ``stop - 1``, and ranks paired with them, gave."""
    first = fold.rank_of(member)
    return Chunk(Space.OUTPUT, first, 0, fold.rank_of(stop) - first)
