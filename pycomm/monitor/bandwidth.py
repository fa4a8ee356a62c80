"""What the calls of this process cost so far: counts, bytes, times and bandwidths, read from its board.

Recording is a part of the call (``csrc/shm/board.h``); everything here happens when somebody asks.

[Note: classes and quantiles]
Calls are counted by group, verb, algorithm and size class (a power of four, in bytes); groups of one name, as where one
is closed and made again, count together. A class keeps sums, averages in
which the last call counts 1/16, and a histogram of the times with eight buckets to the octave. A quantile is the middle
of the bucket that it falls in: at most 6.7 % off, in constant memory, however many calls there were. The sliding window
is what the board still holds: the last 4,096 calls of the process, at most ``WINDOW_S`` old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np

from ..sizes import format_bytes
from ..transport._wording import CALLS
from .boards import Board, CallRecord, GroupOnBoard
from .watch import before_stop, own_board

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["WINDOW_S", "CollectiveStats", "busbw_factor", "snapshot", "table", "table_at_exit"]

WINDOW_S = 10.0
_EMPTY_CLASS = 255
_PARTIAL_VERBS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}


def busbw_factor(verb: str, world_size: int) -> float:
    """Returns busbw / algbw: the share of the bytes that must pass each rank's link, as nccl-tests defines it."""
    base = verb.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
    if base == "all_reduce":
        return 2 * (world_size - 1) / world_size
    return (world_size - 1) / world_size if base in _PARTIAL_VERBS else 1.0


class CollectiveStats(TypedDict):
    """One class of calls on this rank. Times are in us, bandwidths in GB/s.

    ``bytes`` are logical: the buffers' (nccl-tests' size), summed. ``wire_bytes`` are what this rank's link had to
    carry at least, less where the calls were compressed. The ``recent`` figures weight the last call by 1/16, the one
    before it by 15/16 of that, and so on; those of the ``window`` are of the last ``WINDOW_S`` seconds, None without a
    call.
    """

    group: str
    verb: str
    algorithm: str
    transport: str
    max_bytes: int
    calls: int
    bytes: int
    wire_bytes: int
    total_us: float
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    most_us: float
    algbw_gbps: float
    busbw_gbps: float
    recent_algbw_gbps: float
    window_calls: int
    window_algbw_gbps: float | None


def snapshot(board: Board | None = None) -> list[CollectiveStats]:
    """Returns one entry for each class of calls so far, ordered by group, verb and size.

    ``board`` is this process's own unless another one's is given. Empty while nothing is recorded.
    """
    board = own_board() if board is None else board
    if board is None:
        return []
    scale = board.ns_per_tick
    windows = _windows(board.records())
    groups = {group.index: group for group in board.groups()}
    found: dict[tuple[str, str, str, str, int], tuple[Any, GroupOnBoard, _Window]] = {}
    for row in board.classes():
        key = int(row["key"])
        index, algorithm, code, size_class = key >> 32 & 0x7FFFFFFF, key >> 16 & 0xFF, key >> 8 & 0xFF, key & 0xFF
        group, verb, name = groups[index], CALLS[code], board.algorithm(algorithm)
        window = windows.get((index, verb, name, size_class), _Window())
        if not row["wire_bytes"]:
            row = row.copy()
            row["wire_bytes"] = round(int(row["bytes"]) * busbw_factor(verb, group.world_size))
        kind = group.name, group.transport, verb, name, size_class
        if kind in found:
            before, _, its_window = found[kind]
            row, window = _together(before, row), _Window(*map(sum, zip(its_window, window)))
        found[kind] = row, group, window
    entries = [
        _entry(row, scale, group, verb, name, size_class, window)
        for (_, _, verb, name, size_class), (row, group, window) in found.items()
    ]
    return sorted(entries, key=lambda each: (each["group"], each["verb"], each["max_bytes"], each["algorithm"]))


def _together(one: Any, other: Any) -> Any:
    """Returns the class of the calls of two."""
    both = one.copy()
    for field in set(both.dtype.names) - {"key", "most_ticks"}:
        both[field] = one[field] + other[field]
    both["most_ticks"] = max(one["most_ticks"], other["most_ticks"])
    return both


def _entry(
    row: Any, scale: float, group: GroupOnBoard, verb: str, algorithm: str, size_class: int, window: _Window
) -> CollectiveStats:
    calls, nbytes, total_ns = int(row["calls"]), int(row["bytes"]), float(row["ticks"]) * scale
    recent_ns = float(row["recent_ticks"]) * scale
    p50, p90, p99 = (each * scale / 1e3 for each in _quantiles(row["buckets"], (0.5, 0.9, 0.99)))
    algbw = nbytes / total_ns if total_ns else 0.0
    factor = busbw_factor(verb, group.world_size)
    return CollectiveStats(
        group=group.name,
        verb=verb,
        algorithm=algorithm,
        transport=group.transport,
        max_bytes=0 if size_class == _EMPTY_CLASS else 4**size_class,
        calls=calls,
        bytes=nbytes,
        wire_bytes=int(row["wire_bytes"]),
        total_us=total_ns / 1e3,
        mean_us=total_ns / 1e3 / calls,
        p50_us=p50,
        p90_us=p90,
        p99_us=p99,
        most_us=float(row["most_ticks"]) * scale / 1e3,
        algbw_gbps=algbw,
        busbw_gbps=algbw * factor,
        recent_algbw_gbps=float(row["recent_bytes"]) / recent_ns if recent_ns else 0.0,
        window_calls=window.calls,
        window_algbw_gbps=window.nbytes / window.elapsed_ns if window.elapsed_ns else None,
    )


