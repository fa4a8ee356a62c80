"""The handles of messages: one law for those that are Python's and those of the short cuts, which are native."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from harness import run_ranks, transport_params, wait_until
from pycomm import CollectiveTimeoutError, ConfigError, PeerLostError
from pycomm.collectives.message_work import NativeWork

EVERYWHERE = transport_params()
FAILING = [param for param in EVERYWHERE if param.values[0] != "mpi"]  # whose other ranks go on where one fails


def answer(tensor: torch.Tensor) -> None:
    """What rank 1 does until rank 0 says so: then it sends ``tensor`` to it."""
    pycomm.recv(torch.zeros(1), 0, tag=1)
    pycomm.send(tensor, 0)


def ask() -> None:
    pycomm.send(torch.zeros(1), 1, tag=1)


def wait_in_every_way(rank: int) -> None:
    for _ in range(5):
        if rank == 1:
            answer(torch.full((3,), 7.0))
            continue
        got = torch.zeros(3)
        work = pycomm.irecv(got, 1)
        assert isinstance(work, pycomm.Work)
        assert not work.is_completed() and work.exception() is None and not work.is_success()
        with pytest.raises(
            pycomm.TransportError, match="irecv from rank 1 of group 'world' on rank 0 of 2 is not complete"
        ):
            work.source_rank()  # type: ignore[attr-defined]
        seen: list[Any] = []
        early = work.then(lambda w, seen=seen: seen.append(w.result().tolist()))
        threads = [threading.Thread(target=lambda w=work, seen=seen: seen.append(w.wait(100))) for _ in range(2)]
        for thread in threads:
            thread.start()
        ask()
        assert work.wait() is True and work.wait(timeout=100) is True and work.wait(timedelta(seconds=9)) is True
        for thread in threads:
            thread.join()
        early.wait()
        assert sorted(map(str, seen)) == ["True", "True", "[7.0, 7.0, 7.0]"]
        assert work.result() is got and work.is_completed() and work.is_success() and work.exception() is None
        assert work.then(lambda w: w.result().sum().item()).result() == 21.0
        assert work.source_rank() == 1  # type: ignore[attr-defined]
        assert work.future.result() is got
        work.synchronize()
        assert work.wait(timedelta(0)) is True  # torch's way to give no limit
        assert work.get_future().wait() == [got]
    if rank == 1:
        return answer(torch.ones(2))
    got = torch.zeros(2)
    future = pycomm.irecv(got, 1).get_future().then(lambda done: done.value()[0] * 3)
    ask()
    assert future.wait().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_waits_futures_and_results(transport: str) -> None:
    run_ranks(2, wait_in_every_way, transport=transport)


def make_mistakes(rank: int) -> Any:
    if rank == 1:
        answer(torch.zeros(2))
        return pycomm.barrier()
    work = pycomm.irecv(torch.zeros(2), 1)
    for timeout in (0, -1.0, float("nan"), True, "soon"):
        with pytest.raises(ConfigError, match="timeout: expected"):
            work.wait(timeout)  # type: ignore[arg-type]
    for arguments, named in (((1, 2), {}), ((), {"seconds": 1}), ((1,), {"timeout": 1})):
        with pytest.raises(TypeError):
            work.wait(*arguments, **named)
    ask()
    work.wait()
    pycomm.barrier()


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_mistakes_are_errors_and_leave_the_message(transport: str) -> None:
    run_ranks(2, make_mistakes, transport=transport)


def wait_again(rank: int) -> None:
    if rank == 1:
        return answer(torch.full((3,), 7.0))
    got = torch.zeros(3)
    work = pycomm.irecv(got, 1)
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(0.1)
        assert "is broken" not in str(caught.value)
    assert not work.is_completed() and work.exception() is None
    ask()
    assert work.wait(60) is True and (got == 7).all()


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_message_that_is_late_goes_on(transport: str) -> None:
    run_ranks(2, wait_again, transport=transport)


def drop_what_is_under_way(rank: int) -> Any:
    if rank == 1:
        answer(torch.full((3,), 7.0))
        for _ in range(100):
            pycomm.recv(torch.zeros(3), 0, tag=2)
        pycomm.barrier()
        return pycomm.recv(torch.zeros(1), 0, tag=1)  # and closes its group
    array = np.zeros(3, np.float32)
    memory = weakref.ref(array)
    work = pycomm.irecv(torch.from_numpy(array), 1)
    del array, work
    gc.collect()
    assert memory() is not None, "the message would come into another's memory"
    ask()
    for _ in range(100):
        pycomm.isend(torch.ones(3), 1, tag=2)
    pycomm.barrier()  # the other rank has received all of them

    def is_let_go() -> bool:
        pycomm.irecv(torch.zeros(3), 1)  # looks, as it is dropped, which of the others have ended
        return memory() is None

    wait_until(is_let_go)
    ask()


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_dropped_handle_keeps_its_tensor_until_the_message_is_there(transport: str) -> None:
    run_ranks(2, drop_what_is_under_way, transport=transport)


def lose_the_peer(rank: int) -> Any:
    if rank == 1:
        return pycomm.recv(torch.zeros(1), 0, tag=1)  # and closes its group
    works = [pycomm.irecv(torch.zeros(3), 1, tag=tag) for tag in (2, 3, 4)]
    ask()
    assert works[0].then(lambda work: work.exception()).result() is works[0].exception()
    for work in works[:2]:
        with pytest.raises(PeerLostError) as caught:
            work.wait()
        with pytest.raises(PeerLostError) as again:
            work.result()
        assert again.value is caught.value is work.exception()
        assert work.is_completed() and not work.is_success()
    late = works[1].then(lambda work: work.is_success())
    assert late.result() is False

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm").addHandler(handler)
    try:
        wait_until(works[2].is_completed)  # all have failed
        ends = [weakref.ref(work) for work in works]
        del works, work, caught, again, late
        # A handle and its error's frames do not hold each other; a thread may just be leaving them.
        wait_until(lambda: gc.collect() >= 0 and not any(end() for end in ends))
    finally:
        logging.getLogger("pycomm").removeHandler(handler)
    assert len(lines) == 1 and "irecv from rank 1" in lines[0] and "dropped without a wait" in lines[0], lines


@pytest.mark.parametrize("transport", FAILING)
def test_errors_are_kept_told_once_and_let_go(transport: str) -> None:
    run_ranks(2, lose_the_peer, transport=transport)


def left_alone(rank: int) -> pycomm.Group | None:
    """Returns a group that all ranks but rank 0 have closed, None on those."""
    group = pycomm.new_group()
    assert isinstance(group, pycomm.Group)
    pycomm.barrier()
    if rank == 0:
        return group
    group.close()
    return None


def only_ask(rank: int) -> None:
    if (group := left_alone(rank)) is None:
        return
    works: list[Any] = []
    with contextlib.suppress(PeerLostError):  # which the start of a message may tell already
        works.append(pycomm.irecv(torch.zeros(3), group=group, tag=1))
        works.append(pycomm.irecv(torch.zeros(3, 2)[:, 1], 2, group, tag=2))
        works.append(pycomm.irecv(torch.zeros(3), 2, group, tag=3))
    for work in works:
        wait_until(work.is_completed)
        assert isinstance(work.exception(), PeerLostError), repr(work.exception())


def wait_shortly(rank: int) -> None:
    """Again and again, each time for less than it takes to look who has left."""
    if (group := left_alone(rank)) is None:
        return
    work = pycomm.irecv(torch.zeros(3), group=group)
    deadline = time.monotonic() + 10.0
    with pytest.raises(PeerLostError):
        while time.monotonic() < deadline:
            with contextlib.suppress(CollectiveTimeoutError):
                work.wait(0.008)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_who_waits_in_short_pieces_hears_of_a_lost_rank(transport: str) -> None:
    run_ranks(3, wait_shortly, transport=transport)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_who_only_asks_hears_of_a_lost_rank(transport: str) -> None:
    run_ranks(3, only_ask, transport=transport)


def follow(rank: int) -> None:
    """Nobody waits for the message itself: the callback's own handle completes, whatever becomes of that."""
    impatient, other = pycomm.new_group(timeout=0.3), pycomm.new_group()
    if rank == 1:
        answer(torch.full((3,), 7.0))
        got = torch.zeros(3)
        pycomm.recv(got, 0)
        assert (got == 2).all()
        pycomm.send(torch.ones(1), 0, tag=3)
        pycomm.recv(torch.zeros(1), 0, tag=1)
        return  # and closes its group
    board = torch.zeros(3, 2)
    received = pycomm.irecv(board[:, 1], 1).then(lambda work: work.result().tolist()).then(lambda work: work.result())
    ask()
    assert received.result(100) == [7.0] * 3 and (board[:, 0] == 0).all()
    assert pycomm.isend(torch.full((3,), 2.0), 1).then(lambda work: work.is_success()).result(100) is True
    ran = threading.Event()
    pycomm.irecv(torch.zeros(1), 1, tag=3).then(lambda _: ran.set())  # of which nobody keeps any handle
    assert ran.wait(100)

    following = pycomm.irecv(torch.zeros(1), 1, group=impatient).then(lambda work: work.result())
    with pytest.raises(CollectiveTimeoutError):
        following.wait()
    assert following.is_completed()
    work = pycomm.irecv(torch.zeros(1), 1, group=other)
    work.then(lambda _: None)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.05)

    lost = pycomm.irecv(torch.zeros(1), 1, tag=4).then(lambda work: work.exception())
    ask()
    assert isinstance(lost.result(100), PeerLostError)


