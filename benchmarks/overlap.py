"""Communication beside computation: a step whose halves take equally long alone, and an urgent message behind a large
one.

Two ranks on two cores, each on a host of its own; the hosts are namespaces of this machine, joined by a cable of a
chosen rate (pycomm/launch/two_hosts.py). The computation is tuned to take as long as the communication. As root:

    python benchmarks/overlap.py

On one host, over shared memory, what an item of a stream takes beside a main thread that waits, that runs Python and
so keeps its lock, or that multiplies matrices (no bar: the two ranks have the two cores for both):

    pycomm run -n 2 benchmarks/overlap.py --items

Bars of the first: an overlapped step takes at most 1.25 times the longer half; an urgent 4 KiB all_reduce that is
submitted behind one of 64 MiB returns within 15 % of that one's time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import pycomm
from pycomm.errors import PycommError
from pycomm.launch.two_hosts import INTERFACE, TwoHosts
from pycomm.overlap import OverlapReport
from pycomm.sizes import format_bytes, parse_bytes

STEP_BAR, URGENT_BAR = 1.25, 0.15
URGENT_BYTES, LARGE_BYTES = 4096, 64 << 20
MATRIX = 192


def timed_s(act: Callable[[], object]) -> float:
    """Returns how long ``act`` takes, from a barrier on."""
    pycomm.barrier()
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


class Step:
    """A backward pass in small: ``buckets`` pieces of computation, each followed by a gradient to reduce."""

    def __init__(self, buckets: int, nbytes: int) -> None:
        self.stream = pycomm.CommStream("gradients")
        self.gradients = [torch.ones(nbytes // buckets // 4) for _ in range(buckets)]
        self._a = torch.randn(MATRIX, MATRIX)
        self.repeats = 1

    def compute_one(self) -> None:
        """One piece of computation."""
        for _ in range(self.repeats):
            self._a @ self._a

    def compute(self) -> None:
        """The computation alone."""
        for _ in self.gradients:
            self.compute_one()

    def communicate(self) -> None:
        """The communication alone."""
        works = [self.stream.all_reduce(gradient) for gradient in self.gradients]
        for work in works:
            work.wait()

    def overlapped(self) -> None:
        """Both: a gradient leaves as soon as it is there, and the optimizer's step waits for all of them."""
        works = []
        for gradient in self.gradients:
            self.compute_one()
            works.append(self.stream.all_reduce(gradient))
        for work in works:
            work.wait()

    def tune(self, target_s: float) -> None:
        """Makes the computation take ``target_s``: first about, then, from a whole step of it, as it is."""
        self.repeats = 20
        for _ in range(2):
            once_s = median(timed_s(self.compute) for _ in range(3)) / self.repeats
            wanted = torch.tensor([target_s / once_s], dtype=torch.float64)
            pycomm.all_reduce(wanted, pycomm.ReduceOp.AVG)
            self.repeats = max(1, round(wanted.item()))


