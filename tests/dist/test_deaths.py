"""A rank that dies, leaves, is interrupted or is late: what the others are told, on every transport of processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import pycomm
from harness import run_ranks, transport_params
from pycomm import CollectiveTimeoutError, PeerLostError, TransportError

PROCESSES = [param for param in transport_params() if param.values[0] != "local"]
everywhere = pytest.mark.parametrize("transport", PROCESSES)
LARGE = 200_000


def check_sum(ranks: int, numel: int = 5, group: Any = None) -> None:
    t = torch.full((numel,), 2.0)
    pycomm.all_reduce(t, group=group)
    assert (t == 2.0 * ranks).all()


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)


FATES = {"exit": "exited with status 3", "kill": "killed by SIGKILL", "segv": "killed by SIGSEGV"}


def lose_rank_2(rank: int, how: str, numel: int) -> float:
    pids = torch.zeros(4, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    check_sum(4)
    if rank == 2:
        time.sleep(0.1)
        die(how)
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        check_sum(4, numel)
    took_s = time.monotonic() - begin - 0.1
    text = str(caught.value)
    assert caught.value.rank == 2, text
    # MPICH's launcher may have collected the process, and older kernels do not say more then.
    assert f"lost rank 2 (pid {pids[2].item()}): {FATES[how]}" in text or "its process has ended" in text, text
    assert f"on group 'world', rank {rank} of 4" in text and "all_reduce #" in text, text
    with pytest.raises(PeerLostError) as again:  # and so does every later call, at once
        pycomm.barrier()
    assert again.value.rank == 2
    survivors = pycomm.new_group([0, 1, 3])
    check_sum(3, group=survivors)
    check_sum(3, 70_000, group=survivors)
    return took_s


def ways_to_die() -> list[Any]:
    """MPICH's launcher ends all ranks when one was killed; it lets them live when one has exited."""
    ways = [("exit", LARGE), ("kill", 5), ("segv", LARGE)]
    return [
        pytest.param(*param.values, *way, marks=param.marks)
        for param in PROCESSES
        for way in ways
        if param.values[0] != "mpi" or way[0] == "exit"
    ]


@pytest.mark.parametrize(("transport", "how", "numel"), ways_to_die())
def test_survivors_name_the_dead_rank_and_go_on_without_it(transport: str, how: str, numel: int) -> None:
    took_s = run_ranks(4, lose_rank_2, how, numel, transport=transport, casualties=[2])
    assert max(each for each in took_s if each is not None) < 5  # 0.2 s where nothing else runs


def lose_a_partner(rank: int) -> None:
    check_sum(2)
    if rank == 1:
        time.sleep(0.05)
        die("exit")
    with pytest.raises(PeerLostError) as caught:
        pycomm.recv(torch.empty(3), 1)
    assert caught.value.rank == 1


@everywhere
def test_a_message_from_a_dead_rank_raises(transport: str) -> None:
    run_ranks(2, lose_a_partner, transport=transport, casualties=[1])


def lose_a_partner_of_a_plan(rank: int) -> None:
    t = torch.ones(LARGE)
    pycomm.all_reduce(t, algorithm="direct")
    if rank == 2:
        time.sleep(0.05)
        die("exit")
    with pytest.raises(PeerLostError) as caught:
        for _ in range(1000):
            pycomm.all_reduce(t, algorithm="direct")
    assert caught.value.rank == 2


@everywhere
def test_a_death_in_the_middle_of_a_plan_raises(transport: str) -> None:
    run_ranks(3, lose_a_partner_of_a_plan, transport=transport, casualties=[2])


