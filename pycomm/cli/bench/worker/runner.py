"""One rank's side of the measurement: buffers of a case, the check of its result, and the timed loops."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .cases import VERBS, Bits, Case, count_wrong, expected_blocks, fill, template
from .library import Buffer, Library, UnsupportedCaseError
from .timing import back_to_back, sampled

__all__ = ["Runner"]

MAX_WARM_CALLS = 200


@dataclass(frozen=True)
class _Set:
    """Buffers of one call: its root, the arguments, and the cycles of values that its output must hold afterwards."""

    input: Buffer
    output: Buffer
    root: int
    arguments: tuple[Any, ...]
    expected: list[Bits] | None


class Runner:
    """Answers the commands ``prepare``, ``run`` and ``release`` in one rank; every rank gets the same ones."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._sets: list[_Set] = []
        self._function: Callable[..., Any]
        self._arguments: list[tuple[Any, ...]] = []
        self._writers: list[Callable[[], None]] = []

    def prepare(self, case: Case) -> dict[str, Any]:
        """Allocates the buffers of ``case`` and binds its calls; the answer may say why it is ``unsupported``."""
        self.release()
        self._case = case
        try:
            self._input_cycle = self.library.encode(
                template(case.op, self.library.rank, self.library.world_size), case.dtype
            )
            self._sets = [self._make_set(index) for index in range(case.num_sets)]
        except UnsupportedCaseError as error:
            self.release()
            return {"unsupported": str(error)}
        self._arguments = [s.arguments for s in self._sets]
        # Fresh inputs come from a buffer of their own, as a gradient comes from the backward pass.
        source = np.empty_like(self._sets[0].input.bits)
        fill(source, self._input_cycle)
        self._writers = [partial(np.copyto, s.input.bits, source) for s in self._sets]
        return {}

    def run(self, num_chunks: int, chunk_calls: int, samples: int, round_index: int) -> dict[str, Any]:
        """Checks one call, then times ``num_chunks`` of ``chunk_calls`` back to back, and ``samples`` calls one by one.

        Answers the clock's ``marks`` of the chunks, ``starts`` and ``ends`` of the samples, the number of elements that
        were ``wrong``, and the core-to-core ``line_ns``. Samples have freshly written inputs if the case asks for it.
        """
        wrong = self._verify(self._sets[round_index % len(self._sets)])
        is_fresh = self._case.is_fresh
        warm_calls = max(1, min((num_chunks * chunk_calls + samples) // 20, MAX_WARM_CALLS))
        marks: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        back_to_back(self._function, self._arguments, 1, warm_calls)
        gc.disable()
        if num_chunks:
            self.library.barrier()
            marks = back_to_back(self._function, self._arguments, num_chunks, chunk_calls)
        if samples:
            self.library.barrier()
            starts, ends = sampled(self._function, self._arguments, samples, self._writers if is_fresh else None)
        self.library.barrier()
        gc.enable()
        if samples and (is_fresh or self._case.place == "out"):  # in place, results have been reduced again and again
            wrong += self._count_wrong(self._sets[(samples - 1) % len(self._sets)])
        return {"marks": marks, "starts": starts, "ends": ends, "wrong": wrong, "line_ns": self.library.line_ns()}

    def release(self) -> dict[str, Any]:
        """Gives the buffers back."""
        if self._sets:
            self._sets, self._arguments, self._writers = [], [], []
            gc.collect()
        return {}

    def _make_set(self, index: int) -> _Set:
        case, library = self._case, self.library
        verb = VERBS[case.verb]
        # A fixed root would run ahead of the others, and the loop would measure something else than the collective.
        root = index % library.world_size
        part = case.numel // library.world_size
        is_shared = case.buffers == "shared"
        if case.place == "in":
            whole = library.buffer(case.numel, case.dtype, is_shared)
            input = whole if verb.input_is_whole else whole.part(library.rank, library.world_size)
            output = whole if verb.output_is_whole else whole.part(library.rank, library.world_size)
        else:
            input = library.buffer(case.numel if verb.input_is_whole else part, case.dtype, is_shared)
            output = library.buffer(case.numel if verb.output_is_whole else part, case.dtype, is_shared)
        output.bits.fill(0)
        fill(input.bits, self._input_cycle)
        self._function, arguments = library.bind(case, output, input, root)
        blocks = expected_blocks(case, library.rank, library.world_size, root)
        expected = None if blocks is None else [library.encode(block, case.dtype) for block in blocks]
        return _Set(input, output, root, arguments, expected)

    def _verify(self, chosen: _Set) -> int:
        """Makes one call on known data and counts the elements of its output that are not exactly right."""
        chosen.output.bits.fill(-1)
        fill(chosen.input.bits, self._input_cycle)
        self.library.barrier()
        self._function(*chosen.arguments)
        return self._count_wrong(chosen)

    def _count_wrong(self, chosen: _Set) -> int:
        if chosen.expected is None or not len(chosen.output.bits):
            return 0
        return count_wrong(chosen.output.bits, chosen.expected)
