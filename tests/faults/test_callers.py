"""What a rank may do to its own calls, on every transport of processes: interrupt them, leave, fork, drop handles."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch
from laws import EVERYWHERE

import pycomm
from harness import check_sum, interrupt_once_in_a_call, is_in_a_call, run_forked, run_ranks, wait_until
from pycomm import PeerLostError, TransportError

everywhere = pytest.mark.parametrize("transport", EVERYWHERE)
LARGE = 200_000


class Alarm(Exception):
    """What a program's own signal handler raises."""


def raise_alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm


def be_interrupted(rank: int, path: str) -> None:
    for handler, error in ((signal.default_int_handler, KeyboardInterrupt), (raise_alarm, Alarm)):
        group, flag = pycomm.new_group([0, 1, 2]), Path(f"{path} by {error.__name__}")
        check_sum(group)
        if rank == 1:
            signal.signal(signal.SIGINT, handler)
            with pytest.raises(error):
                interrupt_once_in_a_call()
                check_sum(group, LARGE)
            flag.touch()
            with pytest.raises(PeerLostError, match="rank 1 .* was interrupted"):  # it is out of step, and says so
                check_sum(group)
        elif rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 .* was interrupted") as caught:  # and no timeout
                check_sum(group, LARGE)
            assert caught.value.rank == 1
        else:  # comes later, and is told at once
            wait_until(flag.exists)
            with pytest.raises(PeerLostError, match="rank 1 .* was interrupted"):
                check_sum(group, LARGE)
        check_sum(pycomm.new_group([0, 1, 2], group=group))


def be_interrupted_twice(rank: int, path: str) -> None:
    """A rank is interrupted in a call, and again before it has told the others; then it closes the group. They come to
    that call later.
    """
    group, has_left = pycomm.new_group([0, 1, 2]), Path(path)
    check_sum(group)
    if rank == 1:

        def be_interrupted_again() -> None:
            raise KeyboardInterrupt

        group.transport.abandon = be_interrupted_again  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            interrupt_once_in_a_call()
            check_sum(group, LARGE)
        group.close()
        has_left.touch()
    else:
        wait_until(has_left.exists)
        with pytest.raises(PeerLostError) as caught:  # and no timeout
            check_sum(group, LARGE)
        assert caught.value.rank == 1
    check_sum(pycomm.new_group([0, 1, 2]))


@everywhere
def test_who_is_interrupted_again_before_it_has_told_the_others_has_not_made_its_call(
    transport: str, tmp_path: Path
) -> None:
    run_ranks(3, be_interrupted_twice, str(tmp_path / "left"), transport=transport, timeout_s=60.0)


def fail_on_its_own(rank: int) -> None:
    """Errors of a rank's own, before anything was sent and after everything was, leave the ranks in step."""
    group = pycomm.get_group()

    def refuse(_collective: object, is_complete: bool, *, at_the_end: bool) -> None:
        if is_complete == at_the_end:
            raise Alarm

    for at_the_end in (False, True):
        hook = partial(refuse, at_the_end=at_the_end)
        group.add_data_hook(hook)
        with pytest.raises(Alarm):
            check_sum()
        group.remove_data_hook(hook)
    with pytest.raises((TypeError, pycomm.ConfigError)):
        pycomm.all_reduce("no tensor")
    check_sum()


def interrupt_and_fail(rank: int, path: str) -> None:
    fail_on_its_own(rank)
    be_interrupted(rank, path)


@everywhere
def test_ctrl_c_or_a_handler_that_raises_ends_a_blocked_call_and_the_others_are_told(
    transport: str, tmp_path: Path
) -> None:
    run_ranks(3, interrupt_and_fail, str(tmp_path / "interrupted"), transport=transport)


def interrupt_a_receive(rank: int) -> None:
    if rank == 0:
        got = torch.zeros(3)
        work = pycomm.irecv(got, 1)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            work.wait()
        pycomm.send(torch.ones(1), 1)
        work.wait()  # a message does not put the ranks out of step: it comes yet
        assert (got == 7).all()
    else:
        pycomm.recv(torch.zeros(1), 0)
        pycomm.send(torch.full((3,), 7.0), 0)
    check_sum()


def close_early(rank: int) -> None:
    check_sum()
    if rank == 1:
        return
    time.sleep(0.05)  # before or after it has closed: the error is the same
    with pytest.raises(PeerLostError, match="rank 1 .* has closed the group") as caught:
        pycomm.barrier()
    assert caught.value.rank == 1


def use_what_is_the_parents(group: pycomm.Group, message: pycomm.Work, work: pycomm.Work | None) -> None:
    for wait in (message.wait, message.is_completed, *([] if work is None else [work.wait])):
        with pytest.raises(TransportError, match="forked"):
            wait()
    with pytest.raises(TransportError, match="forked"), group:  # which closes nothing of the parent's
        pycomm.all_reduce(torch.ones(3), group=group)


def fork_a_child(rank: int) -> None:
    check_sum()
    group = pycomm.new_group([0, 1])
    for is_under_way in (False, True):
        late = torch.ones(3)
        work = pycomm.all_reduce(late, group=group, async_op=True) if is_under_way and rank == 0 else None
        message = pycomm.irecv(torch.ones(3), 1 - rank)
        run_forked(partial(use_what_is_the_parents, group, message, work))
        pycomm.barrier()  # so that nothing had come
        pycomm.send(torch.ones(3), 1 - rank)
        message.wait()
        if work is not None:
            work.wait()
        elif is_under_way:
            pycomm.all_reduce(late, group=group)
        check_sum(numel=LARGE)
        check_sum(group)


def use_two_threads(rank: int, path: str) -> None:
    check_sum()
    if rank == 1:
        wait_until(Path(path).exists)
        return check_sum(numel=LARGE)
    thread = threading.Thread(target=check_sum, args=(None, LARGE))
    thread.start()
    wait_until(is_in_a_call)
    with pytest.raises(TransportError, match="another thread"):
        check_sum(numel=LARGE)
    Path(path).touch()
    thread.join()


def drop_handles(rank: int) -> None:
    tensors = [torch.full((LARGE,), 2.0) for _ in range(5)]
    for t in tensors:
        pycomm.all_reduce(t, async_op=True)
    pycomm.barrier()
    assert all((t == 4).all() for t in tensors)
    # Buffers too: the call keeps them until it is done.
    for _ in range(20):
        pycomm.all_reduce(torch.ones(LARGE), async_op=True)
    check_sum()
    pycomm.isend(torch.ones(LARGE), 1 - rank)
    got = torch.zeros(LARGE)
    pycomm.recv(got, 1 - rank)
    assert (got == 1).all()
    pycomm.barrier()


def do_one_after_the_other(rank: int, path: str) -> None:
    interrupt_a_receive(rank)
    fork_a_child(rank)
    use_two_threads(rank, path)
    drop_handles(rank)
    close_early(rank)


@everywhere
def test_receives_are_interrupted_children_refused_threads_told_handles_dropped_and_groups_left(
    transport: str, tmp_path: Path
) -> None:
    """Five laws in one job: what takes time is to start it."""
    run_ranks(2, do_one_after_the_other, str(tmp_path / "was refused"), transport=transport)
