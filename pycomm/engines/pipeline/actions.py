"""A pipeline schedule as data: for every rank the list of what it does, in order.

F  forward of a microbatch through a stage
B  its whole backward pass                       = I and W
I  the part that gives the input's gradient      (the stage before waits for it)
W  the part that gives the weights' gradients    (nobody waits for it: it can fill a bubble)
RECV_F, SEND_F, RECV_B, SEND_B                   activations and their gradients, put in by ``lower``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["COMPUTE", "Action", "Kind", "Schedule", "loop_placement", "v_placement"]


class Kind(Enum):
    """What an action does."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    RECV_F = "rF"
    SEND_F = "sF"
    RECV_B = "rB"
    SEND_B = "sB"


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


class Action(NamedTuple):
    """One entry of a rank's row; ``str`` gives ``F0.3``: forward, stage 0, microbatch 3."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does: ``rows[rank]`` in order; ``placement[stage]`` is the rank that holds a stage."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that ``rank`` holds, in order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))


def loop_placement(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Returns the ranks of stages dealt round: 0 1 2 3 0 1 2 3."""
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Returns the ranks of two stages each, there and back: 0 1 2 3 3 2 1 0. The first rank computes the loss."""
    return (*range(ranks), *reversed(range(ranks)))


def make_schedule(name: str, placement: Sequence[int], microbatches: int, rows: Sequence[Sequence[Action]]) -> Schedule:
    """Returns the schedule with everything as tuples."""
    return Schedule(name, tuple(placement), microbatches, tuple(tuple(row) for row in rows))
