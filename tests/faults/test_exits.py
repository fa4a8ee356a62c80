"""The interpreter ends while calls are under way: in time, with the program's own status, and never by a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from laws import TRANSPORTS

# Status of ranks 0 and 1. A rank that ends while its own thread is inside a call is as good as dead to the others.
WAYS = {
    "dropped": (0, 0),
    "kept": (0, 0),
    "exit": (3, 3),
    "raise": (0, 1),
    "alone": (0, 0),
    "messages": (0, 0),
    "thread": (0, 0),
}
STUCK = {"stuck": (0, 0)}
JOB = Path(__file__).with_name("exits.py")


def run(transport: str, folder: Path, ways: dict[str, tuple[int, int]], within_s: float) -> None:
    done = subprocess.run(
        [sys.executable, str(JOB), transport, str(folder), *ways], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    ended = {
        (how, int(rank)): (int(status), float(s)) for how, rank, status, s in map(str.split, done.stdout.splitlines())
    }
    for how, statuses in ways.items():
        for rank, status in enumerate(statuses):
            assert ended[how, rank][0] == status, (how, rank, done.stdout, done.stderr)
            assert ended[how, rank][1] < within_s, (how, rank, done.stdout)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_end_well_whatever_is_under_way(transport: str, tmp_path: Path) -> None:
    run(transport, tmp_path, WAYS, within_s=9.0)  # less than a second where nothing else runs


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_a_peer_never_makes_is_broken_off(transport: str, tmp_path: Path) -> None:
    run(transport, tmp_path, STUCK, within_s=30.0)