@pytest.mark.parametrize("transport", FAILING)
def test_what_follows_a_message_needs_nobody_who_waits_for_it(transport: str) -> None:
    run_ranks(2, follow, transport=transport)


def close_with_receives_under_way(rank: int) -> None:
    """Of a group that its peer keeps: whoever waits, or asks, hears that this rank has closed it."""
    group = pycomm.new_group()
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0)
        return
    took: list[BaseException] = []

    def receive() -> None:
        try:
            pycomm.recv(torch.zeros(1), 1, tag=1, group=group)
        except pycomm.TransportError as error:
            took.append(error)

    works = [pycomm.irecv(torch.zeros(1), source, group=group) for source in (1, None, 1)]
    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.1)  # as a rule it waits by then; nothing depends on that
    group.close()
    with pytest.raises(pycomm.TransportError, match="closed"):
        works[0].wait()
    wait_until(works[1].is_completed)
    assert isinstance(works[1].exception(), pycomm.TransportError)
    with pytest.raises(pycomm.TransportError, match="closed"):
        works[2].then(lambda work: work.result()).result(100)
    thread.join(100)
    assert len(took) == 1 and "closed" in str(took[0])
    pycomm.send(torch.zeros(1), 1)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_receives_end_where_this_rank_closes_the_group(transport: str) -> None:
    run_ranks(2, close_with_receives_under_way, transport=transport)


def take_the_short_cut(rank: int) -> None:
    work = pycomm.isend(torch.ones(2), 1 - rank)
    pycomm.recv(torch.zeros(2), 1 - rank)
    work.wait()
    assert isinstance(work, NativeWork)
    with pytest.raises(TypeError, match="made by isend, irecv"):
        NativeWork()


def test_plain_tensors_over_shared_memory_have_native_handles() -> None:
    run_ranks(2, take_the_short_cut, transport="shm")