def be_interrupted(rank: int) -> None:
    check_sum(3)
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            check_sum(3, LARGE)
        assert time.monotonic() - begin < 2.0  # 0.4 s where nothing else runs
        with pytest.raises(PeerLostError, match="rank 1 .* was interrupted"):  # the group is out of step, and says so
            check_sum(3)
    elif rank == 0:
        with pytest.raises(PeerLostError, match="rank 1 .* was interrupted") as caught:  # and no timeout
            check_sum(3, LARGE)
        assert caught.value.rank == 1
    else:  # comes later, and is told at once
        time.sleep(0.5)
        with pytest.raises(PeerLostError, match="rank 1 .* was interrupted"):
            check_sum(3, LARGE)
    again = pycomm.new_group([0, 1, 2])
    check_sum(3, group=again)


@everywhere
def test_ctrl_c_ends_a_blocked_call_and_the_others_are_told(transport: str) -> None:
    run_ranks(3, be_interrupted, transport=transport)


def interrupt_a_receive(rank: int) -> None:
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        got = torch.zeros(3)
        work = pycomm.irecv(got, 1)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        pycomm.send(torch.ones(1), 1)
        work.wait()  # a message does not put the ranks out of step: it comes yet
        assert (got == 7).all()
    else:
        pycomm.recv(torch.zeros(1), 0)
        pycomm.send(torch.full((3,), 7.0), 0)
    check_sum(2)


@everywhere
def test_ctrl_c_ends_a_receive_and_the_message_may_still_come(transport: str) -> None:
    run_ranks(2, interrupt_a_receive, transport=transport)


def run_out_of_time(rank: int) -> None:
    check_sum(2)
    if rank == 1:
        time.sleep(0.8)
    with pytest.raises(CollectiveTimeoutError) as caught:
        pycomm.all_reduce(torch.ones(LARGE), timeout=0.2 if rank == 0 else None)
    assert ("within 0.2 s" if rank == 0 else "rank 0") in str(caught.value)


@everywhere
def test_a_timeout_is_everybodys(transport: str) -> None:
    run_ranks(2, run_out_of_time, transport=transport)


def close_early(rank: int) -> None:
    check_sum(2)
    if rank == 1:
        return
    time.sleep(0.1)
    with pytest.raises(PeerLostError, match="rank 1 .* has closed the group") as caught:
        pycomm.barrier()
    assert caught.value.rank == 1


@everywhere
def test_a_rank_that_left_is_named(transport: str) -> None:
    run_ranks(2, close_early, transport=transport)


def fork_a_child(rank: int) -> None:
    check_sum(2)
    group = pycomm.new_group([0, 1])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            pycomm.all_reduce(torch.ones(3), group=group)
        except TransportError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check_sum(2, LARGE)
    check_sum(2, group=group)


@everywhere
def test_a_forked_child_is_not_a_rank(transport: str) -> None:
    run_ranks(2, fork_a_child, transport=transport)


def use_two_threads(rank: int) -> None:
    check_sum(2)
    if rank == 1:
        time.sleep(0.4)
        return check_sum(2, LARGE)
    thread = threading.Thread(target=check_sum, args=(2, LARGE))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(TransportError, match="another thread"):
        check_sum(2, LARGE)
    thread.join()


@everywhere
def test_two_threads_in_one_group_are_told(transport: str) -> None:
    run_ranks(2, use_two_threads, transport=transport)


def drop_handles(rank: int) -> None:
    tensors = [torch.full((LARGE,), 2.0) for _ in range(5)]
    for t in tensors:
        pycomm.all_reduce(t, async_op=True)
    pycomm.barrier()
    assert all((t == 4).all() for t in tensors)
    # Buffers too: the call keeps them until it is done.
    for _ in range(20):
        pycomm.all_reduce(torch.ones(LARGE), async_op=True)
    check_sum(2)
    pycomm.isend(torch.ones(LARGE), 1 - rank)
    got = torch.zeros(LARGE)
    pycomm.recv(got, 1 - rank)
    assert (got == 1).all()
    pycomm.barrier()


@everywhere
def test_dropped_handles_are_safe(transport: str) -> None:
    run_ranks(2, drop_handles, transport=transport)
