"""Swaps of frames over gloo (pycomm/transport/_torch_exchange.py), also by way of hosts (_host_frames.py), and waits in
torch that can be left.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from harness import run_ranks
from pycomm.collectives.context import resolve
from pycomm.ops import native
from pycomm.transport import _torch_exchange
from pycomm.transport._gloo_sockets import Corked, GlooSocket
from pycomm.transport._torch_waits import wait_for_a_slice
from pycomm.transport.base import FRAME_HEADER_BYTES
from pycomm.transport.torch import TorchTransport

ROUNDS = 60
ROOM = 5000
SHORT_ROOM = 960  # of a frame that a host's ranks gather whole
SLICE_S = 5e-3
LONG = timedelta(seconds=300)


def own_transport() -> Any:
    return resolve(None).transport


def pattern(rank: int, number: int, nbytes: int) -> torch.Tensor:
    return ((torch.arange(nbytes) + 31 * rank + 7 * number) % 251).to(torch.uint8)


def swap_often(rank: int, is_callers: bool, can_leave: bool) -> None:
    """Frames of other lengths on each rank, which come early, late, and later than a slice of waiting."""
    transport = own_transport()
    if is_callers:
        transport = TorchTransport(transport.group, None, 300.0)
    if not can_leave:
        _torch_exchange.gloo_message_of = lambda work: None
    exchange = transport._post_exchange(range(transport.world_size), ROOM)
    lengths, delays = random.Random(1), random.Random(rank)
    for number in range(ROUNDS):
        sent = [lengths.choice([1, 64, 300, ROOM]) for _ in range(transport.world_size)]
        if delays.random() < 0.2:
            time.sleep(delays.choice([1e-3, SLICE_S, 4 * SLICE_S]))
        frame = torch.zeros(ROOM, dtype=torch.uint8)
        frame[: sent[rank]] = pattern(rank, number, sent[rank])
        for member, row in enumerate(exchange.swap_part(frame, sent[rank], "all_reduce", None)):
            assert torch.equal(row[: sent[member]], pattern(member, number, sent[member])), (number, member)
    assert exchange.can_leave is can_leave
    whole = exchange(pattern(rank, 0, ROOM), "all_reduce", None)
    assert torch.equal(whole, torch.stack([pattern(member, 0, ROOM) for member in range(transport.world_size)]))
    exchange.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("can_leave", [True, False])
def test_swaps(world_size: int, can_leave: bool) -> None:
    """By a wait of this thread's, and by a helper's where torch has changed so that such a wait could not be left."""
    run_ranks(world_size, swap_often, False, can_leave, transport="torch")


def test_swaps_in_a_group_of_the_callers() -> None:
    run_ranks(2, swap_often, True, True, transport="torch")


def leave_and_come_back(rank: int) -> None:
    group, data = own_transport().group, torch.zeros(8, dtype=torch.uint8)
    if rank == 1:
        pycomm.barrier()
        group.send([data + 3], 0, 77).wait()
        return
    work = group.recv([data], 1, 77)
    message = native().GlooMessage.of(work)
    assert message is not None
    for slice_s in (0.0, SLICE_S, 8 * SLICE_S):
        begin = time.monotonic()
        assert not message.wait(LONG, slice_s)
        assert time.monotonic() - begin >= slice_s
    pycomm.barrier()  # over the same connection, which is whole
    while not message.wait(LONG, SLICE_S):
        assert not message.is_complete
    assert message.is_complete and message.wait(LONG, SLICE_S), "it stays so"
    assert data.tolist() == [3] * 8


def test_a_wait_that_is_left_ends_nothing() -> None:
    run_ranks(2, leave_and_come_back, transport="torch")


class SeldomReached:
    """A message that has come, of which gloo does not say so: the first slices end before their waits begin."""

    def __init__(self, slices: int) -> None:
        self.slices = slices

    def wait(self, _longest: timedelta, slice_s: float) -> bool:
        self.slices -= slice_s > 0
        return self.slices < 0


def test_who_asks_for_the_last_time_is_told_of_what_has_come() -> None:
    for slices in range(3):
        message: Any = SeldomReached(slices)
        assert wait_for_a_slice(message, LONG, 0.0), f"{slices} slices ended too soon"
    never: Any = SeldomReached(1000)
    assert not wait_for_a_slice(never, LONG, 0.0)


def test_other_handles_are_not_taken() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    work = group.allreduce([torch.ones(1)])
    work.wait()
    for each in (work, object(), None):
        assert native().GlooMessage.of(each) is None


def go_after_the_last(rank: int) -> float:
    """A receive for the next call is posted in the last one, perhaps when its sender has gone."""
    tensor = torch.ones(1)
    for _ in range(20):
        pycomm.all_reduce(tensor)
    if rank == 1:
        pycomm.finalize()
    else:
        time.sleep(0.1)
    return float(tensor)


def test_who_is_done_may_go() -> None:
    assert run_ranks(2, go_after_the_last, transport="torch") == [2.0**20] * 2


# -- what the kernel is told about the connections ---------------------------------------------------------------------

DATA_PACKETS = 156  # where struct tcp_info says how many with data a socket has sent, an unsigned int


def packets_of_calls(rank: int, calls: int) -> tuple[int, int]:
    """Returns how many packets with data one call takes at most to a peer, by whole numbers, and how many peers."""
    tensor, corked = torch.ones(1), own_transport().corked
    pycomm.all_reduce(tensor)  # posts its own receives, and those of the next call
    before = [sent_packets(fd) for fd in corked.fds]
    for _ in range(calls):
        pycomm.all_reduce(tensor)
    sent = [sent_packets(fd) - first for fd, first in zip(corked.fds, before, strict=True)]
    for fd in corked.fds:
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as each:
            assert not each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)
    pycomm.barrier()  # who leaves closes the connections that others look at
    return max(sent) // calls, len(sent)


def sent_packets(fd: int) -> int:
    with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as each:
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DATA_PACKETS + 4)
    return int(struct.unpack_from("I", info, DATA_PACKETS)[0])


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_call_is_one_packet_to_each_peer(world_size: int) -> None:
    """Its frame, and word of the receives of the next call; three packets if each went by itself."""
    assert run_ranks(world_size, packets_of_calls, 200, transport="torch") == [(1, world_size - 1)] * world_size


def test_nothing_stays_held_back_after_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver = server.accept()[0]
        receiver.settimeout(300)
        with receiver:
            with pytest.raises(RuntimeError, match="on the way"), Corked([GlooSocket(sender.fileno(), 0)]):
                sender.send(b"held")
                assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)
                raise RuntimeError("on the way")
            assert not sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)
            assert receiver.recv(4) == b"held"


# -- between hosts: two of two ranks, as the harness has them ---------------------------------------------------------


def small_collectives(rank: int) -> None:
    """Up to the longest frame and one element past it; broadcast sends long frames from one rank alone."""
    room, n = own_transport().frame_bytes - FRAME_HEADER_BYTES, pycomm.world_size()
    assert room > SHORT_ROOM
    for nbytes in (4, SHORT_ROOM, SHORT_ROOM + 4, 5000, room, room + 4, 8):
        numel = nbytes // 4
        values = [torch.arange(numel, dtype=torch.float32) * (member + 1) for member in range(n)]
        total = values[rank].clone()
        pycomm.all_reduce(total)
        assert torch.equal(total, sum(values)), nbytes
        gathered = torch.empty(n * numel)
        pycomm.all_gather_into_tensor(gathered, values[rank])
        assert torch.equal(gathered, torch.cat(values)), nbytes
        for root in range(n):
            sent = values[rank].clone()
            pycomm.broadcast(sent, root)
            assert torch.equal(sent, values[root]), (nbytes, root)


def test_small_collectives_between_hosts() -> None:
    run_ranks(4, small_collectives, transport="mixed")


@pytest.mark.parametrize(
    "numels",
    [(1, 1, 1, 1000), (1000, 1000, 1, 1), (1000, 1, 1000, 1), (1, 1000, 2000, 3000), (4000, 4000, 4000, 3999)],
    ids=str,
)
def test_lengths_that_differ_between_hosts(numels: tuple[int, ...]) -> None:
    run_ranks(4, differ, numels, transport="mixed")


def differ(rank: int, numels: tuple[int, ...]) -> None:
    tensor = torch.full((numels[rank],), 7.0)
    with pytest.raises(pycomm.CollectiveMismatchError) as caught:
        pycomm.all_reduce(tensor)
    for member, numel in enumerate(numels):
        assert f"rank {member}: all_reduce(SUM, float32, {numel} elements" in str(caught.value)
    assert tensor.eq(7.0).all()
    pycomm.all_reduce(agreed := torch.ones(1000))
    assert agreed.eq(4.0).all(), "the next call is unharmed"
