"""The handles of calls that do not block: one law for those that a thread makes and those that a short cut starts."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from harness import run_ranks, transport_params, wait_until
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, ConfigError, PeerLostError, ReduceOp, TransportError
from pycomm.collectives.context import resolve
from pycomm.collectives.lazy_work import StartedWork

EVERYWHERE = transport_params()
FAILING = [param for param in EVERYWHERE if param.values[0] != "mpi"]  # whose other ranks go on where one fails
# In float32: one line, a slot, around what a group's ranks exchange at once, and what only a thread moves.
SIZES = (1, 9, 100, 600, 5000, 32_768, 100_000)


def verbs_on(rank: int, numel: int) -> list[tuple[Callable[..., Any], torch.Tensor | None, torch.Tensor | None]]:
    """A call of each verb, the tensor that it writes, and what that is to hold."""
    n = pycomm.world_size()
    own, wide = torch.full((numel,), float(rank)), torch.arange(float(n)).repeat_interleave(numel)
    total = torch.full((numel,), float(sum(range(n))))
    summed, kept, cast_out = own.clone(), own.clone(), own.clone()
    gathered, scattered = torch.empty(n * numel), torch.empty(numel)
    return [
        (lambda **how: pycomm.all_reduce(summed, **how), summed, total),
        (lambda **how: pycomm.reduce(kept, 0, ReduceOp.MAX, **how), kept, total * 0 + (n - 1 if rank == 0 else rank)),
        (lambda **how: pycomm.broadcast(cast_out, src=n - 1, **how), cast_out, total * 0 + n - 1),
        (lambda **how: pycomm.all_gather_into_tensor(gathered, own, **how), gathered, wide),
        (lambda **how: pycomm.reduce_scatter_tensor(scattered, wide, **how), scattered, total * 0 + n * rank),
        (lambda **how: pycomm.barrier(**how), None, None),
    ]


def end_in_every_way(rank: int) -> None:
    """Some ranks block and others do not; who does not waits, asks, or makes the next call."""
    for numel in SIZES:
        for way in range(6):
            for call, written, expected in verbs_on(rank, numel):
                work = call(async_op=way < 3 or (rank + way) % 2 == 0)
                if work is None:
                    pass
                elif way % 3 == 0:
                    assert work.wait() is True and work.wait(timedelta(seconds=99)) is True
                elif way % 3 == 1:
                    wait_until(work.is_completed)
                    assert work.is_success() and work.exception() is None
                    result = work.result()
                    assert result is written or (isinstance(result, list) and result[0] is written)
                if way % 3 == 2:
                    pycomm.barrier()
                    assert work is None or work.is_completed()
                if written is not None:
                    assert torch.equal(written, expected), (numel, way, rank)


@pytest.mark.parametrize("transport", EVERYWHERE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_verb_ends_well(transport: str, ranks: int) -> None:
    run_ranks(ranks, end_in_every_way, transport=transport)


def leave_it(rank: int) -> None:
    """Rank 0 hears of rank 1 that its call has ended before it waits for its own."""
    for numel in SIZES:
        for kinds in (("own", "own"), ("shared", "shared"), ("own", "shared"), ("shared", "own"), ("array", "own")):
            tensor = torch.ones(numel)
            if kinds[rank] == "shared" and resolve(None).transport.name == "shm":
                tensor = pycomm.empty(numel, shared=True).fill_(1)
            argument = tensor.numpy() if kinds[rank] == "array" else tensor
            if rank == 0:
                work = pycomm.all_reduce(argument, async_op=True)
                pycomm.recv(torch.zeros(1), 1)
                assert work is not None and work.wait()
            else:
                pycomm.all_reduce(argument)
                pycomm.send(torch.ones(1), 0)
            assert (tensor == 2).all()


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_the_others_need_no_wait(transport: str) -> None:
    run_ranks(2, leave_it, transport=transport)


def make_several(rank: int) -> None:
    """In a row, with blocking ones between, waited for in another order, or dropped."""
    tensors = [torch.full((1 + 37 * i,), float(i)) for i in range(12)]
    works = [pycomm.all_reduce(each, async_op=i % 3 != rank) for i, each in enumerate(tensors)]
    for work in reversed(works[::2]):
        assert work is None or work.wait()
    pycomm.barrier()
    assert all(work is None or work.is_completed() for work in works)
    assert [each[-1].item() for each in tensors] == [2.0 * i for i in range(12)]

    other = pycomm.new_group()
    array = np.ones(3, np.float32)
    memory = weakref.ref(array)
    for i in range(3):  # as one is dropped that has not ended, those go that have by then
        tensor = torch.from_numpy(array) if i == 0 else torch.ones(3)
        if rank == 0:
            pycomm.all_reduce(tensor, async_op=True)
            del tensor, array
            array = np.ones(1, np.float32)
            gc.collect()
            assert i > 0 or memory() is not None, "the result would come into another's memory"
            pycomm.send(torch.ones(1), 1, other)
        else:
            pycomm.recv(torch.ones(1), 0, other)
            pycomm.all_reduce(tensor)
        pycomm.barrier()
    assert rank == 1 or memory() is None


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_calls_in_a_row(transport: str) -> None:
    run_ranks(2, make_several, transport=transport)


def follow(rank: int) -> None:
    """Futures, callbacks, and a thread that waits while another one goes on."""
    group = resolve(None)  # which a thread knows by itself only where ranks are processes

    def reduce_again(done: Any) -> torch.Tensor:
        tensor: torch.Tensor = done.value()[0].clone()
        pycomm.all_reduce(tensor, group=group)  # a callback of a future may, in the same order on all ranks
        return tensor

    for i in range(20):
        work = pycomm.all_reduce(torch.full((3,), float(i)), async_op=True)
        assert work is not None
        if i % 3 == 0:
            time.sleep(0.002 * ((i + rank) % 2))  # the other rank has made it, or has not
        assert work.get_future().then(reduce_again).wait()[0].item() == 4.0 * i
    work = pycomm.broadcast(torch.full((2,), rank), 1, async_op=True)
    assert work.then(lambda work: work.result().tolist()).result(100) == [1, 1]
    late = pycomm.barrier(async_op=True)
    late.wait()
    assert late.then(lambda work: work.is_success()).result() is True

    tensor = torch.ones(4)
    work = pycomm.all_reduce(tensor, async_op=True)
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(work.wait(100))) for _ in range(3)]
    for thread in threads:
        thread.start()
    pycomm.all_reduce(torch.ones(5))  # after that one
    assert work.is_completed() and (tensor == 2).all()
    for thread in threads:
        thread.join()
    assert heard == [True] * 3


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_what_follows(transport: str) -> None:
    run_ranks(2, follow, transport=transport)


def be_late(rank: int) -> None:
    tensor, other = torch.ones(3), pycomm.new_group()
    if rank == 1:
        pycomm.recv(torch.zeros(1), 0, other)
        pycomm.all_reduce(tensor)
    else:
        work = pycomm.all_reduce(tensor, async_op=True)
        assert work is not None and not work.is_completed() and not work.is_success() and work.exception() is None
        for timeout in (0.02, timedelta(seconds=0.02)):
            with pytest.raises(CollectiveTimeoutError) as caught:
                work.wait(timeout)
            assert "is broken" not in str(caught.value)
        pycomm.send(torch.zeros(1), 1, other)
        assert work.result(100) is tensor
    assert (tensor == 2).all()
    pycomm.barrier()


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_call_that_is_late_goes_on(transport: str) -> None:
    run_ranks(2, be_late, transport=transport)


def disagree(rank: int) -> None:
    for way in range(3):
        tensor = torch.ones(3 + rank)
        work = pycomm.all_reduce(tensor, async_op=True)
        assert work is not None
        if way == 1:
            wait_until(work.is_completed)
        if way == 2:
            assert work.then(lambda work: type(work.exception())).result(100) is CollectiveMismatchError
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError, match="rank 1: all_reduce"):
                work.wait()
        assert (tensor == 1).all() and isinstance(work.exception(), CollectiveMismatchError)
        pycomm.all_reduce(tensor[:3])
        assert tensor.tolist() == [2.0, 2.0, 2.0, 1.0][: 3 + rank]


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_ranks_that_disagree(transport: str) -> None:
    run_ranks(2, disagree, transport=transport)


def lose_the_peer(rank: int) -> None:
    groups = [pycomm.new_group() for _ in range(3)]
    pycomm.barrier()
    if rank == 1:
        for group in groups:
            group.close()
        pycomm.recv(torch.zeros(1), 0)
        return
    works = [pycomm.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups]
    with pytest.raises(PeerLostError):
        works[0].wait()
    wait_until(works[1].is_completed)
    assert isinstance(works[1].exception(), PeerLostError)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm").addHandler(handler)
    try:
        wait_until(works[2].is_completed)
        is_started = isinstance(works[2], StartedWork)  # a thread keeps the handle of its last call until the next one
        del works
        gc.collect()
    finally:
        logging.getLogger("pycomm").removeHandler(handler)
    if is_started:
        assert len(lines) == 1 and "all_reduce" in lines[0] and "dropped without a wait" in lines[0], lines
    pycomm.send(torch.zeros(1), 1)


@pytest.mark.parametrize("transport", FAILING)
def test_errors_are_kept_and_told_once(transport: str) -> None:
    run_ranks(2, lose_the_peer, transport=transport)


def start_where_nobody_is(rank: int) -> None:
    """On a broken group a call gives a handle, too, with the error."""
    group = pycomm.new_group()
    if rank == 1:
        group.close()
        return
    for _ in range(3):
        work = pycomm.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        with pytest.raises(PeerLostError):
            work.wait()


@pytest.mark.parametrize("transport", FAILING)
def test_a_broken_group_gives_handles(transport: str) -> None:
    run_ranks(2, start_where_nobody_is, transport=transport)


def close_what_is_in_use(rank: int) -> None:
    """The handle of a call whose group was closed since, and a call that comes as another thread closes the group."""
    group, other, left = (pycomm.new_group() for _ in range(3))
    work = pycomm.all_reduce(torch.ones(3), group=group, async_op=True)
    assert work is not None
    group.close()
    assert work.then(lambda work: work.result().tolist()).result(100) == [2, 2, 2]
    pycomm.all_reduce(torch.ones(3), group=other)
    submit = other._worker.submit

    def close_first(job: Callable[[], None], done: Any) -> bool:
        other.close()
        return submit(job, done)

    other._worker.submit = close_first
    with pytest.raises(TransportError, match="closed"):
        pycomm.all_reduce(torch.ones(3), group=other, async_op=True, algorithm="direct")
    if rank == 0 and left.transport.name == "shm":  # elsewhere it is broken off after ten seconds
        alone = pycomm.all_reduce(torch.ones(3), group=left, async_op=True)
        assert isinstance(alone, StartedWork)
        left.close()
        with pytest.raises(TransportError):
            alone.then(lambda work: work.result()).result(100)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_group_that_is_closed_while_it_is_used(transport: str) -> None:
    run_ranks(2, close_what_is_in_use, transport=transport)


def take_the_short_cut(rank: int) -> None:
    group = pycomm.new_group()
    for each in (None, group):
        for call, _, _ in verbs_on(rank, 5):
            call(group=each)  # the first of its length tries how it goes
            work = call(group=each, async_op=True)
            assert isinstance(work, StartedWork) and work.wait()
    whole = torch.ones(6)
    own = whole[3 * rank : 3 * rank + 3]
    in_place = partial(pycomm.all_gather_into_tensor, whole, own), partial(pycomm.reduce_scatter_tensor, own, whole)
    for call in in_place:
        call()
        work = call(async_op=True)
        assert isinstance(work, StartedWork) and work.wait()
    with pytest.raises(ConfigError, match="share memory"):
        pycomm.all_gather_into_tensor(whole, whole[1:4])
    tensor = torch.ones(3)
    assert pycomm.all_reduce(tensor, ReduceOp.SUM, None, False) is None
    assert pycomm.all_reduce(tensor, async_op=False) is None
    assert pycomm.all_gather([torch.empty(3), torch.empty(3)], tensor, None, False) is None
    calls: list[tuple[str, int]] = []
    group.add_hook(lambda record: calls.append((record.verb, record.numel)))
    pycomm.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[union-attr]
    assert calls == [("all_reduce", 3)], "who watches hears of it"
    with pytest.raises(TypeError, match="made by"):
        StartedWork()


def test_plain_tensors_over_shared_memory_are_started() -> None:
    run_ranks(2, take_the_short_cut, transport="shm")
