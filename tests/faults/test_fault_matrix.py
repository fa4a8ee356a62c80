"""One rank of two, three or four dies, at every moment: the others raise, name it, and go on without it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import EVERYWHERE, MPI, RANKS, TRANSPORTS, VICTIM, survive, victim_of

import pycomm
from harness import check_sum, interrupt_once_in_a_call, run_ranks, wait_until
from pycomm import PeerLostError
from pycomm.fault import fail_at, inject

# Every way at every moment in every world would be 36 jobs a transport, and what a rank died of is told by the kernel
# alone.
WAYS = [
    ("kill", "before", 4),
    ("kill", "while a peer waits", 4),
    ("kill", "in the middle of 64 MiB", 3),
    ("kill", "after", 2),
    ("segv", "in the middle of 64 MiB", 4),
    ("segv", "while a peer waits", 3),
    ("exit", "in the middle of 64 MiB", 2),
    ("exit", "before", 4),
]


@pytest.mark.parametrize(("how", "when", "ranks"), WAYS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_name_the_dead_rank_and_go_on_without_it(transport: str, how: str, when: str, ranks: int) -> None:
    run_ranks(ranks, survive, how, when, transport=transport, casualties=[victim_of(ranks)])


@pytest.mark.parametrize("when", ["before", "while a peer waits", "in the middle of 64 MiB"])
@pytest.mark.parametrize("transport", MPI)
def test_survivors_name_the_dead_rank_also_under_mpi(transport: str, when: str) -> None:
    """Of a rank that exits: MPICH's launchers end all the others within moments of one that a signal killed."""
    run_ranks(RANKS, survive, "exit", when, transport=transport, casualties=[VICTIM])


def lose_a_partner(rank: int) -> None:
    """A receive, and after that a plan, of a rank that dies."""
    check_sum()
    inner = pycomm.new_group([0, 1, 2])
    t = torch.ones(200_000)
    if rank != VICTIM:
        outer = pycomm.new_group([0, 1])  # made by those who stay; the victim takes part in making it
    else:
        pycomm.new_group([0, 1])
    pycomm.all_reduce(t, group=inner, algorithm="direct")
    if rank == VICTIM:
        with inject(fail_at(VICTIM, 1, "exit", moment="inside", delay_s=0.05), group=inner):
            while True:
                pycomm.all_reduce(t, group=inner, algorithm="direct")
    with pytest.raises(PeerLostError) as caught:
        while True:
            pycomm.all_reduce(t, group=inner, algorithm="direct")
    assert caught.value.rank == VICTIM and "all_reduce" in str(caught.value), caught.value
    with pytest.raises(PeerLostError) as caught:  # and no timeout
        pycomm.recv(torch.empty(3), VICTIM)
    assert caught.value.rank == VICTIM, caught.value
    check_sum(outer)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_plan_and_a_message_with_a_dead_rank_raise(transport: str) -> None:
    run_ranks(3, lose_a_partner, transport=transport, casualties=[VICTIM])


def end_while_a_group_is_made(rank: int) -> None:
    """A rank ends once the ranks have agreed to make a group; the others name it as the old group numbers it."""
    check_sum()
    if rank == VICTIM:
        pycomm.get_group().transport.split = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]
    if rank == 0:
        assert not pycomm.new_group([1, 2, 3]), "it is no member, and needs nobody"
    else:
        with pytest.raises(PeerLostError, match=f"new_group .*rank {VICTIM}") as caught:  # and no timeout
            pycomm.new_group([1, 2, 3])
        assert caught.value.rank == VICTIM
    check_sum(pycomm.new_group([0, 1, 3]))


@pytest.mark.parametrize("transport", [param for param in TRANSPORTS + MPI if param.values[0] != "shm"])
def test_a_rank_that_ends_while_a_group_is_made_is_named(transport: str) -> None:
    run_ranks(RANKS, end_while_a_group_is_made, transport=transport, casualties=[VICTIM])


def be_interrupted_while_a_group_is_made(rank: int, path: str, moment: str) -> None:
    """One rank comes late to the making of a group, another is interrupted as it waits for it: before the ranks have
    agreed to make it, or after.
    """
    check_sum()
    transport = pycomm.get_group().transport
    split = transport.split
    if rank == 0:

        def be_interrupted(*arguments: Any, **named: Any) -> Any:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            return split(*arguments, **named)

        with pytest.raises(KeyboardInterrupt):
            if moment == "agreeing":
                interrupt_once_in_a_call()
            else:
                transport.split = be_interrupted  # type: ignore[method-assign]
            pycomm.new_group([0, 1])
        Path(path).touch()
    else:

        def come_late(*arguments: Any, **named: Any) -> Any:
            wait_until(Path(path).exists)
            return split(*arguments, **named)

        if moment == "agreeing":
            wait_until(Path(path).exists)
        transport.split = come_late  # type: ignore[method-assign]
        with pytest.raises(PeerLostError, match="rank 0 .* was interrupted"):
            pycomm.new_group([0, 1])
    transport.split = split  # type: ignore[method-assign]
    check_sum(pycomm.new_group([0, 1]))


@pytest.mark.parametrize("moment", ["agreeing", "making"])
@pytest.mark.parametrize("transport", [param for param in TRANSPORTS + MPI if param.values[0] != "shm"])
def test_ctrl_c_while_a_group_is_made_ends_it_for_all(transport: str, moment: str, tmp_path: Path) -> None:
    run_ranks(2, be_interrupted_while_a_group_is_made, str(tmp_path / "interrupted"), moment, transport=transport)
