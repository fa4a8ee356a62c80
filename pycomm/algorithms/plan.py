"""A collective of one rank as data: rounds of sends and receives over numbered chunks. No tensors, no I/O, no torch.

The input and the output of a collective are each cut into chunks; a plan says only how many. The executor cuts: evenly
(chunk i of n spans elements ``i * numel // n`` to ``(i + 1) * numel // n``), or by the splits of an all-to-all.
Scratch is temporary memory, in lanes: a lane is cut as the input is, and only the part that a plan touches exists.

[Note: what a plan promises]
- A round of one rank meets the same round of the others: a message is sent and received in rounds of the same number.
  All ranks have equally many; a rank that has nothing to do in one has an empty round, which costs nothing.
- The input is only read, so the same plan serves in place: where input and output are one tensor (all_reduce, reduce,
  broadcast), or the smaller is this rank's part of the larger (all_gather, reduce_scatter, gather, scatter).
- All ranks compute an element by the same expression: equal grouping, equal order. So results are bit-identical.
- A plan knows no operator: the executor scales contributions (PREMUL_SUM) before the first round and divides (AVG)
  after the last.
- The executor may cut the data into segments and run the same plan on each, several at a time.
``simulator.py`` proves all of it but the last two, which are the executor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..errors import PlanError

__all__ = ["Action", "Chunk", "Copy", "Outline", "Plan", "Recv", "Reduce", "Round", "Send", "Space"]


class Space(Enum):
    """The memory that a chunk lies in."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is a call in Python


class Chunk(NamedTuple):
    """``span`` neighbouring chunks of a space, from ``first`` on, as one piece; ``lane`` is that of scratch, else 0."""

    space: Space
    first: int
    lane: int = 0
    span: int = 1


class Send(NamedTuple):
    """Sends ``chunk`` to rank ``peer``."""

    peer: int
    chunk: Chunk


class Recv(NamedTuple):
    """Receives ``chunk`` from rank ``peer``."""

    peer: int
    chunk: Chunk


class Reduce(NamedTuple):
    """``output = inputs[0] op inputs[1] op ...``: the order of the inputs is the order of addition.

    Inputs are contributions or sums of some, two or more (in a world of one: one). ``output`` may be one of them.
    """

    output: Chunk
    inputs: tuple[Chunk, ...]


class Copy(NamedTuple):
    """``output = input``."""

    output: Chunk
    input: Chunk


Action = Send | Recv | Reduce | Copy


class Round(NamedTuple):
    """One exchange: ``transfers`` that are under way together, and ``local`` actions, in order, once all are complete.

    Messages between two ranks match in the order in which both list them.
    """

    transfers: tuple[Send | Recv, ...] = ()
    local: tuple[Reduce | Copy, ...] = ()


class Outline(NamedTuple):
    """``repeats`` rounds of a long plan that differ in nothing but the chunk, as ``rounds``, one of some ranks each.

    ``turns`` is in how many of them the same rank takes part.
    """

    repeats: int
    rounds: dict[int, Round]
    turns: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What rank ``rank`` of ``world_size`` does for ``verb``. A space that the rank does not have is cut into 0 chunks.

    Raises PlanError if it names a rank or a chunk that does not exist.
    """

    verb: str
    rank: int
    world_size: int
    input_chunks: int
    output_chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        limits = {Space.INPUT: self.input_chunks, Space.OUTPUT: self.output_chunks, Space.SCRATCH: self.input_chunks}
        for action in self.actions():
            if isinstance(action, (Send, Recv)):
                if action.peer == self.rank or not 0 <= action.peer < self.world_size:
                    raise self._error(
                        action, f"expected a peer in 0..{self.world_size - 1} other than {self.rank} itself"
                    )
            elif isinstance(action, Reduce) and len(action.inputs) < min(2, self.world_size):
                raise self._error(action, f"expected two inputs or more, got {len(action.inputs)}")
            chunks = chunks_of(action)
            for chunk in chunks:
                if not 0 <= chunk.first < chunk.first + chunk.span <= limits[chunk.space]:
                    raise self._error(action, f"expected a chunk below {limits[chunk.space]}, got {chunk}")
                if chunk.span != chunks[0].span:
                    raise self._error(action, "expected pieces of one span")

    def actions(self) -> Iterator[Action]:
        """Yields the actions of all rounds in order."""
        for round_ in self.rounds:
            yield from round_.transfers
            yield from round_.local

    def lanes(self) -> dict[int, tuple[int, int]]:
        """Returns the scratch lanes in use, each with the range (first, one past the last) of chunks that it holds."""
        needed: dict[int, tuple[int, int]] = {}
        for action in self.actions():
            for space, first, lane, span in chunks_of(action):
                if space is Space.SCRATCH:
                    start, stop = needed.get(lane, (first, first))
                    needed[lane] = (min(start, first), max(stop, first + span))
        return needed

    def _error(self, action: Action, problem: str) -> PlanError:
        return PlanError(
            f"plan of {self.verb} for rank {self.rank} of {self.world_size}: {action}: {problem}; correct the plan"
        )


def chunks_of(action: Action) -> tuple[Chunk, ...]:
    """Returns the chunks that ``action`` touches."""
    if isinstance(action, Reduce):
        return (action.output, *action.inputs)
    if isinstance(action, Copy):
        return (action.output, action.input)
    return (action.chunk,)
