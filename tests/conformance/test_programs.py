"""Programs of calls, and of streams' items, drawn at random, also with a rank lost.

``programs.py``, ``stream_programs.py`` and ``compression_programs.py`` also run by themselves, at length.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import compression_programs
import dist_losses
import dist_programs
import losses
import programs
import pytest
import stream_programs
import torch

import pycomm
from harness import check_sum, is_in_a_call, run_ranks, transport_params, wait_until


@pytest.mark.parametrize("transport", transport_params())
def test_programs(transport: str) -> None:
    run_ranks(3, programs.program, 1, 100, transport, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
@pytest.mark.parametrize("how", losses.HOW)
def test_programs_go_on_without_a_rank_that_is_lost(how: str, transport: str) -> None:
    losses.run(4 if transport == "mixed" else 3, 12, transport, how)  # two hosts of two


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_programs_of_items(transport: str) -> None:
    job = (programs.program, 4, 100, transport, stream_programs.StreamProgram)
    run_ranks(4 if transport == "mixed" else 3, *job, transport=transport)


@pytest.mark.parametrize(("transport", "ranks"), [("local", 2), ("shm", 3), ("mixed", 4)])
def test_programs_of_compressed_calls(transport: str, ranks: int) -> None:
    run_ranks(
        ranks, programs.program, ranks, 60, transport, compression_programs.CompressionProgram, transport=transport
    )


@pytest.mark.parametrize(("how", "transport"), [*zip(losses.HOW, ["mixed", "shm", "torch"], strict=True)])
@pytest.mark.parametrize("kind", [stream_programs.StreamProgram, compression_programs.CompressionProgram])
def test_programs_of_other_calls_go_on_without_a_rank_that_is_lost(
    kind: type[programs.Program], how: str, transport: str
) -> None:
    losses.run(4 if transport == "mixed" else 3, 15, transport, how, kind)


def dies_in_a_call_that_the_others_never_come_to(rank: int) -> None:
    other = pycomm.new_group()
    if rank == 1:
        work = pycomm.all_reduce(torch.ones(5), async_op=True)
        wait_until(is_in_a_call)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        work.wait()
    with pytest.raises(pycomm.PeerLostError):
        pycomm.barrier(other)
    check_sum(pycomm.new_group([0, 2]))


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_a_group_is_made_without_one_that_died_in_a_call_that_the_others_never_come_to(transport: str) -> None:
    run_ranks(3, dies_in_a_call_that_the_others_never_come_to, transport=transport, casualties=[1])


def waits_for_one_of_its_host_who_has_been_told(rank: int) -> None:
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 3"):
        if rank == 0:
            pycomm.recv(torch.ones(5), 1)
        else:
            pycomm.barrier()
    check_sum(pycomm.new_group([0, 1, 2]))


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_a_wait_inside_a_host_sees_a_death_on_another(transport: str) -> None:
    run_ranks(4, waits_for_one_of_its_host_who_has_been_told, transport=transport, casualties=[3])


def makes_a_group_with_one_who_has_been_told(rank: int) -> None:
    transport = pycomm.get_group().transport
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 3"):
        if rank == 0:
            transport.split([0, 1], 1, with_all=True)
        else:
            pycomm.barrier()
    check_sum(pycomm.new_group([0, 1, 2]))


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_a_group_that_is_made_with_all_ranks_is_not_once_one_is_lost(transport: str) -> None:
    run_ranks(4, makes_a_group_with_one_who_has_been_told, transport=transport, casualties=[3])


def makes_as_a_part_of_what_all_do_what_the_others_make_to_go_on(rank: int) -> None:
    """Rank 0 comes to its part of a ``split``, and hears of the loss there, long after rank 2 has."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world = pycomm.get_group()
    with pytest.raises(pycomm.PeerLostError, match="rank 1"):
        if rank == 0:
            hears_after(0.5, world.transport)
            world.transport.split([0, 2], world._subgroups._key_of([0, 2], True), with_all=True)
        else:
            pycomm.barrier()
    check_sum(pycomm.new_group([0, 2]))


def hears_after(delay_s: float, transport: Any) -> None:
    """Sees to it that making a group of ``transport`` looks at nobody for so long."""
    end_s = time.monotonic() + delay_s
    owner, name = (transport.watch, "look") if hasattr(transport, "watch") else (transport, "look_around")
    look = getattr(owner, name)
    setattr(owner, name, lambda *args: look(*args) if time.monotonic() > end_s else None)


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_those_who_go_on_do_not_take_another_s_part_of_a_split_for_their_group(transport: str) -> None:
    job = makes_as_a_part_of_what_all_do_what_the_others_make_to_go_on
    run_ranks(3, job, transport=transport, casualties=[1], timeout_s=60)


