"""Shows the jobs of this user on this host as they run: calls a second, bandwidth, who waits for whom, who comes late.

It reads the boards of the ranks (docs/diagnosis.md), so a job needs no preparation and is not disturbed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING

from ..monitor.bandwidth import CollectiveStats, snapshot
from ..monitor.boards import Board, GroupOnBoard
from ..monitor.lateness import StragglerReport, stragglers_on
from ..sizes import format_bytes
from ._arguments import check_output, positive, positive_int
from ._interrupt import INTERRUPT
from ._jobs import Job, find_jobs, no_job, rank_cells, verdicts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["Rates", "frame", "main", "share_in_calls"]


class Rates:
    """What changed on a job's boards since the last look."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, key: tuple[object, ...], calls: int) -> tuple[float, int]:
        """Returns (calls a second, when that was in ns) since the last look; zero and now at the first."""
        now_ns = time.monotonic_ns()
        since_ns, before = self._seen.get(key, (now_ns, calls))
        self._seen[key] = now_ns, calls
        return (calls - before) * 1e9 / max(1, now_ns - since_ns), since_ns


def share_in_calls(board: Board, group: GroupOnBoard, since_ns: int) -> float:
    """Returns the share of the time since then, 0 to 1, that a rank was in calls of a group, those under way included.

    Where more calls were made than a board holds, it is the share of the time that the board tells of.
    """
    now_ns = time.monotonic_ns()
    records = board.records()
    if board.calls > len(records) > 0:
        since_ns = max(since_ns, records[0].start_ns)
    spans = [(each.start_ns, each.end_ns or now_ns) for each in records if each.group == group.index]
    inside_ns = sum(max(0, min(end_ns, now_ns) - max(start_ns, since_ns)) for start_ns, end_ns in spans)
    return min(1.0, inside_ns / max(1, now_ns - since_ns))


def frame(job: Job, rates: Rates) -> RenderableType:
    """Returns one picture of a job."""
    from rich.console import Group
    from rich.text import Text

    groups = job.groups()
    reports = {
        members: stragglers_on(job.boards, members, entries[0][1].world_size)
        for members, entries in groups.items()
        if len(entries) == entries[0][1].world_size
    }
    step_us = _step_us(job.boards[0])
    head = f"{job.command}\n{job.boards[0].world_size} ranks, {len(job.boards)} of them here"
    head += f"; a step takes {step_us / 1e3:.2f} ms" if step_us else ""
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        _ranks_table(job, reports, rates),
        _classes_table(job, rates),
    ]
    for members, entries in groups.items():
        report = reports.get(members)
        if report is not None and (report.slow_ranks or report.slow_transfers):
            parts.append(Text(f"group {entries[0][1].name}: {report}", style="yellow"))
    parts += [
        Text(f"group {name} has waited for {waited_s:.1f} s: {verdict.text}", style="red")
        for name, waited_s, verdict in verdicts(job)
    ]
    return Group(*parts)


def _step_us(board: Board) -> float:
    """Returns the usual time between two calls of the largest kind: a training step, where there is one a step."""
    records = board.records()
    if not records:
        return 0.0
    largest = max(record.nbytes for record in records)
    starts = [record.start_ns for record in records if record.nbytes == largest][-64:]
    gaps = [(after - before) / 1e3 for before, after in zip(starts, starts[1:])]
    return median(gaps) if gaps else 0.0


def _ranks_table(job: Job, reports: dict[int, StragglerReport], rates: Rates) -> Table:
    from ..monitor._tables import FittingTable

    table = FittingTable(dispensable=("last\nin", "pid", "calls/s", "process"), folded={"group": 12, "call": 17})
    for name in ("rank", "pid", "process", "group", "call", "for", "waits\nfor"):
        table.add_column(name)
    for name in ("calls/s", "in\ncalls", "late\nus", "last\nin"):
        table.add_column(name, justify="right")
    for board in job.boards:
        stats = snapshot(board)
        for group in [each for each in board.groups() if each.is_open]:
            mine = [entry for entry in stats if entry["group"] == group.name]
            key = job.number, board.rank, group.index
            calls_per_s, since_ns = rates.of(key, sum(e["calls"] for e in mine))
            share = share_in_calls(board, group, since_ns)
            late, last = _lateness(reports.get(group.members), board)
            cells, style = rank_cells(board, group)
            table.add_row(*cells, f"{calls_per_s:.0f}", f"{share:.0%}", late, last, style=style)
    return table


