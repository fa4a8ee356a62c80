"""Point-to-point messages over the transports that wrap another library: sizes, order, senders, mistakes, timeouts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from harness import run_ranks, transport_params, wait_until
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, ConfigError, PeerLostError
from pycomm.collectives.context import default_group
from pycomm.transport import Transport
from pycomm.transport._torch_messages import PlainMessages

WRAPPERS = [param for param in transport_params() if param.values[0] in ("torch", "mpi")]
NUMELS = (0, 1, 31, 240, 241, 1000, 300_007)  # 240 bytes is the most that travels inside a frame of transport torch


def my_transport() -> Transport:
    group = default_group()
    assert group is not None
    return group.transport


def numbers(source: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return (torch.arange(numel) * 7 + source).to(torch.uint8).to(dtype)


def exchange_everything(rank: int) -> None:
    """Every rank sends to every rank, itself included, all sizes with one tag, and only then receives."""
    transport = my_transport()
    peers = range(transport.world_size)
    sends = [transport.isend(numbers(rank, numel), peer, 5) for peer in peers for numel in NUMELS]
    for send in sends[::-1]:
        assert send.test() in (True, False)
    received = {(peer, numel): torch.full((numel,), 99, dtype=torch.uint8) for peer in peers for numel in NUMELS}
    receives = [transport.irecv(flat, peer, 5) for (peer, _), flat in received.items()]
    for request in [*sends, *receives[::-1]]:
        request.wait()
        request.wait()  # allowed, and at once
    for (peer, numel), flat in received.items():
        assert torch.equal(flat, numbers(peer, numel)), (peer, numel)


def keep_order_and_tags(rank: int) -> None:
    transport = my_transport()
    peer = 1 - rank
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        sent = [torch.full((600,), index).to(dtype) for index in range(3)]
        requests = [transport.isend(flat, peer, tag) for flat, tag in zip(sent, (1, 2, 1), strict=True)]
        second, first, third = (torch.empty(600, dtype=dtype) for _ in range(3))
        requests.append(transport.irecv(second, peer, 2))
        requests += [transport.irecv(first, peer, 1), transport.irecv(third, peer, 1)]
        for request in requests:
            request.wait()
        for flat, expected in ((first, sent[0]), (second, sent[1]), (third, sent[2])):
            assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8)), dtype


def receive_from_anyone(rank: int) -> None:
    transport = my_transport()
    for numel in (3, 5000):
        transport.barrier(None)  # a message of the next size would be taken too
        if rank > 0:
            transport.isend(numbers(rank, numel), 0, 9).wait()
            continue
        flats = [torch.empty(numel, dtype=torch.uint8) for _ in range(2)]
        receives: list[Any] = [transport.irecv(flat, None, 9) for flat in flats]
        for receive in receives:
            receive.wait()
        assert sorted(receive.source for receive in receives) == [1, 2]
        for receive, flat in zip(receives, flats, strict=True):
            assert torch.equal(flat, numbers(receive.source, numel))
    transport.barrier(None)
    # From now on also receives from a given rank, and ranks that send before they receive.
    peers = [peer for peer in range(3) if peer != rank]
    sends = [transport.isend(numbers(rank, 300_007), peer, 9) for peer in peers]
    flats = [torch.empty(300_007, dtype=torch.uint8) for _ in peers]
    receives = [transport.irecv(flat, peer, 9) for flat, peer in zip(flats, peers, strict=True)]
    for request in [*sends, *receives]:
        request.wait()
    for peer, flat in zip(peers, flats, strict=True):
        assert torch.equal(flat, numbers(peer, 300_007))


def refuse_other_sizes(rank: int) -> None:
    """Longer and shorter messages, in and beyond a frame: an error for the receiver alone, whose bytes stay."""
    transport = my_transport()
    for sent_numel, expected_numel in ((4, 8), (8, 4), (4, 4000), (4000, 4), (4000, 5000), (5000, 4000)):
        if rank == 0:
            transport.isend(numbers(0, sent_numel), 1, 3).wait()
            continue
        flat = torch.full((expected_numel,), 77, dtype=torch.uint8)
        receive = transport.irecv(flat, 0, 3)
        with pytest.raises(CollectiveMismatchError, match=f"expected {expected_numel} bytes, got {sent_numel}"):
            receive.wait()
        with pytest.raises(CollectiveMismatchError):
            receive.test()
        assert flat.eq(77).all()
    # And the transport goes on working, also for the sizes that were expected in vain.
    for numel in (4000, 5000, 8, 4000):
        if rank == 0:
            transport.isend(numbers(0, numel), 1, 3).wait()
        else:
            flat = torch.empty(numel, dtype=torch.uint8)
            transport.irecv(flat, 0, 3).wait()
            assert torch.equal(flat, numbers(0, numel))


def poll_until_done(rank: int) -> None:
    transport = my_transport()
    flat = torch.empty(100_000, dtype=torch.uint8)
    if rank == 0:
        receive = transport.irecv(flat, 1, 0)
        assert receive.test() is False  # nothing has been sent
        transport.isend(torch.ones(1), 1, 1).wait()
        wait_until(receive.test)
        assert torch.equal(flat, numbers(1, 100_000))
    else:
        transport.irecv(torch.empty(1), 0, 1).wait()
        transport.isend(numbers(1, 100_000), 0, 0).wait()


def time_out(rank: int, path: str) -> None:
    transport = my_transport()
    with pytest.raises(ConfigError, match="tag"):
        transport.isend(torch.ones(1), 1 - rank, -1)
    transport.barrier(None)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"receiving 4 bytes from rank 1 .* within 0\.3 s"):
            transport.irecv(torch.empty(1), 1, 0).wait(0.3)
        assert time.monotonic() - start > 0.2
        Path(path).touch()
    else:
        wait_until(Path(path).exists)  # who closes the group is another error


class CountingLock:
    """A tally's lock that looks, whenever it is free again, whether what is counted and what is complete agree."""

    def __init__(self, tally: Any) -> None:
        self.receives: list[Any] = []
        self.looks = 0
        self._tally, self._lock, self._depth = tally, tally.counting, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.looks += 1
            assert sum(self._tally._received.values()) == sum(receive._is_done for receive in self.receives)
        self._lock.release()


