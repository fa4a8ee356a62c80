"""Run by both ranks of test_slow_link.py, one a host: what the monitor says as a rank, then the cable, becomes slow."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

import pycomm
from pycomm.launch.two_hosts import INTERFACE

CALLS = 48


def set_rate(rate: str) -> None:
    """Limits what this host sends."""
    queue = ["root", "tbf", "burst", "128kb", "latency", "50ms", "rate", rate]
    subprocess.run(["tc", "qdisc", "change", "dev", INTERFACE, *queue], check=True)
    pycomm.barrier()


def reduce_often(times: int, numel: int, late_s: float = 0.0) -> pycomm.monitor.StragglerReport | None:
    """All_reduces in a group of its own, to which rank 1 comes ``late_s`` late; returns rank 0's report."""
    group = pycomm.new_group([0, 1])
    for number in range(times):
        if pycomm.rank() == 1:
            time.sleep(late_s)
        if number == CALLS:
            set_rate("20mbit")
        pycomm.all_reduce(torch.ones(numel), group=group)
    return pycomm.monitor.stragglers(group)


def main() -> None:
    """Prints the reports and what was said of a call that took long."""
    pycomm.init(timeout=30)
    hangs: list[pycomm.monitor.Hang] = []
    pycomm.monitor.on_hang(hangs.append)
    late = reduce_often(CALLS, 1000, late_s=0.01)
    slowed = reduce_often(CALLS + 8, 1 << 17)
    tensor = torch.ones(1 << 21)
    pycomm.all_reduce(tensor)  # 8 MiB at 20 Mbit/s: 3.4 s
    pycomm.barrier()
    said = [] if late is None or slowed is None else [late.slow_ranks, slowed.slow_ranks, slowed.slow_transfers]
    print(json.dumps({"reports": said, "hangs": [hang.verdict.text for hang in hangs]}))
    pycomm.finalize()


if __name__ == "__main__":
    sys.exit(main())
