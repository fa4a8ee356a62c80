"""The interpreter ends while calls are under way: in time, with the program's own status, and never by a signal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from laws import MPI, TRANSPORTS

from mpi_harness import mpirun
from warm_python import warm_python

# What a pair of ranks does (exits.py) and the statuses with which they end.
WAYS = {"dropped": (0, 0), "exit": (3, 3), "raise": (0, 1), "alone": (0, 0), "thread": (0, 0), "stream": (0, 0)}
STUCK = ("stuck", "stuck on a stream")
JOB = Path(__file__).with_name("exits.py")


def run(transport: str, folder: Path, ways: dict[str, tuple[int, int]]) -> None:
    done = subprocess.run(
        [warm_python(), str(JOB), transport, str(folder), *ways], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    lines = (line.rsplit(maxsplit=3) for line in done.stdout.splitlines())
    ended = {(how, int(rank)): int(status) for how, rank, status, _ in lines}
    expected = {(how, rank): status for how, statuses in ways.items() for rank, status in enumerate(statuses)}
    assert ended == expected, f"{done.stdout}\n{done.stderr}"  # exits.py kills what hangs


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_end_well_whatever_is_under_way(transport: str, tmp_path: Path) -> None:
    run(transport, tmp_path, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_a_peer_never_makes_is_broken_off(transport: str, tmp_path: Path) -> None:
    run(transport, tmp_path, dict.fromkeys(STUCK, (0, 0)))
    assert all((tmp_path / f"{how}: broken off").exists() for how in STUCK)


@pytest.mark.slow
@pytest.mark.parametrize("transport", MPI)
def test_a_call_that_a_peer_never_makes_is_broken_off_under_mpirun(transport: str, tmp_path: Path) -> None:
    command = [str(mpirun()), "-n", "2", warm_python(), str(JOB), transport, str(tmp_path), STUCK[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / f"{STUCK[0]}: broken off").exists()
