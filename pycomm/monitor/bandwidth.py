"""How many collectives of which size a group ran, and how fast: an observer to attach with ``group.add_hook``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, TypedDict

from rich.table import Table

if TYPE_CHECKING:
    from ..collectives.group import CollectiveRecord

__all__ = ["BandwidthMonitor", "CollectiveStats", "busbw_factor"]

KEPT_CALLS = 1024  # of each class, for the median: the latest ones

_PARTIAL_VERBS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}


def busbw_factor(verb: str, world_size: int) -> float:
    """Returns busbw / algbw: the share of the bytes that must pass each rank's link, as nccl-tests defines it."""
    base = verb.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
    if base == "all_reduce":
        return 2 * (world_size - 1) / world_size
    return (world_size - 1) / world_size if base in _PARTIAL_VERBS else 1.0


class CollectiveStats(TypedDict):
    """One line of the table. Times are in us, bandwidths in GB/s; ``median_us`` is over the latest calls."""

    verb: str
    transport: str
    max_bytes: int
    calls: int
    bytes: int
    total_us: float
    median_us: float
    algbw_gbps: float
    busbw_gbps: float


@dataclass(slots=True)
class _Tally:
    calls: int = 0
    nbytes: int = 0
    total_ns: int = 0
    latest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))


class BandwidthMonitor:
    """Counts calls, bytes and time of each verb, transport and size class (a power of four, in bytes).

    An instance is a hook: ``group.add_hook(monitor)``. It costs well under 1 us a call and keeps bounded memory. Not
    thread-safe beyond what a group promises (one call at a time).
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._tallies: dict[tuple[str, str, int], _Tally] = {}

    def __call__(self, record: CollectiveRecord) -> None:
        """Takes note of one finished collective."""
        # Class k holds messages of up to 4**k bytes: two bits of length are a factor of four.
        size_class = ((record.nbytes - 1).bit_length() + 1) // 2 if record.nbytes else -1
        key = (record.verb, record.transport, size_class)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        elapsed_ns = record.end_ns - record.start_ns
        tally.calls += 1
        tally.nbytes += record.nbytes
        tally.total_ns += elapsed_ns
        tally.latest_ns.append(elapsed_ns)

    def snapshot(self) -> list[CollectiveStats]:
        """Returns one entry for each class seen so far, ordered by verb, transport and size."""
        entries = []
        for (verb, transport, size_class), tally in sorted(self._tallies.items()):
            algbw = tally.nbytes / tally.total_ns if tally.total_ns else 0.0
            entries.append(
                CollectiveStats(
                    verb=verb,
                    transport=transport,
                    max_bytes=0 if size_class < 0 else 4**size_class,
                    calls=tally.calls,
                    bytes=tally.nbytes,
                    total_us=tally.total_ns / 1000,
                    median_us=median(tally.latest_ns) / 1000,
                    algbw_gbps=algbw,
                    busbw_gbps=algbw * busbw_factor(verb, self.world_size),
                )
            )
        return entries

    def table(self, title: str = "collectives of this rank") -> Table:
        """Returns the snapshot as a rich table, to print with ``rich.print``."""
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("collective", no_wrap=True)
        table.add_column("transport", no_wrap=True)
        for name in ("up to", "calls", "MB", "total\nms", "median\nus", "algbw\nGB/s", "busbw\nGB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for entry in self.snapshot():
            table.add_row(
                entry["verb"].removesuffix("_single"),
                entry["transport"],
                _size(entry["max_bytes"]),
                str(entry["calls"]),
                f"{entry['bytes'] / 1e6:.{0 if entry['bytes'] >= 1e8 else 1}f}",
                f"{entry['total_us'] / 1000:.2f}",
                f"{entry['median_us']:.1f}",
                f"{entry['algbw_gbps']:.2f}",
                f"{entry['busbw_gbps']:.2f}",
            )
        return table

    def reset(self) -> None:
        """Forgets everything counted so far."""
        self._tallies.clear()


def _size(nbytes: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"
