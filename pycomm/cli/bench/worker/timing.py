"""The clocks. A rank's loop does nothing but the prepared calls, so the harness costs about 20 ns a call.

Back to back: calls in chunks, one clock reading after each chunk. Sampled: a reading on either side of every call
(about 40 ns each), for percentiles and for inputs that are written anew between the calls. CLOCK_MONOTONIC is one clock
for all processes of a host, so that the conductor can tell when the last rank entered a call and when the last left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from time import monotonic_ns
from typing import Any

__all__ = ["back_to_back", "sampled"]

Function = Callable[..., Any]
Arguments = Sequence[tuple[Any, ...]]


def _loop0(function: Function, arguments: Iterator[Any], calls: int) -> None:
    for _ in range(calls):
        function()


def _loop1(function: Function, arguments: Iterator[Any], calls: int) -> None:
    for a in islice(arguments, calls):
        function(a)


def _loop2(function: Function, arguments: Iterator[Any], calls: int) -> None:
    for a, b in islice(arguments, calls):
        function(a, b)


def _loop3(function: Function, arguments: Iterator[Any], calls: int) -> None:
    for a, b, c in islice(arguments, calls):
        function(a, b, c)


def _loop_any(function: Function, arguments: Iterator[Any], calls: int) -> None:
    for args in islice(arguments, calls):
        function(*args)  # up to 30 ns a call dearer than the spelled-out forms


_LOOPS = (_loop0, _loop1, _loop2, _loop3)


def back_to_back(function: Function, arguments: Arguments, num_chunks: int, chunk_calls: int) -> list[int]:
    """Makes ``num_chunks`` times ``chunk_calls`` calls, taking the argument tuples in turn.

    Returns the time at the start and after each chunk, in ns, ``(num_chunks + 1,)``.
    """
    arity = len(arguments[0])
    loop = _LOOPS[arity] if arity < len(_LOOPS) else _loop_any
    turns = cycle([args[0] for args in arguments] if arity == 1 else arguments)
    marks = [0] * (num_chunks + 1)
    marks[0] = monotonic_ns()
    for chunk in range(num_chunks):
        loop(function, turns, chunk_calls)
        marks[chunk + 1] = monotonic_ns()
    return marks


def sampled(
    function: Function, arguments: Arguments, calls: int, before_each: Sequence[Function] | None = None
) -> tuple[list[int], list[int]]:
    """Makes ``calls`` calls, each after its ``before_each`` (not timed); returns when each began and ended, in ns."""
    starts, ends = [0] * calls, [0] * calls
    for index in range(calls):
        chosen = index % len(arguments)
        if before_each is not None:
            before_each[chosen]()
        args = arguments[chosen]
        starts[index] = monotonic_ns()
        function(*args)
        ends[index] = monotonic_ns()
    return starts, ends
