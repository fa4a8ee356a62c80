"""Messages over shared memory: around the pieces of a channel, by the short cuts and without them, interrupted."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, ConfigError

PIECE, CHANNEL = 16 << 10, 256 << 10  # bytes, of two ranks
# A frame takes 16 bytes: what fits its line, the ends of the first piece and of a channel, what goes past the caches.
LENGTHS = [1, 47, 48, 49, 64, PIECE - 65, PIECE - 64, PIECE - 63, PIECE, 2 * PIECE - 64, 3 * PIECE + 1]
LENGTHS += [CHANNEL - 64, CHANNEL - 63, CHANNEL, CHANNEL + 1, (1 << 20) + 5, (4 << 20) + 3]


def numbers(rank: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + nbytes + rank).to(torch.uint8)


def exchange_all_lengths(rank: int) -> None:
    n = pycomm.world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    for nbytes in LENGTHS:
        got = torch.zeros(nbytes, dtype=torch.uint8)
        works = [pycomm.irecv(got, left), pycomm.isend(numbers(rank, nbytes), right)]
        for work in works:
            work.wait()
        assert torch.equal(got, numbers(left, nbytes)), nbytes
    # All at once, so that frames lie everywhere in the channel; and what has come long before it is asked for.
    sends = [pycomm.isend(numbers(rank, nbytes), right, tag=1) for nbytes in LENGTHS * 2]
    last = pycomm.isend(numbers(rank, 5), right, tag=2)
    got = torch.zeros(5, dtype=torch.uint8)
    assert pycomm.recv(got, left, tag=2) == left and torch.equal(got, numbers(left, 5))
    for nbytes in LENGTHS * 2:
        got = torch.zeros(nbytes, dtype=torch.uint8)
        assert pycomm.recv(got, left, tag=1) == left
        assert torch.equal(got, numbers(left, nbytes)), nbytes
    for work in [*sends, last]:
        assert work.wait()


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_every_length_around_the_pieces_of_a_channel(ranks: int) -> None:
    run_ranks(ranks, exchange_all_lengths)


def call_in_every_way(rank: int) -> None:
    other, x = 1 - rank, torch.arange(6.0).reshape(2, 3) + rank
    swapped = pycomm.split(0, key=-rank)
    assert swapped.ranks == (1, 0)
    sends: list[Any] = [
        lambda t: pycomm.send(t, other),
        lambda t: pycomm.send(t, other, None, 3),
        lambda t: pycomm.send(t, other, tag=3),
        lambda t: pycomm.send(t, other, swapped),
        lambda t: pycomm.send(t, group=swapped, group_dst=rank),  # the other one's rank there
        lambda t: pycomm.isend(t, other, swapped, 5).wait(),
        lambda t: pycomm.isend(t, group_dst=other).wait(),
    ]
    receives: list[Any] = [
        lambda t: pycomm.recv(t, other),
        lambda t: pycomm.recv(t, other, None, 3),
        lambda t: pycomm.recv(t, None, None, 3),
        lambda t: pycomm.recv(t, None, swapped),
        lambda t: pycomm.recv(t, group=swapped, group_src=rank),
        lambda t: received(pycomm.irecv(t, None, swapped, 5)),
        lambda t: received(pycomm.irecv(t, group_src=other)),
    ]
    kinds: list[Any] = [
        lambda t: t.clone(),
        lambda t: torch.nn.Parameter(t.clone()),
        lambda t: t.t().contiguous().t(),  # not contiguous: copied
        lambda t: t.clone().numpy(),
    ]
    for send, receive in zip(sends, receives, strict=True):
        for kind in kinds:
            got = kind(torch.zeros(2, 3))
            if rank == 0:
                send(kind(x))
                assert receive(got) == other
            else:
                assert receive(got) == other
                send(kind(x))
            assert torch.equal(torch.as_tensor(got).detach(), torch.arange(6.0).reshape(2, 3) + other)
    with torch.inference_mode():
        exchange_all_lengths_of_one(rank)


def received(work: Any) -> int:
    work.wait()
    assert work.is_success() and work.then(lambda w: w.result()).wait()
    return int(work.source_rank())


def exchange_all_lengths_of_one(rank: int) -> None:
    got = torch.zeros(3)
    work = pycomm.isend(torch.full((3,), float(rank)), 1 - rank)
    pycomm.recv(got, 1 - rank)
    work.wait()
    assert (got == 1 - rank).all()


def test_all_forms_of_a_call_mean_the_same() -> None:
    run_ranks(2, call_in_every_way)


def make_mistakes(rank: int) -> None:
    x = torch.ones(4)
    for call, words in (
        (lambda: pycomm.send(x, 2), "send"),
        (lambda: pycomm.send(x, -1), "send"),
        (lambda: pycomm.isend(x, [0]), "isend"),  # type: ignore[arg-type]
        (lambda: pycomm.isend(x), "isend"),
        (lambda: pycomm.isend(x, 0, group_dst=0), "isend"),
        (lambda: pycomm.irecv(x, 2), "irecv"),
        (lambda: pycomm.recv(x, 0, None, 32759), "0 to 32758"),
        (lambda: pycomm.isend(x, 0, tag=-1), "0 to 32758"),
        (lambda: pycomm.isend(x.to_sparse(), 0), "dense"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    if rank == 0:
        pycomm.send(x, 1)
        pycomm.send(x, 1)
        pycomm.send(x, 1)
    else:
        small = torch.zeros(3)
        with pytest.raises(CollectiveMismatchError, match="expected 12 bytes, got 16"):
            pycomm.recv(small, 0)
        work = pycomm.irecv(small, 0)
        with pytest.raises(CollectiveMismatchError, match="expected 12 bytes, got 16"):
            work.wait()
        assert not work.is_success() and isinstance(work.exception(), CollectiveMismatchError)
        assert (small == 0).all()
        pycomm.recv(x, 0)
    pycomm.barrier()
    group = pycomm.new_group(timeout=0.2)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            pycomm.recv(x, 1, group)
        pycomm.send(x, 1)
    else:
        pycomm.recv(x, 0)  # which says that its time was over


def test_mistakes_are_told_and_write_nothing() -> None:
    run_ranks(2, make_mistakes)


def interrupt_a_blocking_receive(rank: int) -> None:
    """What Ctrl-C makes a call leave is still under way, and its memory must not be another's by the time it comes."""
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0)
        pycomm.send(torch.full((1 << 18,), 7.0), 0)
        pycomm.send(torch.full((2,), 8.0), 0)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        pycomm.recv(torch.zeros(1 << 18), 1)
    others = [torch.zeros(1 << 18) for _ in range(8)]  # one of them would have that memory
    pycomm.send(torch.ones(1), 1)
    got = torch.zeros(2)
    assert pycomm.recv(got, 1) == 1 and (got == 8).all()
    assert all((other == 0).all() for other in others)


def test_an_interrupted_receive_keeps_its_memory() -> None:
    run_ranks(2, interrupt_a_blocking_receive)
