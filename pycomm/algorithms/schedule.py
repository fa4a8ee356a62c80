"""A plan made concrete for one size: which elements each action touches, segment by segment. No tensors, no torch.

[Note: segments]
Large data is cut into segments, and each segment runs the whole plan by itself: an *instance* of the plan, which
touches other elements than all the others. So several may be under way at once, and while one sends, another adds.
Where every rank has the whole data (all_reduce, reduce, broadcast), a segment is a piece of it, cut into the plan's
chunks. Where the data are parts of ranks, a segment is a piece of every chunk, and a message of several chunks becomes
several. All ranks cut alike: equal sizes by equal rules.

Instances take turns (see executor.py). An instance uses the tag of its turn, so that its messages meet those of the
same instance on the other rank whatever the others do meanwhile. The next instance of a turn begins when the last has
ended here, and messages of one pair and tag arrive in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .plan import Chunk, Copy, Plan, Recv, Reduce, Space

__all__ = ["Cut", "Local", "Schedule", "Step", "Transfer", "compile_plan", "cut_evenly", "largest_chunk"]

_ALIGN = 64  # elements: whatever the type, a lane begins on a cache line

Bounds = tuple[int, int]  # first element, one past the last


class Cut(NamedTuple):
    """How a tensor is cut: into ``chunks``, and these, or the whole if ``is_whole``, into segments."""

    chunks: tuple[Bounds, ...]
    segments: int = 1
    is_whole: bool = True

    def of(self, segment: int) -> Sequence[Bounds]:
        """Returns the bounds of each chunk in ``segment``."""
        if self.segments == 1 or not self.chunks:
            return self.chunks
        if not self.is_whole:
            return [(start + first, start + last) for start, first, last in self._pieces(segment)]
        numel, count = self.chunks[-1][1], len(self.chunks)
        base, stop = numel * segment // self.segments, numel * (segment + 1) // self.segments
        return [(base + a, base + b) for a, b in cut_evenly(stop - base, count)]

    def _pieces(self, segment: int) -> Iterator[tuple[int, int, int]]:
        for start, stop in self.chunks:
            numel = stop - start
            yield start, numel * segment // self.segments, numel * (segment + 1) // self.segments

    @property
    def largest(self) -> int:
        """Upper bound of the elements of a chunk in any segment."""
        return max((-(-(stop - start) // self.segments) for start, stop in self.chunks), default=0) + 1


def cut_evenly(numel: int, chunks: int) -> tuple[Bounds, ...]:
    """Returns the bounds of each of ``chunks`` chunks of ``numel`` elements, as plan.py has it."""
    return tuple((index * numel // chunks, (index + 1) * numel // chunks) for index in range(chunks))


def largest_chunk(plan: Plan, input_numel: int, output_numel: int) -> int:
    """Returns the elements of the largest evenly cut chunk: equal on all ranks, whichever of the two they have."""
    pairs = (input_numel, plan.input_chunks), (output_numel, plan.output_chunks)
    return max((-(-numel // chunks) for numel, chunks in pairs if chunks), default=0)


class Transfer(NamedTuple):
    """A message of place number ``place`` to or from ``peer``."""

    is_receive: bool
    peer: int
    place: int


class Local(NamedTuple):
    """Place ``output`` = places ``inputs`` reduced, or copied if there is one."""

    output: int
    inputs: tuple[int, ...]


class Step(NamedTuple):
    """What this rank has to do in round ``number``; rounds in which it has nothing to do are no steps."""

    number: int
    transfers: tuple[Transfer, ...]
    local: tuple[Local, ...]


class Schedule(NamedTuple):
    """What every instance of a plan does; actions name pieces of memory by their number in ``places``.

    ``lanes`` are, for each lane of scratch, its first chunk and its first element; ``scratch_numel`` is what one
    instance needs. ``scaled`` pairs a place of the input with the scratch that holds it, scaled, for PREMUL_SUM.
    """

    input: Cut
    output: Cut
    places: tuple[Chunk, ...]
    steps: tuple[Step, ...]
    rounds: int
    lanes: dict[int, tuple[int, int]]
    scratch_numel: int
    scaled: tuple[tuple[int, int], ...]

    @property
    def segments(self) -> int:
        """The number of instances."""
        return self.input.segments

    def bounds(self, segment: int) -> list[tuple[Space, int, int]]:
        """Returns space, first and one past the last element of each place in ``segment``."""
        cuts = {Space.INPUT: self.input.of(segment), Space.OUTPUT: self.output.of(segment)}
        found = []
        for space, index, lane, span in self.places:
            bounds = cuts[Space.INPUT if space is Space.SCRATCH else space]
            start, stop = bounds[index][0], bounds[index + span - 1][1]
            if space is Space.SCRATCH:
                first, offset = self.lanes[lane]
                shift = offset + self._in_lane(first, index, bounds) - start
                start, stop = start + shift, stop + shift
            found.append((space, start, stop))
        return found

    def _in_lane(self, first: int, index: int, bounds: Sequence[Bounds]) -> int:
        if self.input.is_whole or self.segments == 1:  # neighbours touch
            return bounds[index][0] - bounds[first][0]
        return (index - first) * self.input.largest


def compile_plan(plan: Plan, input: Cut, output: Cut, is_scaled: bool = False) -> Schedule:
    """Returns the schedule of ``plan`` for tensors cut so. ``is_scaled``: the plan reads scaled copies of the input."""
    compiler = _Compiler(plan, input, output, is_scaled)
    steps = []
    for number, round_ in enumerate(plan.rounds):
        transfers = [
            Transfer(isinstance(each, Recv), each.peer, compiler.place(chunk))
            for each in round_.transfers
            for chunk in compiler.pieces(each.chunk)
        ]
        local = [each for action in round_.local for each in compiler.local(action)]
        if transfers or local:
            steps.append(Step(number, tuple(transfers), tuple(local)))
    return compiler.finish(tuple(steps), len(plan.rounds))


class _Compiler:
    """Gives every piece of memory that a plan names a number."""

    def __init__(self, plan: Plan, input: Cut, output: Cut, is_scaled: bool) -> None:
        self._input = input
        self._output = output
        self._is_split = input.segments > 1 and not input.is_whole
        self._numbers: dict[Chunk, int] = {}
        ranges = plan.lanes()
        self._scaling_lane = max(ranges, default=-1) + 1 if is_scaled else -1
        if is_scaled:
            ranges[self._scaling_lane] = (0, plan.input_chunks)
        self._lanes: dict[int, tuple[int, int]] = {}
        self._scratch_numel = 0
        for lane, (first, stop) in ranges.items():
            self._lanes[lane] = first, self._scratch_numel
            self._scratch_numel += -(-(stop - first) * input.largest // _ALIGN) * _ALIGN

    def pieces(self, chunk: Chunk) -> list[Chunk]:
        """Returns the pieces that ``chunk`` is in every segment: one, or each of its chunks by itself."""
        if not self._is_split or chunk.span == 1:
            return [chunk]
        return [chunk._replace(first=chunk.first + offset, span=1) for offset in range(chunk.span)]

    def place(self, piece: Chunk) -> int:
        """Returns the number of a piece; one of the input may stand for its scaled copy."""
        if piece.space is Space.INPUT and self._scaling_lane >= 0:
            piece = piece._replace(space=Space.SCRATCH, lane=self._scaling_lane)
        return self._number(piece)

    def local(self, action: Reduce | Copy) -> Iterator[Local]:
        """Yields the action on numbers, once for each piece."""
        inputs = action.inputs if isinstance(action, Reduce) else (action.input,)
        for output, *pieces in zip(self.pieces(action.output), *map(self.pieces, inputs), strict=True):
            yield Local(self.place(output), tuple(self.place(piece) for piece in pieces))

    def finish(self, steps: tuple[Step, ...], rounds: int) -> Schedule:
        """Returns what has been compiled."""
        scaled = []
        if self._scaling_lane >= 0:
            for index in range(len(self._input.chunks)):
                source = Chunk(Space.INPUT, index)
                copy = Chunk(Space.SCRATCH, index, self._scaling_lane)
                scaled.append((self._number(source), self._number(copy)))
        places, lanes = tuple(self._numbers), self._lanes
        return Schedule(self._input, self._output, places, steps, rounds, lanes, self._scratch_numel, tuple(scaled))

    def _number(self, piece: Chunk) -> int:
        return self._numbers.setdefault(piece, len(self._numbers))