def makes_a_group_with_one_that_dies(rank: int, hears_of_it: bool = False) -> None:
    """``hears_of_it``: rank 0 looks around only after rank 2 has, which has left by then."""
    if hears_of_it and rank == 0:
        pycomm.get_group().transport.look_at_makers = lambda *_: None  # type: ignore[attr-defined]
    if rank in (1, 3):
        if rank == 3:
            time.sleep(0.5)  # once the others wait for it; if not yet, they see it as well
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 1"):
        pycomm.barrier()
    with pytest.raises(pycomm.PeerLostError, match="rank 3") as caught:
        pycomm.new_group([3, 2, 0], sort_ranks=False)
    assert caught.value.rank == 3
    check_sum(pycomm.new_group([0, 2]))


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_a_rank_that_dies_as_a_group_is_made_is_named_by_its_rank_in_the_old_one(transport: str) -> None:
    run_ranks(4, makes_a_group_with_one_that_dies, transport=transport, casualties=[1, 3])


def test_who_hears_that_another_one_has_left_names_the_rank_that_died() -> None:
    run_ranks(4, makes_a_group_with_one_that_dies, True, transport="torch", casualties=[1, 3])


def makes_a_group_of_the_living_before_it_is_told(rank: int, others: tuple[int, ...]) -> None:
    """As a step of its program, ``others`` as well, who have been told and go on without that one."""
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 3") as caught:
        if rank in others:
            pycomm.barrier()
        else:
            pycomm.new_group([0, *others][:2])
    assert caught.value.rank == 3
    check_sum(pycomm.new_group([0, 1, 2]))


@pytest.mark.parametrize("others", [(1, 2), (2, 1)])  # `mixed` has it on this host or on another one
@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_who_makes_a_group_of_the_living_is_told_by_those_who_make_another(transport: str, others: list[int]) -> None:
    run_ranks(
        4, makes_a_group_of_the_living_before_it_is_told, others, transport=transport, casualties=[3], timeout_s=60
    )


def hears_of_a_loss_only_inside_its_host(rank: int) -> None:
    """Rank 3 sees that its neighbour has left; of the death on the other host it learns while it makes a group."""
    transport: Any = pycomm.get_group().transport
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 1") as caught:
        if rank == 3:
            with pytest.raises(pycomm.TransportError):
                transport.inner.irecv(torch.ones(1), 0).wait()
            assert transport.is_broken  # and most often what other hosts have said has not come to it
            pycomm.new_group()
        else:
            pycomm.barrier()
    assert caught.value.rank == 1
    check_sum(pycomm.new_group([0, 2, 3]))


def test_a_group_that_is_broken_inside_a_host_alone_is_told_what_broke_it_on_another() -> None:
    run_ranks(4, hears_of_a_loss_only_inside_its_host, transport="mixed", casualties=[1], timeout_s=60)


def have_counted_differently(rank: int) -> None:
    """What a failure in the middle of making groups leaves behind: some ranks have made one that others have not."""
    world = pycomm.get_group()
    world._subgroups._calls += rank
    two = pycomm.new_group([2, 0], sort_ranks=False)
    with pycomm.new_group() as all_of_them:
        for group in (two, all_of_them):
            if isinstance(group, pycomm.Group):
                tensor = torch.ones(3)
                pycomm.all_reduce(tensor, group=group)
                assert (tensor == group.world_size).all()


@pytest.mark.parametrize("transport", transport_params())
def test_ranks_that_have_counted_differently_still_meet(transport: str) -> None:
    run_ranks(3, have_counted_differently, transport=transport)


def have_tried_differently(rank: int) -> None:
    """Some ranks have had a try at the survivors' group that others never came to."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 1"):
        pycomm.barrier()
    pycomm.get_group()._subgroups._made[(0, 2, 3), False] += rank
    for _ in range(2):
        check_sum(pycomm.new_group([0, 2, 3]))


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_survivors_meet_though_some_have_tried_more_often(transport: str) -> None:
    run_ranks(4, have_tried_differently, transport=transport, casualties=[1])


@pytest.mark.parametrize("transport", ["shm", "torch", "mixed"])
def test_programs_of_torch_distributed(tmp_path: Path, transport: str) -> None:
    ranks = 4 if transport == "mixed" else 3
    run_ranks(ranks, dist_programs.program, 4, 60, transport, str(tmp_path), transport=transport)


@pytest.mark.parametrize(("how", "transport"), [*zip(losses.HOW, ["torch", "mixed", "shm"], strict=True)])
def test_programs_of_torch_distributed_that_lose_a_rank_end(how: str, transport: str) -> None:
    dist_losses.run(4 if transport == "mixed" else 3, 21, transport, how)
