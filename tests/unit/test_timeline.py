"""All ranks on one clock: ranks that are threads, on hosts whose clocks are off by known times, some by hours."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import run_ranks
from pycomm.collectives.context import resolve
from pycomm.monitor import timeline
from pycomm.monitor.timeline import Span, clock_offsets_ns, collect, write_trace
from pycomm.topology import Topology

SECOND = 1_000_000_000
HOSTS = ("here", "here", "old", "new", "new")
AHEAD_NS = {"here": 0, "old": 5 * 3600 * SECOND, "new": -7200 * SECOND + 123_456_789}
CALLS = 6
CLOSE_NS = SECOND  # what an estimate may be off on a busy machine; the ranks of a call below are ten times that apart


class Clocks(threading.local):
    """What stands for ``time`` in the module: each thread, a rank, has the clock of its host."""

    ahead_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


def last_of(seq: int) -> int:
    return seq * 2 % len(HOSTS)


def true_span(rank: int, seq: int) -> Span:
    """A call as an exact clock saw it: its last rank comes ten seconds after the others, and all end together."""
    start_ns = (1000 + 60 * seq + 10 * (rank == last_of(seq))) * SECOND
    end_ns = (1000 + 60 * seq + 20) * SECOND
    return Span(rank, 99, "dp", seq, "all_reduce", "ring", 64, start_ns, end_ns)


def on_hosts(rank: int, clocks: Clocks, seen: Any, path: str) -> None:
    clocks.ahead_ns = AHEAD_NS[HOSTS[rank]]
    group = resolve(None)
    group.engine.selector.topology = Topology.of_hosts(HOSTS)
    found = clock_offsets_ns(group)
    assert len(found) == (len(HOSTS) if rank == 0 else 0)
    for host, offset_ns in zip(HOSTS, found):
        assert abs(offset_ns - AHEAD_NS[host]) < CLOSE_NS, (host, offset_ns)
    seen.ahead_ns, seen.rank = clocks.ahead_ns, rank
    spans = collect(group)
    assert len(spans) == (len(HOSTS) * CALLS if rank == 0 else 0)
    for span in spans:
        expected = true_span(span.rank, span.seq)
        assert abs(span.start_ns - expected.start_ns) < CLOSE_NS and abs(span.end_ns - expected.end_ns) < CLOSE_NS
    assert (write_trace(path, group) > 0) == (rank == 0)


def test_calls_of_hosts_with_other_clocks_are_put_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, seen, path = Clocks(), threading.local(), tmp_path / "trace.json"

    def spans_here(_board: Any) -> list[Span]:
        spans = [true_span(seen.rank, seq) for seq in range(CALLS)]
        ahead_ns = seen.ahead_ns
        return [each._replace(start_ns=each.start_ns + ahead_ns, end_ns=each.end_ns + ahead_ns) for each in spans]

    monkeypatch.setattr(timeline, "time", clocks)
    monkeypatch.setattr(timeline, "own_board", SimpleNamespace)
    monkeypatch.setattr(timeline, "spans_of", spans_here)
    run_ranks(len(HOSTS), on_hosts, clocks, seen, str(path), transport="local")
    events = json.loads(path.read_text())["traceEvents"]
    slices = {(event["pid"], event["args"]["seq"]): event for event in events if event["ph"] == "X"}
    for seq in range(CALLS):
        (start,) = [event for event in events if event["ph"] == "s" and event["id"] == seq]
        ends = [event for event in events if event["ph"] == "f" and event["id"] == seq]
        assert start["pid"] == last_of(seq)
        assert {event["pid"] for event in ends} == set(range(len(HOSTS))) - {last_of(seq)}
        for event in (start, *ends):  # an arrow hangs on the slice that holds its moment, and points to a later one
            held_by = slices[event["pid"], seq]
            assert held_by["tid"] == event["tid"] and held_by["ts"] <= event["ts"] < held_by["ts"] + held_by["dur"]
            assert (
                (event["ts"] > start["ts"] or event is start)
                and event["cat"] == start["cat"]
                and event["name"] == start["name"]
            )
