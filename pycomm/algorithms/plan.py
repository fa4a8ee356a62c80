"""A collective of one rank as data: rounds of sends and receives over numbered chunks. No tensors, no I/O, no torch.

The input and the output of a collective are each cut into chunks; a plan says only how many. The executor cuts: evenly
(chunk i of n spans elements ``i * numel // n`` to ``(i + 1) * numel // n``), or by the splits of an all-to-all.
Scratch is temporary memory: lane k of scratch chunk i is as large as input chunk i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..errors import PlanError

__all__ = ["Action", "Chunk", "Copy", "Plan", "Recv", "Reduce", "Round", "Send", "Space"]


class Space(Enum):
    """The memory that a chunk lies in."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk ``index`` of a space; in scratch, ``lane`` tells apart several of the size of input chunk ``index``."""

    space: Space
    index: int
    lane: int = 0


class Send(NamedTuple):
    """Sends ``chunk`` to rank ``peer``."""

    peer: int
    chunk: Chunk


class Recv(NamedTuple):
    """Receives ``chunk`` from rank ``peer``."""

    peer: int
    chunk: Chunk


class Reduce(NamedTuple):
    """``output = inputs[0] op inputs[1] op ...``.

    Input r is the contribution of rank r: all ranks add in the same order.
    """

    output: Chunk
    inputs: tuple[Chunk, ...]


class Copy(NamedTuple):
    """``output = input``."""

    output: Chunk
    input: Chunk


Action = Send | Recv | Reduce | Copy


@dataclass(frozen=True)
class Round:
    """One exchange: ``transfers`` that are under way together, and ``local`` actions, in order, once all are complete.

    Messages between two ranks match in the order in which both list them.
    """

    transfers: tuple[Send | Recv, ...] = ()
    local: tuple[Reduce | Copy, ...] = ()


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
            if isinstance(action, (Send, Recv)) and (
                action.peer == self.rank or not 0 <= action.peer < self.world_size
            ):
                raise self._error(action, f"expected a peer in 0..{self.world_size - 1} other than {self.rank} itself")
            if isinstance(action, Reduce) and len(action.inputs) != self.world_size:
                raise self._error(action, f"expected one input a rank, got {len(action.inputs)}")
            for chunk in chunks_of(action):
                if not 0 <= chunk.index < limits[chunk.space]:
                    raise self._error(action, f"expected a chunk below {limits[chunk.space]}, got {chunk}")

    def actions(self) -> Iterator[Action]:
        """Yields the actions of all rounds in order."""
        for round_ in self.rounds:
            yield from round_.transfers
            yield from round_.local

    def lanes(self) -> dict[int, int]:
        """Returns how many scratch lanes each chunk index needs."""
        needed: dict[int, int] = {}
        for action in self.actions():
            for chunk in chunks_of(action):
                if chunk.space is Space.SCRATCH:
                    needed[chunk.index] = max(needed.get(chunk.index, 0), chunk.lane + 1)
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
