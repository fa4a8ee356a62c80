"""The bandwidth monitor: classes, sums, medians, and its cost."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from pycomm.collectives.group import CollectiveRecord
from pycomm.monitor.bandwidth import KEPT_CALLS, BandwidthMonitor


def record(
    verb: str = "all_reduce", nbytes: int = 1024, elapsed_us: float = 1.0, transport: str = "shm"
) -> CollectiveRecord:
    return CollectiveRecord(
        verb=verb,
        group_name="world",
        transport=transport,
        algorithm="native",
        dtype="float32",
        op="SUM",
        numel=nbytes // 4,
        nbytes=nbytes,
        seq=1,
        start_ns=0,
        end_ns=round(elapsed_us * 1000),
    )


def test_calls_are_summed_by_verb_transport_and_size_class() -> None:
    monitor = BandwidthMonitor(world_size=4)
    for elapsed_us in (1.0, 2.0, 9.0):
        monitor(record(elapsed_us=elapsed_us))
    monitor(record(verb="broadcast"))
    monitor(record(transport="mpi"))
    monitor(record(nbytes=1025))
    entries = monitor.snapshot()
    assert [(e["verb"], e["transport"], e["max_bytes"], e["calls"]) for e in entries] == [
        ("all_reduce", "mpi", 1024, 1),
        ("all_reduce", "shm", 1024, 3),
        ("all_reduce", "shm", 4096, 1),
        ("broadcast", "shm", 1024, 1),
    ]
    entry = entries[1]
    assert entry["bytes"] == 3072 and entry["total_us"] == 12.0 and entry["median_us"] == 2.0
    assert entry["algbw_gbps"] == pytest.approx(3072 / 12000)
    assert entry["busbw_gbps"] == pytest.approx(3072 / 12000 * 1.5)


@pytest.mark.parametrize(
    ("nbytes", "max_bytes"), [(0, 0), (1, 1), (4, 4), (5, 16), (16, 16), (17, 64), (64 << 20, 4**13)]
)
def test_size_classes_end_at_powers_of_four(nbytes: int, max_bytes: int) -> None:
    monitor = BandwidthMonitor(world_size=2)
    monitor(record(nbytes=nbytes))
    assert monitor.snapshot()[0]["max_bytes"] == max_bytes


def test_memory_is_bounded_and_the_median_is_of_the_latest_calls() -> None:
    monitor = BandwidthMonitor(world_size=2)
    for _ in range(KEPT_CALLS):
        monitor(record(elapsed_us=100.0))
    for _ in range(KEPT_CALLS):
        monitor(record(elapsed_us=1.0))
    entry = monitor.snapshot()[0]
    assert entry["calls"] == 2 * KEPT_CALLS and entry["median_us"] == 1.0


def test_the_table_shows_what_was_seen() -> None:
    monitor = BandwidthMonitor(world_size=2)
    monitor(record(verb="all_gather_single", nbytes=1 << 20, elapsed_us=100.0))
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(monitor.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    row = next(line for line in text.splitlines() if "all_gather" in line).split()
    assert row == ["all_gather", "shm", "1", "MiB", "1", "1.0", "0.10", "100.0", "10.49", "5.24"]
    monitor.reset()
    assert monitor.snapshot() == []


def test_a_call_costs_little() -> None:
    monitor, one = BandwidthMonitor(world_size=2), record()
    best_ns = min(_time_ns(monitor, one) for _ in range(20))
    assert best_ns < 5_000, "an observer may be left on"


def _time_ns(monitor: BandwidthMonitor, one: CollectiveRecord) -> float:
    start = time.perf_counter_ns()
    for _ in range(100):
        monitor(one)
    return (time.perf_counter_ns() - start) / 100
