"""A job is closed to strangers: hostile messages, another user. And it gives back what it takes."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import pycomm
from harness import run_ranks
from pycomm.transport import Patience
from pycomm.transport._gloo_sockets import tcp_sockets
from pycomm.transport._handoff import share_memory

MESSAGES = 10_000
NOBODY = 65534


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meeting:
    """Rank 0 of two waits in a thread for the other one; its socket is open meanwhile."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.result: Any = None
        self.thread = threading.Thread(target=self._lead)
        self.thread.start()
        name, _, token = self.store.get("host/socket").decode().partition(":")
        self.name, self.token = bytes.fromhex(name), bytes.fromhex(token)

    def _lead(self) -> None:
        self.result = share_memory(self.store, "host", 0, 2, Patience(600.0))

    def finish(self) -> None:
        """Rank 1 comes, and both hold the same memory."""
        joined = share_memory(self.store, "host", 1, 2, Patience(600.0))
        self.thread.join(600.0)
        assert not self.thread.is_alive()
        assert os.fstat(joined.fd).st_ino == os.fstat(self.result.fd).st_ino
        assert self.result.pids == joined.pids == (os.getpid(), os.getpid())
        for fd in (joined.fd, self.result.fd, *joined.pidfds, *self.result.pidfds):
            if fd >= 0:
                assert not os.get_inheritable(fd)
                os.close(fd)


def hostile(dice: random.Random, token: bytes) -> bytes:
    """Random, truncated, oversized, replayed or forged."""
    good = token + dice.randbytes(8 + 128)
    kind = dice.randrange(5)
    if kind == 0:
        return dice.randbytes(dice.randrange(1, 400))
    if kind == 1:
        return good[: dice.randrange(1, len(good))]
    if kind == 2:
        return dice.randbytes(32) + good * dice.randrange(1, 40)
    if kind == 3:
        return good  # the token, without the descriptor of a process
    return dice.randbytes(32) + good[32:]


def test_hostile_messages_do_not_keep_a_rank_from_joining() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    meeting = Meeting()
    open_fds = len(os.listdir("/proc/self/fd"))
    before = resident_bytes()
    silent: list[socket.socket] = []
    for i in range(MESSAGES):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(meeting.name)
        try:
            stranger.sendall(hostile(dice, meeting.token))
        except (BrokenPipeError, ConnectionResetError):
            pass
        if i % 500 == 0:
            silent.append(stranger)
        else:
            stranger.close()
    for _ in range(20):  # and some that never say a word
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(meeting.name)
        silent.append(stranger)
    assert resident_bytes() - before <= 8 << 20
    meeting.finish()  # a first rank that waited for one of the silent 40 would do so until its patience ends, and raise
    for stranger in silent:
        stranger.close()
    assert len(os.listdir("/proc/self/fd")) <= open_fds


def as_nobody(body: Any) -> int:
    """Runs ``body`` in a process of another user and returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_join_or_disturb() -> None:
    meeting = Meeting()
    leader = os.getpid()
    memory = [fd for fd in os.listdir("/proc/self/fd") if "pycomm" in os.path.realpath(f"/proc/self/fd/{fd}")]
    assert memory

    def attack() -> int:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(600.0)
        stranger.connect(meeting.name)
        try:  # with the right token, and a descriptor of a process
            socket.send_fds(stranger, [meeting.token + bytes(135) + b"\1"], [os.pidfd_open(os.getpid())])
            answer = stranger.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        try:
            os.open(f"/proc/{leader}/fd/{memory[0]}", os.O_RDWR)
        except PermissionError:
            return 1 if answer else 0
        return 2

    assert as_nobody(attack) == 0
    meeting.finish()


def knock(rank: int) -> None:
    """Strangers at gloo's sockets, each rank's, once the ranks are connected: none is let in."""
    ports = []
    for listener in tcp_sockets().listening:
        with socket.socket(fileno=os.dup(listener.fd)) as each:
            ports.append(each.getsockname()[1])
    assert ports
    descriptors = len(os.listdir("/proc/self/fd"))
    pycomm.barrier()
    strangers = [socket.socket() for _ in range(100)]
    for number, stranger in enumerate(strangers):
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect(("127.0.0.1", ports[number % len(ports)]))
    assert select.select([], strangers, [], 0.5)[1] == []
    for stranger in strangers:
        stranger.close()
    t = torch.ones(100_000)
    pycomm.all_reduce(t)
    assert (t == 2).all()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_gloo_lets_nobody_in_once_the_ranks_are_connected() -> None:
    run_ranks(2, knock, transport="torch")


def make_groups(rank: int) -> tuple[int, int, int, int]:
    def round_(times: int) -> None:
        for _ in range(times):
            group = pycomm.new_group([0, 1])
            pycomm.all_reduce(torch.ones(3), group=group)
            group.close()

    round_(200)
    fds, resident = len(os.listdir("/proc/self/fd")), resident_bytes()
    round_(10_000)
    return fds, len(os.listdir("/proc/self/fd")), resident, resident_bytes()


def test_descriptors_and_memory_are_flat_over_10000_groups() -> None:
    for fds, fds_after, resident, resident_after in run_ranks(2, make_groups):
        assert fds_after == fds
        assert resident_after - resident <= 8 << 20
