"""What recording costs: a small all_reduce on a group that writes the board, beside the same on one that does not.

Two groups of the same ranks, one recorded and one not, take turns within each round, so both see the same machine:

    pycomm run -n 2 benchmarks/monitor.py
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import pycomm
from pycomm.collectives.group import Group
from pycomm.sizes import format_bytes

SIZES = (4, 16, 64, 256, 1024, 4096)


def time_ns(group: Group, tensor: torch.Tensor, calls: int) -> float:
    """Returns the time of a call, the median over eight parts."""
    parts = []
    for _ in range(8):
        start = time.perf_counter_ns()
        for _ in range(calls // 8):
            pycomm.all_reduce(tensor, group=group)
        parts.append((time.perf_counter_ns() - start) / (calls // 8))
    return median(parts)


def main() -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=4000)
    options = parser.parse_args()
    world = pycomm.init("shm")
    groups = [pycomm.new_group(name=name) for name in ("on", "off")]
    assert all(isinstance(group, Group) for group in groups)
    groups[1].transport.record_on(None)
    table = Table(title=f"all_reduce on {world.world_size} ranks, us a call", title_justify="left")
    for column in ("bytes", "off", "on", "difference, ns", "on / off"):
        table.add_column(column, justify="right")
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        times: list[list[float]] = [[], []]
        for number in range(options.rounds):
            tensor.fill_(1.0)
            for index in (0, 1) if number % 2 else (1, 0):
                times[index].append(time_ns(groups[index], tensor, options.calls))
        on, off = (median(each) for each in times)
        extra = median(a - b for a, b in zip(*times))
        ratio = median(a / b for a, b in zip(*times))
        table.add_row(format_bytes(nbytes), f"{off / 1e3:.3f}", f"{on / 1e3:.3f}", f"{extra:.0f}", f"{ratio:.3f}")
    if world.rank == 0:
        Console().print(table)
    pycomm.finalize()


if __name__ == "__main__":
    main()