def _lateness(report: StragglerReport | None, board: Board) -> tuple[str, str]:
    for each in report.ranks if report else ():
        if each.rank == board.rank:
            return f"{each.median_us:.0f}", f"{each.last_share:.0%}"
    return "", ""


def _classes_table(job: Job, rates: Rates) -> Table:
    """Returns the calls of the first rank here, by class."""
    from ..monitor._tables import FittingTable

    board = job.boards[0]
    dispensable = ("transport", "algorithm", "p50\nus", "group")
    table = FittingTable(f"calls of rank {board.rank}", dispensable=dispensable)
    for name in ("collective", "group", "algorithm", "transport"):
        table.add_column(name)
    for name in ("up to", "calls/s", "p50\nus", "p99\nus", "GB/s\nnow", "busbw\nGB/s"):
        table.add_column(name, justify="right")
    for entry in snapshot(board):
        key = job.number, entry["group"], entry["transport"], entry["verb"], entry["algorithm"], entry["max_bytes"]
        calls_per_s, _ = rates.of(key, entry["calls"])
        table.add_row(*_class_cells(entry, calls_per_s))
    return table


def _class_cells(entry: CollectiveStats, calls_per_s: float) -> list[str]:
    from rich.markup import escape

    named = entry["verb"].removesuffix("_single"), entry["group"], entry["algorithm"], entry["transport"]
    names = [escape(each) for each in named]
    times = [f"{entry['p50_us']:.1f}", f"{entry['p99_us']:.1f}"]
    bandwidths = [f"{entry['recent_algbw_gbps']:.2f}", f"{entry['busbw_gbps']:.2f}"]
    return [*names, format_bytes(entry["max_bytes"]), f"{calls_per_s:.0f}", *times, *bandwidths]


def _look(rates: Rates, pid: int | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    jobs = find_jobs(pid)
    try:
        return Group(*(frame(job, rates) for job in jobs)) if jobs else Text(no_job(pid))
    finally:
        for job in jobs:
            job.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pycomm top", description=__doc__)
    every = "seconds between two looks (default: %(default)s)"
    parser.add_argument("--every", type=positive, default=1.0, metavar="S", help=every)
    parser.add_argument("--once", action="store_true", help="print one picture, of one interval, and end")
    parser.add_argument("--pid", type=positive_int, help="only the job that this process is a rank of")
    parser.add_argument("--svg", help="also draw that picture into this file; with --once")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the jobs until Ctrl-C, picture below picture where the output is no terminal; returns 0."""
    from rich.console import Console
    from rich.live import Live

    parser = _parser()
    options = parser.parse_args(None if argv is None else list(argv))
    if options.svg and not options.once:
        parser.error("--svg draws the picture of --once; give both")
    check_output("--svg", options.svg, (".svg",))
    is_terminal = sys.stdout.isatty()
    console = Console(record=options.svg is not None, width=None if is_terminal or "COLUMNS" in os.environ else 130)
    rates = Rates()
    picture = _look(rates, options.pid)
    if options.once:
        time.sleep(options.every)
        console.print(_look(rates, options.pid))
        if options.svg:
            console.save_svg(options.svg, title="pycomm top")
        return 0
    INTERRUPT.listen()
    try:
        with Live(picture, console=console, screen=True, auto_refresh=False) if is_terminal else nullcontext() as live:
            while True:
                time.sleep(options.every)
                picture = _look(rates, options.pid)
                INTERRUPT.raise_again()
                if live is None:
                    console.print(picture, "")
                    sys.stdout.flush()
                else:
                    live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return 0