class _Window(NamedTuple):
    calls: int = 0
    nbytes: int = 0
    elapsed_ns: int = 0


def _windows(records: Iterable[CallRecord]) -> dict[tuple[int, str, str, int], _Window]:
    """Returns (calls, bytes, ns) of the calls that ended in the last seconds, by class."""
    since_ns = time.monotonic_ns() - round(WINDOW_S * 1e9)
    sums: dict[tuple[int, str, str, int], _Window] = {}
    for record in records:
        if record.end_ns > since_ns and not record.has_failed:
            # Class k holds messages of up to 4**k bytes: two bits of length are a factor of four.
            size_class = ((record.nbytes - 1).bit_length() + 1) // 2 if record.nbytes else _EMPTY_CLASS
            key = record.group, record.verb, record.algorithm, size_class
            calls, nbytes, elapsed_ns = sums.get(key, _Window())
            sums[key] = _Window(calls + 1, nbytes + record.nbytes, elapsed_ns + record.end_ns - record.start_ns)
    return sums


def _quantiles(buckets: np.ndarray[Any, Any], shares: Sequence[float]) -> list[float]:
    """Returns the quantiles of a histogram as ``bucket_of`` in board.h makes it, in ticks."""
    reached = np.cumsum(buckets)
    return [_middle(int(np.searchsorted(reached, share * reached[-1]))) for share in shares]


def _middle(bucket: int) -> float:
    if bucket < 8:
        return float(bucket)
    octave = bucket // 8 + 2
    width = 2.0 ** (octave - 3)
    return float(2.0**octave + bucket % 8 * width + width / 2)


def _figure(value: float, decimals: int) -> str:
    """Returns ``value`` in six characters or less, up to 999,999: decimals go first."""
    return f"{value:.{decimals if value < 100 else 0}f}"


def _microseconds(value: float) -> str:
    """Returns a time in us in six characters or less, from a second on in seconds: a table has 80 columns."""
    return _figure(value, 1) if value < 999_999 else f"{_figure(value / 1e6, 1)} s"


_Column: TypeAlias = tuple[str, Callable[[CollectiveStats], str]]

_VERB: _Column = ("collective", lambda each: each["verb"].removesuffix("_single"))
_KINDS: tuple[_Column, ...] = (
    ("group", lambda each: each["group"]),
    ("algorithm", lambda each: each["algorithm"]),
    ("transport", lambda each: each["transport"]),
)
_FIGURES: tuple[_Column, ...] = (
    ("up to", lambda each: format_bytes(each["max_bytes"])),
    ("calls", lambda each: str(each["calls"])),
    ("MB", lambda each: _figure(each["bytes"] / 1e6, 1)),
    ("total\nms", lambda each: _figure(each["total_us"] / 1000, 2)),
    ("p50\nus", lambda each: _microseconds(each["p50_us"])),
    ("p90\nus", lambda each: _microseconds(each["p90_us"])),
    ("p99\nus", lambda each: _microseconds(each["p99_us"])),
    ("algbw\nGB/s", lambda each: f"{each['algbw_gbps']:.2f}"),
    ("busbw\nGB/s", lambda each: f"{each['busbw_gbps']:.2f}"),
)
_DISPENSABLE = ("transport", "MB", "p90\nus", "total\nms", "algbw\nGB/s", "algorithm", "group")


def table(title: str = "collectives of this rank", board: Board | None = None) -> Table:
    """Returns the snapshot as a rich table, to print with ``rich.print``.

    What is the same in all rows (the group, the algorithm, the transport) stands in the title, so that the rows of most
    jobs fit a terminal of 80 columns. In a narrower one some columns are left out; figures are never cut.
    """
    from rich.markup import escape

    from ._tables import FittingTable

    entries = snapshot(board)
    common = [(name, cell) for name, cell in _KINDS if len({cell(each) for each in entries}) == 1]
    said = "".join(f", {name} {cell(entries[0])}" for name, cell in common)
    columns = [_VERB, *(kind for kind in _KINDS if kind not in common)]
    made = FittingTable(escape(title + said), dispensable=_DISPENSABLE)
    for name, _ in columns:
        made.add_column(name)
    for name, _ in _FIGURES:
        made.add_column(name, justify="right")
    for entry in entries:
        made.add_row(*(escape(cell(entry)) for _, cell in (*columns, *_FIGURES)))
    return made


def table_at_exit(rank: int | None = 0) -> None:
    """Prints the table when the default group closes, on one rank (None: on all of them)."""

    def print_it() -> None:
        from rich.console import Console

        board = own_board()
        if board is not None and rank in (None, board.rank):
            Console().print(table(f"collectives of rank {board.rank} (of {board.world_size})"))

    before_stop(print_it)
