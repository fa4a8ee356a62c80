"""Messages over shared memory: around the pieces of a channel, by the short cuts and without them, interrupted."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import pycomm
from harness import run_forked, run_ranks
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, ConfigError, PeerLostError, TransportError
from pycomm.ops import native
from pycomm.transport.base import FIRST_OWN_TAG

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
    """What Ctrl-C makes a call leave writes nothing any more, and what it was about to receive is for who asks next."""
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0)
        pycomm.send(torch.full((1 << 18,), 7.0), 0)
        pycomm.send(torch.full((2,), 8.0), 0)
        return
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        pycomm.recv(torch.zeros(1 << 18), 1)
    others = [torch.zeros(1 << 18) for _ in range(8)]  # one of them would have that memory
    pycomm.send(torch.ones(1), 1)
    for numel, value in ((1 << 18, 7), (2, 8)):
        got = torch.zeros(numel)
        assert pycomm.recv(got, 1) == 1 and (got == value).all()
    assert all((other == 0).all() for other in others)


def test_an_interrupted_receive_is_given_up() -> None:
    run_ranks(2, interrupt_a_blocking_receive)


def receive_inside_a_handler(rank: int) -> None:
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0, tag=3)
        pycomm.send(torch.full((4,), 2.0), 0, tag=2)
        return pycomm.send(torch.full((4,), 1.0), 0, tag=1)
    inner, outer = torch.zeros(4), torch.zeros(4)

    def handler(*_: object) -> None:
        pycomm.send(torch.ones(1), 1, tag=3)
        pycomm.recv(inner, 1, tag=2)

    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    pycomm.recv(outer, 1, tag=1)
    assert (inner == 2).all() and (outer == 1).all()


def test_a_signal_handler_receives_while_its_thread_does() -> None:
    run_ranks(2, receive_inside_a_handler)


def wait_beside_another(rank: int) -> None:
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0, tag=3)
        return pycomm.send(torch.ones(4), 0, tag=1)
    first, second = torch.zeros(4), torch.zeros(4)
    longer, shorter = pycomm.irecv(first, 1, tag=1), pycomm.irecv(second, 1, tag=2)
    thread = threading.Thread(target=longer.wait)  # this one moves the messages of all
    thread.start()
    with pytest.raises(CollectiveTimeoutError):
        shorter.wait(0.3)
    assert thread.is_alive(), "it waited as long as the other thread does"
    pycomm.send(torch.ones(1), 1, tag=3)
    thread.join()
    assert (first == 1).all()


def test_a_wait_beside_another_thread_has_its_own_timeout() -> None:
    run_ranks(2, wait_beside_another)


def receive_from_nobody(rank: int) -> None:
    if rank == 0:
        with pytest.raises(PeerLostError, match="has closed the group"):
            pycomm.recv(torch.zeros(4))


def test_a_receive_from_anyone_ends_when_all_others_have_closed() -> None:
    run_ranks(3, receive_from_nobody)


def fork_with_messages(rank: int) -> None:
    """A forked child drops a handle and tries to use what is its parent's; the messages come whole."""
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0, tag=9)
        return [pycomm.send(torch.full((1 << 15,), float(tag)), 0, tag=tag) for tag in range(3)]
    got = [torch.zeros(1 << 15) for _ in range(3)]
    works = [pycomm.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(got)]
    tensor, group = torch.ones(1), pycomm.get_group()

    def body() -> None:
        with pytest.raises(TransportError, match="forked"):
            works[0].wait(1)
        with pytest.raises(TransportError, match="forked"):
            pycomm.send(tensor, 1, group=group)
        works.clear()

    run_forked(body)
    pycomm.send(torch.ones(1), 1, tag=9)
    for tag, work in enumerate(works):
        work.wait(60)
        assert (got[tag] == tag).all()


def test_a_forked_child_leaves_the_messages_alone() -> None:
    run_ranks(2, fork_with_messages)


def test_tags_of_users_end_where_those_of_plans_begin() -> None:
    assert native().SHM_LAST_TAG == FIRST_OWN_TAG - 1
