"""A job that dies as a whole leaves nothing: no process, no name, no socket; and the next one on the machine works."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from laws import RANKS, TRANSPORTS

import pycomm
from harness import check_sum, descriptors, proc_files, run_ranks

FOLDERS = ("/dev/shm", "/tmp")


def names() -> set[str]:
    """The names that a job could leave on this machine: files, and abstract sockets of ours."""
    files = {f"{folder}/{name}" for folder in FOLDERS if os.path.isdir(folder) for name in os.listdir(folder)}
    words = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    ours = {name for name in files if "pycomm" in name}  # other jobs may run on this machine
    return ours | {word for word in words if word.startswith("@pycomm-")}


def memories(pid: int | str) -> set[int]:
    """The inodes of pycomm's memory that a process holds by a descriptor."""
    found = set()
    for path, name in descriptors(pid):
        with contextlib.suppress(OSError):  # closed meanwhile
            if name.startswith("/memfd:pycomm "):
                found.add(os.stat(path).st_ino)
    return found


def holders(inode: int) -> set[int]:
    """The processes that hold the memory of a job: by a descriptor, or mapped."""
    mapped = f" {inode} /memfd:pycomm "  # a file on a disk may well have this number too
    every = proc_files("maps").items()
    return {pid for pid, maps in every if mapped in " ".join(maps.split()) or inode in memories(pid)}


def die_together(rank: int, path: str) -> None:
    check_sum(numel=100_003)
    shared = pycomm.empty(1000, shared=True)
    shared.fill_(rank)
    pids = torch.zeros(RANKS, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    if rank == 0:
        (inode,) = memories("self")
        assert holders(inode) == set(pids.tolist())
        Path(path).write_text(str(inode))
        time.sleep(0.02)  # as a rule the others wait in a collective by then; nothing depends on that
        for pid in reversed(pids.tolist()):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(pycomm.PeerLostError):  # of a rank that was killed before this one
        pycomm.barrier()
    time.sleep(1000)


def test_killed_ranks_leave_nothing_and_a_later_job_works(tmp_path: Path) -> None:
    """No process that holds their memory (so it is gone), no file, no socket. The harness waits for the ranks alone.

    ``benchmarks/faults.py all-killed`` does so a hundred times.
    """
    run_ranks(RANKS, check_sum_on, transport="shm")  # what the harness itself opens once is there
    before = names()
    for number in range(5):
        path = tmp_path / f"inode{number}"
        run_ranks(RANKS, die_together, str(path), transport="shm", casualties=range(RANKS))
        assert holders(int(path.read_text())) == set()
    deadline, left = time.monotonic() + 500.0, names() - before
    while left and time.monotonic() < deadline:  # those of other jobs on this machine go away, one after the other
        time.sleep(0.1)
        left &= names()
    assert left == set()
    run_ranks(RANKS, check_sum_on, transport="shm")


def check_sum_on(rank: int) -> None:
    check_sum(numel=1003)


def lose_one_group_after_another(rank: int) -> None:
    """Timeouts break group after group; what they held is given back."""
    group = pycomm.new_group(range(RANKS))
    group.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        group = pycomm.new_group(range(RANKS), timeout=0.05)
        if rank == 1:
            pycomm.recv(torch.empty(1), 0)  # which says that its time was over
        with pytest.raises(pycomm.CollectiveTimeoutError):
            pycomm.all_reduce(torch.ones(10), group=group)
        if rank == 0:
            pycomm.send(torch.ones(1), 1)
        group.close()
        pycomm.barrier()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    check_sum()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_broken_groups_give_back_what_they_held(transport: str) -> None:
    run_ranks(RANKS, lose_one_group_after_another, transport=transport)
