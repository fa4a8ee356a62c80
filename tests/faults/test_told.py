"""A rank that leaves is told of to all that it leaves waiting, also to those who wait for one who waited for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import EVERYWHERE

import pycomm
from harness import check_sum, run_ranks, wait_until
from pycomm import PeerLostError

# Of rank 3 of 4, over processes and where ranks are threads.
CLOSED = (
    r"of {1}{4}: rank {0} \(pid \d+{2}\) has closed the group|"
    r"rank {0}{3} is gone \(it closed the group\) while rank \d of {1}"
)


def be_told(
    call: Callable[..., Any], *args: Any, of: int = 3, ranks: int = 4, globally: int | None = None, **kwargs: Any
) -> None:
    """Calls what is to raise that rank ``of`` of so many has left, which is ``globally`` another one where given."""
    besides = ["", "", ""]
    if globally is not None:  # this rank's own number there may be another one, too
        besides = [f", global rank {globally}", rf" \(global rank {globally}\)", r"(?: \(global rank \d\))?"]
    with pytest.raises(PeerLostError, match=CLOSED.format(of, ranks, *besides)) as caught:
        call(*args, **kwargs)
    assert (caught.value.rank, caught.value.global_rank) == (of, of if globally is None else globally)


def receive(group: Any, source: int) -> None:
    pycomm.recv(torch.ones(5), group=group, group_src=source)


def wait_by_messages(rank: int, group: Any) -> None:
    """One waits for who leaves, a second for that one, a third for the second: who is told sends nothing any more."""
    be_told(receive, group, {0: 2, 1: 0, 2: 3}[rank])


def wait_for_a_message(rank: int, group: Any) -> None:
    """One waits for who leaves in a collective, the others for its message."""
    if rank == 2:
        be_told(pycomm.barrier, group)
    else:
        be_told(receive, group, {0: 2, 1: 0}[rank])


def wait_for_a_collective(rank: int, group: Any) -> None:
    """One waits for who leaves by a message, the others for it in a collective."""
    if rank == 2:
        be_told(receive, group, 3)
    else:
        be_told(pycomm.broadcast, torch.ones(5), group=group, group_src=2)


def wait_in_another_group(rank: int, group: Any, pair: Any, source: int | None) -> None:
    """One waits for who leaves in a group of the two, and goes on without it; nobody else ever asked who leaves."""
    if rank == 0:
        be_told(pycomm.barrier, pair, of=1, ranks=2, globally=3)
    else:
        be_told(receive, group, source)


def go_on_without(group: Any) -> None:
    check_sum(pycomm.new_group(range(3), group=group))  # in which the ranks tell who never asked
    with pytest.raises(PeerLostError, match="rank 3"):
        pycomm.barrier(group)


def leave_them_waiting(rank: int) -> None:
    groups: list[Any] = [pycomm.new_group(range(4)) for _ in range(5)]
    pair: Any = pycomm.new_group([0, 3])
    pycomm.barrier()  # all have them
    if rank == 3:
        for group in (*groups, pair):
            group.close()
    else:
        by_message, by_collective, across, first, any_rank = groups
        waits: list[tuple[Callable[..., None], Any, Any]] = [
            (wait_by_messages, by_message, ()),
            (wait_for_a_message, by_collective, ()),
            (wait_for_a_collective, across, ()),
            (wait_in_another_group, first, (pair, 0)),
            (wait_in_another_group, any_rank, (pair, None)),
        ]
        for wait, group, more in waits:
            wait(rank, group, *more)
            go_on_without(group)
    check_sum()
    if rank != 3:  # whose program is over
        wait_by_messages(rank, None)
        go_on_without(None)


@pytest.mark.parametrize("transport", ["local", *EVERYWHERE])
def test_whoever_waits_is_told_who_has_left(transport: str) -> None:
    run_ranks(4, leave_them_waiting, transport=transport, timeout_s=100.0)


WAITS: list[Callable[[Any], object]] = [  # in a group whose rank 1 does not come
    lambda pair: pycomm.all_reduce(torch.ones(5), group=pair),
    lambda pair: pycomm.all_reduce(torch.ones(50_000), group=pair, algorithm="ring"),
    lambda pair: pycomm.all_reduce(torch.ones(5), group=pair, async_op=True).wait(),
    lambda pair: receive(pair, 1),
    lambda pair: pycomm.all_gather_object([None] * pair.world_size, "x", group=pair),
    lambda pair: poll(pycomm.irecv(torch.ones(5), group=pair, group_src=1)),
    lambda pair: poll(pycomm.barrier(pair, async_op=True)),
]
WAITS_OF_TWO = [*WAITS, lambda pair: pycomm.recv(torch.ones(5), group=pair)]  # from anybody


def poll(work: Any) -> None:
    wait_until(work.is_completed)
    work.wait()


def wait_for_one_that_goes_on(rank: int) -> None:
    """Rank 3 leaves, of which one hears, and makes a group of those who live; rank 0 waits for it in another group."""
    rounds: list[tuple[int, Callable[[Any], object], Any, Any, Any]] = []
    for number, wait in enumerate(WAITS_OF_TWO):
        told = 1 + number % 2  # on the host of rank 0, or on another one
        whole = pycomm.new_group(range(4))
        rounds.append((told, wait, whole, *(pycomm.new_group(pair, group=whole) for pair in ([told, 3], [0, told]))))
    pycomm.barrier()  # all have them
    if rank == 3:
        for _, _, whole, _, _ in rounds:
            whole.close()
    for told, wait, whole, doomed, pair in rounds:
        if rank == told:
            be_told(pycomm.barrier, doomed, of=1, ranks=2, globally=3)
        elif rank == 0:
            be_told(wait, pair)
        if rank != 3:
            go_on_without(whole)
    check_sum()


@pytest.mark.parametrize("transport", ["local", *EVERYWHERE])
def test_who_waits_for_one_that_goes_on_is_told_why(transport: str) -> None:
    run_ranks(4, wait_for_one_that_goes_on, transport=transport, timeout_s=100.0)


def wait_together_for_one_that_goes_on(rank: int) -> None:
    """The same with two that wait for it, on its host and another one. One is told first, and gives up their call."""
    rounds: list[tuple[Callable[[Any], object], Any, Any, Any]] = []
    for wait in WAITS:
        whole = pycomm.new_group(range(4))
        rounds.append((wait, whole, *(pycomm.new_group(part, group=whole) for part in ([1, 3], range(3)))))
    pycomm.barrier()  # all have them
    if rank == 3:
        for _, whole, _, _ in rounds:
            whole.close()
    for wait, whole, doomed, three in rounds:
        if rank == 1:
            be_told(pycomm.barrier, doomed, of=1, ranks=2, globally=3)
        elif rank != 3:
            be_told(wait, three)  # not of one another
        if rank != 3:
            go_on_without(whole)
    check_sum()


@pytest.mark.parametrize("transport", ["local", *EVERYWHERE])
def test_all_who_wait_for_one_that_goes_on_are_told_why(transport: str) -> None:
    run_ranks(4, wait_together_for_one_that_goes_on, transport=transport, timeout_s=100.0)


def leave_who_makes_a_group(rank: int) -> None:
    """Rank 3 leaves. So does rank 1, once told, as who joins the next generation does; the others go on."""
    whole: Any = pycomm.new_group(range(4))
    pycomm.barrier()  # all have it
    if rank != 3:
        be_told(pycomm.barrier, whole)
    if rank in (1, 3):
        whole.close()
        pycomm.recv(torch.ones(1), 0)  # it lives
        return
    be_told(pycomm.new_group, range(3), group=whole, of=1)  # both, and not of the other one, which gives the group up
    pair: Any = pycomm.new_group([0, 2], group=whole)
    pycomm.barrier(pair)
    if rank == 0:
        for other in (1, 3):
            pycomm.send(torch.ones(1), other)


@pytest.mark.parametrize("transport", ["local", *EVERYWHERE])
def test_who_makes_a_group_is_told_of_one_that_has_left_the_old_one(transport: str) -> None:
    run_ranks(4, leave_who_makes_a_group, transport=transport, timeout_s=100.0)


def make_the_second_of_two(rank: int) -> None:
    """Rank 4 leaves. Of those who go on two make a group of all of them, the others first one with one of these."""
    whole: Any = pycomm.new_group(range(5))
    pycomm.barrier()  # all have it
    if rank == 4:
        whole.close()
        pycomm.recv(torch.ones(1), 0)  # it lives
        return
    be_told(pycomm.barrier, whole, of=4, ranks=5)
    if rank < 2:
        be_told(pycomm.new_group, range(3), group=whole, of=4, ranks=5)  # not of each other
    pycomm.barrier(pycomm.new_group(range(4), group=whole))
    if rank == 0:
        pycomm.send(torch.ones(1), 4)


@pytest.mark.parametrize("transport", ["local", *EVERYWHERE])
def test_who_makes_a_group_that_others_give_up_is_told_why(transport: str) -> None:
    run_ranks(5, make_the_second_of_two, transport=transport, timeout_s=100.0)
