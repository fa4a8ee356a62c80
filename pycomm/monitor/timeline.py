"""The calls of all ranks on one clock: a trace for Perfetto (or chrome://tracing), and what stragglers are found from.

[Note: one clock]
Records have times of the host's monotonic clock, which is one clock for all ranks of a host. The clocks of two hosts
differ by when they were booted, so rank 0 asks one rank after another what time it is, a few times, and believes the
answer with the shortest round trip (Cristian, "Probabilistic clock synchronization", 1989): off by half of that at
most.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..collectives.context import resolve
from ..collectives.group import Group
from ..collectives.objects import gather_object
from ..collectives.p2p import recv, send
from .boards import Board
from .watch import own_board

__all__ = ["Span", "clock_offsets_ns", "collect", "spans_of", "write_trace"]

_QUESTIONS = 8
_TAG = 31_000


class Span(NamedTuple):
    """One finished call of one rank, on rank 0's clock. ``members`` is its group's number on the boards."""

    rank: int
    members: int
    group: str
    seq: int
    verb: str
    algorithm: str
    nbytes: int
    start_ns: int
    end_ns: int


def spans_of(board: Board, offset_ns: int = 0) -> list[Span]:
    """Returns the finished calls on a board; ``offset_ns`` is what its host's clock is ahead. ``rank`` is the job's."""
    groups = {group.index: group for group in board.groups()}
    found = []
    for record in board.records():
        group = groups.get(record.group)
        if group is not None and record.end_ns and not record.has_failed:
            times = record.start_ns - offset_ns, record.end_ns - offset_ns
            head = board.rank, group.members, group.name, record.seq, record.verb, record.algorithm, record.nbytes
            found.append(Span(*head, *times))
    return found


def clock_offsets_ns(group: Group) -> list[int]:
    """Returns by how much each rank's monotonic clock is ahead of rank 0's; [] on other ranks. Called by every rank.

    The ranks of a host share a clock, so one of each host is asked.
    """
    hosts = group.engine.selector.topology.hosts
    asked = [ranks[0] for ranks in hosts if 0 not in ranks]
    now = torch.zeros(1, dtype=torch.int64, device=group.control_device)
    if group.rank in asked:
        for _ in range(_QUESTIONS):
            recv(now, group=group, group_src=0, tag=_TAG)
            now[0] = time.monotonic_ns()
            send(now, group=group, group_dst=0, tag=_TAG)
    if group.rank != 0:
        return []
    offsets = [0] * group.world_size
    for ranks in hosts:
        if ranks[0] in asked:
            offset_ns = _ask(group, ranks[0], now)
            for rank in ranks:
                offsets[rank] = offset_ns
    return offsets


def _ask(group: Group, rank: int, now: torch.Tensor) -> int:
    answers = []
    for _ in range(_QUESTIONS):
        sent_ns = time.monotonic_ns()
        send(now, group=group, group_dst=rank, tag=_TAG)
        recv(now, group=group, group_src=rank, tag=_TAG)
        back_ns = time.monotonic_ns()
        answers.append((back_ns - sent_ns, int(now[0]) - (sent_ns + back_ns) // 2))
    return min(answers)[1]


def collect(group: Group | None = None) -> list[Span]:
    """Returns the calls of all ranks of ``group`` that are still on their boards, on rank 0; [] elsewhere.

    Called by every rank.
    """
    found = resolve(group)
    board = own_board()
    spans = [] if board is None else spans_of(board)
    offsets = clock_offsets_ns(found)
    gathered: list[Any] = [None] * found.world_size if found.rank == 0 else []
    gather_object(
        spans, gathered if found.rank == 0 else None, group=found, group_dst=0, dumps=_dumps, loads=json.loads
    )
    moved = []
    for offset_ns, rows in zip(offsets, gathered):
        for span in (Span(*row) for row in rows):
            moved.append(span._replace(start_ns=span.start_ns - offset_ns, end_ns=span.end_ns - offset_ns))
    return moved


def _dumps(spans: Any) -> bytes:
    return json.dumps(spans).encode()


def write_trace(path: str | os.PathLike[str], group: Group | None = None) -> int:
    """Writes the latest calls of all ranks as a Chrome trace; returns how many events it has, 0 on ranks but the first.

    One process a rank, one thread a group (each communication stream has a group of its own). Arrows go from the rank
    that came last to a collective to the others, which waited for it. Called by every rank; rank 0 writes.
    """
    spans = collect(group)
    if not spans:
        return 0
    events = trace_events(spans)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
    return len(events)


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the events of a Chrome trace: names of rows, a slice a call, and arrows between ranks."""
    threads = {members: number for number, members in enumerate(dict.fromkeys(span.members for span in spans))}
    start_ns = min(span.start_ns for span in spans)
    events: list[dict[str, Any]] = []
    for rank, members, name in sorted({(span.rank, span.members, span.group) for span in spans}):
        row = {"ph": "M", "pid": rank, "tid": threads[members]}
        events.append({**row, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({**row, "name": "thread_name", "args": {"name": f"group {name}"}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.verb,
                "cat": "collective",
                "pid": span.rank,
                "tid": threads[span.members],
                "ts": (span.start_ns - start_ns) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {"seq": span.seq, "bytes": span.nbytes, "algorithm": span.algorithm, "group": span.group},
            }
        )
    for number, calls in enumerate(matched(spans)):
        last = max(calls, key=lambda span: span.start_ns)
        flow = {"name": "came last", "cat": "wait", "id": number}
        for span in calls:
            is_last = span is last
            # An arrow hangs on the slice around its moment, so its end may not be the slice's own.
            moment_ns = span.start_ns if is_last else (max(span.start_ns, last.start_ns) + span.end_ns) // 2
            row = {"pid": span.rank, "tid": threads[span.members], "ts": (moment_ns - start_ns) / 1e3}
            events.append({**flow, **row, "ph": "s"} if is_last else {**flow, **row, "ph": "f", "bp": "e"})
    return events


def matched(spans: Iterable[Span]) -> list[list[Span]]:
    """Returns the calls of several ranks that are one collective, oldest first."""
    by_call: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        by_call[span.members, span.seq].append(span)
    found = [calls for calls in by_call.values() if len(calls) > 1]
    return sorted(found, key=lambda calls: min(span.start_ns for span in calls))
