"""Run by both ranks of test_slow_link.py, one a host: what the monitor says as a rank, then the cable, becomes slow.

On a machine that other work shares the monitor may see another cause, or be late; so it is given a few turns to say it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import pycomm
from pycomm.launch.two_hosts import INTERFACE
from pycomm.monitor import StragglerReport as Report

CALLS = 48
TURNS = 30  # at most, until what was made so is said: a busy machine makes other ranks late too, now and then


def set_rate(rate: str) -> None:
    """Limits what this host sends."""
    queue = ["root", "tbf", "burst", "128kb", "latency", "50ms", "rate", rate]
    subprocess.run(["tc", "qdisc", "change", "dev", INTERFACE, *queue], check=True)
    pycomm.barrier()


def reduce_often(times: int, numel: int, late_s: float = 0.0) -> Report | None:
    """All_reduces in a group of its own, to which rank 1 comes ``late_s`` late; returns rank 0's report."""
    set_rate("1gbit")
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
    pycomm.init(timeout=600)
    late = say_it(lambda: reduce_often(CALLS, 1000, late_s=0.01), lambda report: report.slow_ranks == (1,))
    slowed = say_it(
        lambda: reduce_often(CALLS + 8, 1 << 17), lambda report: report.slow_transfers and not report.slow_ranks
    )
    hangs: list[pycomm.monitor.Hang] = []
    ends = [pycomm.monitor.on_hang(raises), pycomm.monitor.on_hang(hangs.append)]
    tensor = torch.ones(1 << 21)
    for _ in range(TURNS):
        pycomm.all_reduce(tensor)  # 8 MiB at 20 Mbit/s: 3.4 s
        if all_say(any(" MB/s" in hang.verdict.text for hang in hangs)):
            break
    for end in [*ends, *ends]:  # the second time it has no effect
        end()
    said = [] if late is None or slowed is None else [late.slow_ranks, slowed.slow_ranks, slowed.slow_transfers]
    print(json.dumps({"reports": said, "hangs": [hang.verdict.text for hang in hangs]}))
    pycomm.finalize()


def raises(_hang: pycomm.monitor.Hang) -> None:
    """Keeps no other from being called."""
    raise ValueError("on purpose")


def say_it(turn: Callable[[], Report | None], says: Callable[[Report], object]) -> Report | None:
    """Returns the report of the first turn that says it, or of the last."""
    for _ in range(TURNS):
        report = turn()
        if all_say(report is None or bool(says(report))):  # ranks but the first have none
            break
    return report


def all_say(is_said: bool) -> bool:
    """Whether ``is_said`` is true on every rank."""
    flag = torch.tensor([float(is_said)])
    pycomm.all_reduce(flag, pycomm.ReduceOp.MIN)
    return bool(flag.item())


if __name__ == "__main__":
    sys.exit(main())
