"""Handles: waiting, errors, callbacks, handles that nobody kept."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import CollectiveTimeoutError, ConfigError, PeerLostError
from pycomm.collectives.message_work import RequestWork
from pycomm.collectives.work import Work
from pycomm.transport.local import LocalWorld


def test_states() -> None:
    work = Work("a call")
    assert not work.is_completed() and work.exception() is None and not work.is_success()
    with pytest.raises(CollectiveTimeoutError, match=r"a call was not complete after 0.01"):
        work.wait(0.01)
    work.set_result(42)
    assert work.wait() is True and work.result() == 42 and work.is_completed() and work.is_success()
    work.synchronize()


def test_errors_are_raised_by_whoever_waits() -> None:
    work = Work("a call")
    error = CollectiveTimeoutError("the call itself")
    work.set_exception(error)
    assert work.is_completed() and not work.is_success() and work.exception() is error
    for wait in (work.wait, work.synchronize, work.result):
        with pytest.raises(CollectiveTimeoutError, match="the call itself"):
            wait()


def test_then_runs_after_success_and_after_failure() -> None:
    early, late = Work("early"), Work("late")
    first = early.then(lambda work: work.is_success())
    assert not first.is_completed()
    early.set_result(None)
    assert first.result() is True
    late.set_exception(ValueError("x"))
    assert isinstance(late.then(lambda work: work.exception()).result(), ValueError)


def test_an_error_that_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    work = Work("a forgotten call")
    work.set_exception(ValueError("lost"))
    with caplog.at_level(logging.ERROR, "pycomm"):
        del work
        gc.collect()
    assert "a forgotten call failed, and its handle was dropped without a wait: lost" in caplog.text


@pytest.mark.parametrize("kind", [Work, RequestWork])
def test_a_handle_that_was_interrupted_as_it_was_made_can_be_dropped(kind: type[Work]) -> None:
    kind.__del__(kind.__new__(kind))


def test_timeout_of_a_receive_leaves_it_under_way() -> None:
    a, b = LocalWorld(2).transports
    with pycomm.init(a):
        into = torch.zeros(1)
        work = pycomm.irecv(into, 1)
        with pytest.raises(CollectiveTimeoutError, match=r"\[irecv, group 'world', rank 0 of 2\]"):
            work.wait(0.01)
        assert not work.is_completed()
        with pytest.raises(pycomm.TransportError, match="not complete"):
            work.source_rank()  # type: ignore[attr-defined]
        b.isend(torch.tensor([3.0]), 0)
        assert work.is_completed() and work.wait() and into.item() == 3.0 and work.source_rank() == 1  # type: ignore[attr-defined]


def test_polling_completes_a_strided_receive() -> None:
    a, b = LocalWorld(2).transports
    with pycomm.init(a):
        board = torch.zeros(3, 2)
        work = pycomm.irecv(board[:, 1], 1)
        b.isend(torch.ones(3), 0)
        assert work.is_completed() and board.tolist() == [[0.0, 1.0]] * 3


def failing_calls(rank: int) -> None:
    if rank == 1:
        return  # closes its group
    tensor = torch.zeros(3)
    work = pycomm.all_reduce(tensor, async_op=True)
    with pytest.raises(
        PeerLostError, match=r"\[all_reduce, call 1, group 'world', rank 0 of 2\] rank 1 is gone"
    ) as caught:
        work.wait()
    assert caught.value.rank == 1 and work.exception() is caught.value
    with pytest.raises(PeerLostError, match=r"\[barrier, call 2"):
        pycomm.barrier()


def test_asynchronous_failures() -> None:
    run_ranks(2, failing_calls, transport="local")


def calls_from_a_callback(rank: int) -> None:
    def again(work: Work) -> None:
        pycomm.barrier(group)

    group = pycomm.new_group()
    assert isinstance(group, pycomm.Group)
    may_begin, may_end = threading.Event(), threading.Event()

    def wait_for_the_callbacks(_verb: str, _seq: int) -> None:
        may_begin.wait(100)

    group.add_start_hook(wait_for_the_callbacks)
    work = pycomm.barrier(group, async_op=True)
    assert work is not None
    following = work.then(lambda _: may_end.wait(100)).then(again)
    may_begin.set()
    last = pycomm.barrier(group, async_op=True)
    may_end.set()
    assert last is not None
    last.wait()
    # It ran on the worker thread, which would have waited for itself.
    with pytest.raises(ConfigError, match="callback"):
        following.wait()


def test_a_callback_cannot_deadlock_its_group() -> None:
    run_ranks(2, calls_from_a_callback, transport="local")


def times_out(rank: int) -> None:
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"\[all_reduce, call 1, group 'world', rank 0 of 2\]"):
            pycomm.all_reduce(torch.zeros(4), timeout=0.05)
        pycomm.send(torch.zeros(1), 1)
    else:
        pycomm.recv(torch.zeros(1), 0)


def test_timeout_of_one_call() -> None:
    run_ranks(2, times_out, transport="local")


def futures_of_calls(rank: int) -> None:
    tensor, after = torch.full((3,), rank + 1.0), torch.ones(2)
    group = pycomm.get_group()  # ranks are threads here, and a callback's thread is none

    def reduce_more(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        assert done.value()[0] is tensor
        # Told by a thread for futures that are asked for inside callbacks: this one waits.
        pycomm.all_reduce(after, group=group, async_op=True).get_future().wait()
        return after

    work = pycomm.all_reduce(tensor, async_op=True)
    assert work.get_future().then(reduce_more).wait().tolist() == [2.0, 2.0] and tensor.tolist() == [3.0] * 3
    assert work.get_future().then(lambda done: done.value()[0].sum().item()).wait() == 9.0  # complete: at once
    gathered = [torch.zeros(1) for _ in range(2)]
    future = pycomm.all_gather(gathered, torch.tensor([rank + 5.0]), async_op=True).get_future()
    assert future.wait() is gathered and torch.cat(gathered).tolist() == [5.0, 6.0]
    work.block_current_stream()
    if rank == 0:
        with pytest.raises(RuntimeError, match="PeerLostError"):  # the other has left
            pycomm.barrier(async_op=True).get_future().wait()


def test_futures_as_torch_has_them() -> None:
    run_ranks(2, futures_of_calls, transport="local")


def a_future_outlives_its_group(rank: int) -> None:
    group = pycomm.new_group()
    future = pycomm.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    group.close()
    assert future.wait()[0].tolist() == [2.0, 2.0]


def test_a_future_of_a_group_that_was_closed() -> None:
    for _ in range(10):
        run_ranks(2, a_future_outlives_its_group, transport="local")
