"""Messages over shared memory that go from one process's memory to another's, or may not."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

import pytest
import torch

import pycomm
from harness import run_ranks


def forbid(system_call: int) -> None:
    """Has the kernel refuse a system call to this process from now on, with EPERM, as containers do."""
    load_number, if_equal, end = 0x20, 0x15, 0x06  # of BPF
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    steps = [(load_number, 0, 0, 0), (if_equal, 0, 1, system_call), (end, 0, 0, refuse), (end, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    set_no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(set_no_new_privileges, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    assert libc.prctl(set_seccomp, by_filter, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


PROCESS_VM_READV, PROCESS_VM_WRITEV = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]


def move_directly(rank: int, ranks: int, forbidden: int | None) -> None:
    if rank == 1 and forbidden is not None:
        forbid(forbidden)
    for numel in (10_000, 20_000, 100_000, 300_000):
        for root in range(ranks):
            data = torch.full((numel,), float(rank))
            pycomm.broadcast(data, root)
            assert data.eq(root).all()
            parts = [torch.full((numel,), float(r)) for r in range(ranks)]
            gathered = [torch.empty(numel) for _ in range(ranks)]
            pycomm.gather(parts[rank], gathered if rank == root else None, root)
            assert rank != root or all(torch.equal(each, part) for each, part in zip(gathered, parts, strict=True))
            pycomm.scatter(data, parts if rank == root else None, root)
            assert torch.equal(data, parts[rank])
        whole = torch.empty(ranks * numel)
        pycomm.all_gather_into_tensor(whole, parts[rank])
        assert torch.equal(whole, torch.cat(parts))
        pycomm.all_to_all_single(whole, torch.full((ranks * numel,), float(rank)))
        assert torch.equal(whole, torch.cat(parts))
        for peer in range(ranks):
            works = [pycomm.irecv(data, peer), pycomm.isend(parts[rank], peer)]
            for work in works:
                work.wait()
            assert torch.equal(data, parts[peer])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "forbidden", [None, PROCESS_VM_READV, PROCESS_VM_WRITEV], ids=["allowed", "may not read", "may not write"]
)
def test_messages_go_from_memory_to_memory_or_where_that_is_forbidden_through_shared_memory(
    ranks: int, forbidden: int | None
) -> None:
    run_ranks(ranks, move_directly, ranks, forbidden)