def count_what_is_complete(rank: int) -> None:
    """A rank may have gone as soon as its message is complete here: none must be counted that is not yet."""
    transport: Any = my_transport()
    transport.watch.tally._received.clear()
    transport.watch.tally.counting = lock = CountingLock(transport.watch.tally)
    for waits in (True, False):  # in the thread that waits, and in a helper's
        flat = torch.empty(100_000, dtype=torch.uint8)
        lock.receives.append(transport.irecv(flat, 1 - rank, 6))
        send = transport.isend(numbers(rank, 100_000), 1 - rank, 6)
        if waits:
            lock.receives[-1].wait()
        else:
            wait_until(lock.receives[-1].test)
        send.wait()
    assert lock.looks >= 4


def all_of_two(rank: int, path: str) -> None:
    """One job for all that two ranks can show: starting mpirun costs more than the tests."""
    exchange_everything(rank)
    keep_order_and_tags(rank)
    refuse_other_sizes(rank)
    poll_until_done(rank)
    if my_transport().name == "torch":
        count_what_is_complete(rank)
    time_out(rank, path)  # last: it breaks a gloo group


def all_of_three(rank: int) -> None:
    exchange_everything(rank)
    receive_from_anyone(rank)


@pytest.mark.parametrize("transport", WRAPPERS)
def test_messages_of_two_ranks(transport: str, tmp_path: Path) -> None:
    run_ranks(2, all_of_two, str(tmp_path / "timed out"), transport=transport)


@pytest.mark.parametrize("transport", WRAPPERS)
def test_messages_of_three_ranks(transport: str) -> None:
    run_ranks(3, all_of_three, transport=transport)


def exchange_plainly(rank: int) -> None:
    """As over NCCL and other backends of torch, which are handed messages as they are."""
    transport = my_transport()
    transport._messages = PlainMessages(transport)  # type: ignore[arg-type, attr-defined]
    exchange_everything(rank)
    receive_from_anyone(rank)


def test_plain_messages() -> None:
    run_ranks(3, exchange_plainly, transport="torch")


@pytest.mark.parametrize("transport", WRAPPERS)
def test_messages_of_a_rank_alone(transport: str) -> None:
    run_ranks(1, exchange_everything, transport=transport)


def receive_from_those_who_leave(rank: int) -> None:
    """What they sent is received; for what nobody is left to send there is an error, and no timeout."""
    if rank > 0:
        pycomm.send(torch.full((300,), float(rank)), 0)
        return
    got = torch.zeros(300)
    assert {pycomm.recv(got), pycomm.recv(got)} == {1, 2}
    for _ in range(2):  # also where it is known already
        with pytest.raises(PeerLostError, match="from any rank .* has closed the group"):
            pycomm.recv(got)


@pytest.mark.parametrize("transport", [*WRAPPERS, "mixed"])
def test_a_receive_from_any_rank_ends_when_all_have_left(transport: str) -> None:
    run_ranks(3, receive_from_those_who_leave, transport=transport)


def take_what_it_has_not_heard_of(rank: int) -> None:
    """Rank 0 knows who sends, and closes the group while the announcements are under way to it; nobody minds."""
    if rank == 0:
        transport: Any = my_transport()
        transport.listen = lambda *_: threading.Event().wait()
        for peer in (1, 2):
            assert pycomm.recv(torch.zeros(300), peer) == peer
    else:
        pycomm.isend(torch.full((300,), float(rank)), 0).wait()
        time.sleep(0.3)  # rank 0 is gone by then, as a rule; nothing depends on that
        work = pycomm.isend(torch.full((300,), float(rank)), 3 - rank)
        assert pycomm.recv(torch.zeros(300)) == 3 - rank  # from anyone; and rank 0 has gone
        work.wait()


def test_a_message_is_sent_when_it_is_taken() -> None:
    run_ranks(3, take_what_it_has_not_heard_of, transport="mixed")