def measure_step(options: argparse.Namespace, table: Table) -> bool:
    """Adds the rows of the step; says whether its bar is met."""
    step = Step(options.buckets, options.bytes)
    step.communicate()
    comm_s = median(timed_s(step.communicate) for _ in range(options.rounds))
    agreed = torch.tensor([comm_s], dtype=torch.float64)
    pycomm.all_reduce(agreed, pycomm.ReduceOp.AVG)
    step.tune(agreed.item())
    rows: dict[str, list[float]] = {"computation alone": [], "communication alone": [], "overlapped": []}
    reports: list[OverlapReport] = []
    for _ in range(options.rounds):
        rows["computation alone"].append(timed_s(step.compute))
        rows["communication alone"].append(timed_s(step.communicate))
        step.stream.step()
        rows["overlapped"].append(timed_s(step.overlapped))
        reports.append(step.stream.step())
    longer_s = max(median(rows["computation alone"]), median(rows["communication alone"]))
    for name, values in rows.items():
        note = "tuned to the communication" if name == "computation alone" else ""
        table.add_row(f"step: {name}", f"{median(values) * 1e3:.1f}", f"{median(values) / longer_s:.2f}", note)
    ratio = median(rows["overlapped"]) / longer_s
    middle = sorted(reports, key=lambda report: report.exposed_s)[len(reports) // 2]
    table.add_row("  hidden", f"{middle.hidden_s * 1e3:.1f}", f"{middle.hidden_share:.0%}", "")
    table.add_row("  exposed", f"{middle.exposed_s * 1e3:.1f}", f"{1 - middle.hidden_share:.0%}", "")
    table.add_row("overlapped / longer half", "", f"{ratio:.2f}", _verdict(ratio, STEP_BAR))
    step.stream.close()
    return ratio <= STEP_BAR


def measure_urgent(options: argparse.Namespace, table: Table) -> bool:
    """Adds the rows of the urgent message; says whether its bar is met."""
    large, urgent = torch.ones(LARGE_BYTES // 4), torch.ones(URGENT_BYTES // 4)
    ratios, times = [], []
    with pycomm.CommStream("urgent") as stream:
        stream.all_reduce(large).wait()
        for _ in range(options.rounds):
            pycomm.barrier()
            start_s = time.perf_counter()
            long_work = stream.all_reduce(large)
            time.sleep(0.02)  # the large one is on its way
            asked_s = time.perf_counter()
            stream.all_reduce(urgent, priority=1).wait()
            urgent_s = time.perf_counter() - asked_s
            long_work.wait()
            large_s = time.perf_counter() - start_s
            ratios.append(urgent_s / large_s)
            times.append((urgent_s, large_s))
    urgent_s, large_s = (median(each) for each in zip(*times))
    table.add_row(f"all_reduce of {format_bytes(LARGE_BYTES)}", f"{large_s * 1e3:.1f}", "", "")
    table.add_row(f"urgent {format_bytes(URGENT_BYTES)} behind it", f"{urgent_s * 1e3:.1f}", "", "")
    table.add_row("urgent / large", "", f"{median(ratios):.3f}", _verdict(median(ratios), URGENT_BAR))
    return median(ratios) <= URGENT_BAR


ITEM_BYTES = (4096, 1 << 20, 25 << 20)


class Beside:
    """What the main thread does until ``work`` is complete."""

    def __init__(self) -> None:
        self._a = torch.randn(MATRIX, MATRIX)

    def wait(self, work: pycomm.Work) -> None:
        """It waits."""
        work.wait()

    def python(self, work: pycomm.Work) -> None:
        """Short steps of Python."""
        while not work.is_completed():
            sum(number * number for number in range(100))

    def matmul(self, work: pycomm.Work) -> None:
        """Calls that let Python's lock go, and keep the core."""
        while not work.is_completed():
            self._a @ self._a


def measure_items(options: argparse.Namespace, table: Table) -> bool:
    """Adds the rows of items of some sizes beside each kind of computation."""
    beside = Beside()
    with pycomm.CommStream("items") as stream:
        for nbytes in ITEM_BYTES:
            tensor = torch.ones(nbytes // 4)
            stream.all_reduce(tensor).wait()
            alone_s = 0.0
            for act in (beside.wait, beside.python, beside.matmul):
                rounds = options.rounds * (10 if nbytes < ITEM_BYTES[-1] else 2)
                taken_s = median(timed_s(lambda: act(stream.all_reduce(tensor))) for _ in range(rounds))  # noqa: B023
                alone_s = alone_s or taken_s
                name = f"{format_bytes(nbytes)} beside {act.__name__}"
                table.add_row(name, f"{taken_s * 1e3:.2f}", f"{taken_s / alone_s:.1f}", "")
    return True


def _verdict(value: float, bar: float) -> str:
    return f"{'met' if value <= bar else 'MISSED'} (bar {bar})"


def run_rank(options: argparse.Namespace) -> int:
    """The body of one rank; returns 1 if a bar was missed."""
    torch.set_num_threads(1)
    group = pycomm.init(timeout=60)
    where = "one host" if options.items else f"{options.rate}/s"
    table = Table(title=f"2 ranks, {where}, transport {group.transport.name}; ms", title_justify="left")
    for name in ("what", "ms", "ratio", ""):
        table.add_column(name, justify="left" if name in ("what", "") else "right")
    measures = (measure_items,) if options.items else (measure_step, measure_urgent)
    are_met = [measure(options, table) for measure in measures]
    if group.rank == 0:
        Console(width=100).print(table)
    pycomm.finalize()
    return 0 if all(are_met) else 1


def main() -> int:
    """Starts two hosts, and on each of them this file as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the cable (default: %(default)s)")
    parser.add_argument("--bytes", type=parse_bytes, default="16MiB", help="of a step's gradients (%(default)s)")
    parser.add_argument("--buckets", type=int, default=16, help="that they come in (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="figures are medians over rounds (default: %(default)s)")
    parser.add_argument("--items", action="store_true", help="as a rank on one host: items beside a computation")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank or options.items:
        return run_rank(options)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
    with TwoHosts(options.rate) as hosts:
        return hosts.run_job(command, (1, 1), {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE})


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PycommError as error:
        raise SystemExit(f"overlap: {error}") from None
