"""What is measured: a verb on buffers of one size, the values that go in, and the exact result that must come out.

Values are small integers, so that every sum is exact in every element type and order, and ``#wrong`` needs no
tolerance. Element i of rank r's input is ``template_r[i % PERIOD]``. PERIOD is a prime, so a block that lands in the
wrong place shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PERIOD", "VERBS", "Case", "Verb", "count_wrong", "expected_blocks", "fill", "template"]

PERIOD = 1021
SETS_BYTES = 128 << 20
MAX_SETS = 16

Values = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A collective as nccl-tests sees it. ``whole`` buffers hold ``numel`` elements, others ``numel // world_size``.

    ``places`` lists in place and out of place where the verb has both, the usual one first.
    """

    input_is_whole: bool = True
    output_is_whole: bool = True
    places: tuple[str, ...] = ("in", "out")
    reduces: bool = False
    has_async: bool = True  # a form that returns a handle
    is_partial: bool = False  # some buffer holds a part for each rank, so that numel must be a multiple of world_size


VERBS: dict[str, Verb] = {
    "all_reduce": Verb(reduces=True),
    "all_gather": Verb(input_is_whole=False, places=("out", "in"), is_partial=True),
    "reduce_scatter": Verb(output_is_whole=False, places=("out", "in"), reduces=True, is_partial=True),
    "broadcast": Verb(places=("in",)),
    "reduce": Verb(places=("in",), reduces=True),
    "all_to_all": Verb(places=("out",), is_partial=True),
    "gather": Verb(input_is_whole=False, places=("out",), is_partial=True),
    "scatter": Verb(output_is_whole=False, places=("out",), is_partial=True),
    "sendrecv": Verb(places=("out",), has_async=False),
    "send": Verb(places=("out",), has_async=False),  # from the root to the next rank, the next root
    "barrier": Verb(places=("in",)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One figure to take. ``numel`` counts the elements of the larger of input and output (nccl-tests' size)."""

    verb: str
    numel: int
    dtype: str
    itemsize: int
    op: str
    place: str  # "in": the result overwrites the input; "out": it does not
    buffers: str  # "private": back to back; "shared": in the shared segment, input freshly written before each call
    is_async: bool = False  # started, and then waited for

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of input and output."""
        return self.numel * self.itemsize

    @property
    def is_fresh(self) -> bool:
        """Whether the input is written anew before each call."""
        return self.buffers == "shared"

    @property
    def num_sets(self) -> int:
        """Buffer sets used in turn: enough that large messages never find their data in a cache."""
        return int(min(MAX_SETS, max(2, SETS_BYTES // max(1, self.nbytes))))


_REDUCTIONS: dict[str, Callable[[Values], Values]] = {
    "SUM": lambda stack: stack.sum(axis=0),
    "PRODUCT": lambda stack: stack.prod(axis=0),
    "MIN": lambda stack: stack.min(axis=0),
    "MAX": lambda stack: stack.max(axis=0),
    "AVG": lambda stack: stack.sum(axis=0) / len(stack),
}
OPS = tuple(_REDUCTIONS)


def template(op: str, rank: int, world_size: int) -> Values:
    """Returns the PERIOD input values of ``rank``, ``(PERIOD,)``: small integers whose reduction is exact."""
    index = np.arange(PERIOD)
    if op == "PRODUCT":  # one rank at most has a 2, so that the product of many ranks stays small
        return np.where(index * index % PERIOD % (world_size + 1) == rank, 2.0, 1.0)
    scale = world_size if op == "AVG" else 1  # a mean of multiples of world_size is an integer
    levels = max(2, min(8, 128 // (world_size * scale)))
    # Quadratic residues: no shift of the cycle, and no other rank's, looks the same.
    return scale * (index * (index + rank + 1) % PERIOD % levels).astype(np.float64)


def expected_blocks(case: Case, rank: int, world_size: int, root: int) -> list[Values] | None:
    """Returns the values that ``rank`` must end with, one ``(PERIOD,)`` cycle for each equal block of its output.

    None means that this rank gets no result (it is not the root).
    """
    own = [template(case.op, r, world_size) for r in range(world_size)]
    part = case.numel // world_size
    reduced = _REDUCTIONS[case.op](np.stack(own)) if VERBS[case.verb].reduces else own[rank]
    match case.verb:
        case "all_reduce":
            return [reduced]
        case "reduce":
            return [reduced] if rank == root else None
        case "reduce_scatter":
            return [np.roll(reduced, -rank * part)]
        case "broadcast":
            return [own[root]]
        case "all_gather":
            return own
        case "gather":
            return own if rank == root else None
        case "scatter":
            return [np.roll(own[root], -rank * part)]
        case "all_to_all":
            return [np.roll(values, -rank * part) for values in own]
        case "sendrecv":
            return [own[(rank - 1) % world_size]]
        case "send":
            return [own[root]] if rank == (root + 1) % world_size else None
        case _:
            return None


def fill(bits: Bits, cycle: Bits) -> None:
    """Writes ``cycle (PERIOD,)`` over ``bits (numel,)`` again and again."""
    whole = len(bits) // PERIOD * PERIOD
    bits[:whole].reshape(-1, PERIOD)[:] = cycle
    bits[whole:] = cycle[: len(bits) - whole]


def count_wrong(bits: Bits, cycles: list[Bits]) -> int:
    """Counts the elements of ``bits (numel,)``, equal blocks of which should repeat the given cycles, that differ."""
    wrong = 0
    for block, cycle in zip(bits.reshape(len(cycles), -1), cycles, strict=True):
        whole = len(block) // PERIOD * PERIOD
        wrong += int(np.count_nonzero(block[:whole].reshape(-1, PERIOD) != cycle))
        wrong += int(np.count_nonzero(block[whole:] != cycle[: len(block) - whole]))
    return wrong
