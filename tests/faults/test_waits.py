"""Waiting for a rank that is slow, stopped, late or broken in its own code: patient and cheap."""

from __future__ import annotations

import gc
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import EVERYWHERE, MPI, RANKS, STOPPED_S, STOPS, TRANSPORTS, VICTIM, victim_of

import pycomm
from harness import check_sum, interrupt_once, run_ranks, wait_until
from pycomm import CollectiveTimeoutError, PeerLostError
from pycomm.collectives.context import resolve
from pycomm.fault import InjectedFault, fail_at, inject
from pycomm.transport._watched import Lateness

STOP_JOBS = [*((each, ranks) for each in TRANSPORTS for ranks in (2, 4)), *((each, 3) for each in MPI)]


def wait_out(rank: int) -> None:
    """A rank is stopped for a while at every moment, and once sleeps: the results are right, nobody gets an error."""
    victim = victim_of(pycomm.world_size())
    faults = {when: ("stop", *stop) for when, stop in STOPS.items()} | {"asleep": ("slow", "before", 0.0, 1000)}
    for when, (how, moment, delay_s, numel) in faults.items():
        check_sum()
        begin = time.monotonic()
        with inject(fail_at(victim, 2, how, moment=moment, delay_s=delay_s, lasts_s=STOPPED_S)):
            for _ in range(3):
                check_sum(numel=numel)
        check_sum()  # the victim has been struck by now, though possibly when the others were through with the rest
        took_s = time.monotonic() - begin
        assert took_s >= STOPPED_S, (when, took_s)  # a hang is the harness's to find: busy machines take their time


@pytest.mark.parametrize(
    ("transport", "ranks"), [pytest.param(*each.values, ranks, marks=each.marks) for each, ranks in STOP_JOBS]
)
def test_a_stopped_or_slow_rank_is_no_error(transport: str, ranks: int) -> None:
    run_ranks(ranks, wait_out, transport=transport)


def wait_for_a_sleeper(rank: int) -> float:
    """Returns the share of a core that waiting took; of the best of ten turns: other work takes part."""
    share = torch.ones(1)
    for _ in range(10):
        pycomm.barrier()
        if rank == VICTIM:
            time.sleep(1.0)
        begin, before_s = time.monotonic(), time.process_time()
        pycomm.barrier()
        share[0] = (time.process_time() - before_s) / max(1.0, time.monotonic() - begin)
        pycomm.all_reduce(share, pycomm.ReduceOp.MAX)
        if share < 0.2:
            break
    return share.item()


@pytest.mark.parametrize("transport", TRANSPORTS + MPI)
def test_waiting_burns_no_core(transport: str) -> None:
    shares = run_ranks(RANKS, wait_for_a_sleeper, transport=transport)
    assert max(shares) < 0.2, shares  # how little it really is, benchmarks/faults.py says


def break_in_own_code(rank: int) -> None:
    """The victim's own code raises, which ends its group; the others are told of it."""
    if rank == VICTIM:
        with pytest.raises(InjectedFault), inject(fail_at(VICTIM, 2, "raise")):
            check_sum()
            check_sum()
        pycomm.finalize()  # what leaving `with pycomm.init()` does
        return
    check_sum()
    with pytest.raises(PeerLostError, match=f"rank {VICTIM}") as caught:
        check_sum()
    assert caught.value.rank == VICTIM
    survivors = pycomm.new_group([member for member in range(RANKS) if member != VICTIM])
    check_sum(survivors)


@pytest.mark.parametrize("transport", TRANSPORTS + MPI)
def test_an_exception_in_one_ranks_code_is_an_error_in_the_others(transport: str) -> None:
    run_ranks(RANKS, break_in_own_code, transport=transport)


def run_out_of_time_inside_a_host(rank: int, transport: str) -> None:
    """Two hosts of two, for ``mixed``: one waits inside its host, and those of the other are told by its rank."""
    check_sum()
    told = pycomm.new_group()
    if rank == 3:
        pycomm.recv(torch.empty(1), 2, group=told)
    with pytest.raises(CollectiveTimeoutError) as caught:
        pycomm.all_reduce(torch.ones(200_000), timeout=0.2 if rank == 2 else None)
    if rank == 2:
        pycomm.send(torch.ones(1), 3, group=told)
    awaited = r", waiting for rank 3 \(pid" if transport in ("shm", "mixed") else ""
    expected = f"did not finish within 0.2 s{awaited}" if rank == 2 else rf"rank {rank} of 4: rank 2 \(pid"
    assert re.search(expected, str(caught.value))
    check_sum(pycomm.new_group())


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_timeout_inside_a_host_is_everybodys(transport: str) -> None:
    run_ranks(4, run_out_of_time_inside_a_host, transport, transport=transport)


def run_out_of_time(rank: int) -> None:
    check_sum()
    told = pycomm.new_group(range(3))
    if rank == VICTIM:
        pycomm.recv(torch.empty(1), 0, group=told)  # which says that its time was over
    with pytest.raises(CollectiveTimeoutError) as caught:
        pycomm.all_reduce(torch.ones(200_000), timeout=0.2 if rank == 0 else None)
    if rank == 0:
        pycomm.send(torch.ones(1), VICTIM, group=told)
    assert ("within 0.2 s" if rank == 0 else "rank 0") in str(caught.value)
    group = pycomm.new_group(range(3))
    check_sum(group)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_a_timeout_is_everybodys_and_a_new_group_works(transport: str) -> None:
    run_ranks(3, run_out_of_time, transport=transport)


def leave_each_verb(rank: int, path: str) -> None:
    """Rank 1 agrees to a call that no frame holds, and does not come to make it: rank 0, wherever it waits, can be
    interrupted.
    """
    numel = 1 << 20
    half = slice(numel // 2)
    for verb, call in {
        "all_reduce": pycomm.all_reduce,
        "reduce": partial(pycomm.reduce, dst=0),
        "reduce_scatter_single": lambda t, **named: pycomm.reduce_scatter_tensor(t[half].clone(), t, **named),
        "broadcast": partial(pycomm.broadcast, src=1),
        "all_gather_single": lambda t, **named: pycomm.all_gather_into_tensor(t, t[half].clone(), **named),
        "all_to_all_single": lambda t, **named: pycomm.all_to_all_single(t.clone(), t, **named),
        "gather": lambda t, **named: pycomm.gather(t, [t.clone(), t.clone()] if rank == 0 else None, 0, **named),
        "scatter": lambda t, **named: pycomm.scatter(t, [t.clone(), t.clone()] if rank == 1 else None, 1, **named),
    }.items():
        group = pycomm.new_group([0, 1])
        has_agreed, has_left = Path(f"{path} {verb} agreed"), Path(f"{path} {verb} left")
        if rank == 0:
            interrupt_once(has_agreed.exists, after_s=0.1)
            with pytest.raises(KeyboardInterrupt):
                call(torch.ones(numel), group=group)
            has_left.touch()
            continue

        def do_not_come(*_: Any, agreed: Path = has_agreed, left: Path = has_left, **__: Any) -> None:
            agreed.touch()
            wait_until(left.exists)
            raise InjectedFault("rank 0 has left")

        setattr(group.transport, verb, do_not_come)
        with pytest.raises(InjectedFault):
            call(torch.ones(numel), group=group)
    check_sum(pycomm.new_group([0, 1]))


@pytest.mark.parametrize("transport", [param for param in TRANSPORTS + MPI if param.values[0] != "shm"])
def test_a_wait_in_another_library_can_be_left_whatever_the_verb(transport: str, tmp_path: Path) -> None:
    run_ranks(2, leave_each_verb, str(tmp_path / "left"), transport=transport)


def come_late(rank: int) -> None:
    """The others have given up, but what they sent for the call is there: it is all that a small one needs."""
    check_sum()
    told, tensor = pycomm.new_group(range(3)), torch.full((10,), float(rank))
    limit_s = None if rank == VICTIM else 1.5
    if rank == VICTIM:
        for peer in {0, 1, 2} - {VICTIM}:
            pycomm.recv(torch.empty(1), peer, group=told)
    with pytest.raises(CollectiveTimeoutError):
        pycomm.all_reduce(tensor, timeout=limit_s)
    assert tensor.eq(rank).all()
    if rank != VICTIM:
        pycomm.send(torch.ones(1), VICTIM, group=told)
    check_sum(pycomm.new_group(range(3)))


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_who_comes_late_raises_as_the_others_did(transport: str) -> None:
    run_ranks(3, come_late, transport=transport)


def look_late(rank: int) -> None:
    """The others' next call has failed before this rank, in one that succeeded, looks whether they gave it up."""
    check_sum()
    told = pycomm.new_group(range(RANKS))
    if rank == VICTIM:
        transport: Any = resolve(None).transport
        watched = getattr(transport, "outer", transport)
        look = watched.check_given_up

        def look_after_the_others(verb: str) -> None:
            for peer in set(range(RANKS)) - {VICTIM}:
                pycomm.recv(torch.empty(1), peer, group=told)
            look(verb)

        watched.check_given_up = look_after_the_others
        Lateness.begin = lambda *_: True  # type: ignore[method-assign]
    pycomm.barrier()
    if rank == VICTIM:
        assert transport.is_broken, "it did look"
    with pytest.raises(CollectiveTimeoutError):
        pycomm.barrier(timeout=None if rank == VICTIM else 0.5)
    if rank != VICTIM:
        pycomm.send(torch.ones(1), VICTIM, group=told)


@pytest.mark.parametrize("transport", [param for param in EVERYWHERE if param.values[0] != "shm"])
def test_a_call_that_succeeded_for_the_others_succeeds_for_who_looks_late(transport: str) -> None:
    run_ranks(RANKS, look_late, transport=transport)


def give_up_with_shared_buffers(rank: int) -> None:
    """A rank that was stopped in such a call would write into this rank's memory when it goes on."""
    aside = pycomm.new_group()
    assert aside is not None
    if rank == 1:
        return pycomm.barrier(aside)

    def place_of_new() -> int:
        return pycomm.empty(1 << 16, shared=True).data_ptr()  # and given back

    place = place_of_new()
    assert place_of_new() == place
    tensor = pycomm.empty(1 << 16, shared=True)
    assert tensor.data_ptr() == place
    with pytest.raises(CollectiveTimeoutError):
        pycomm.all_reduce(tensor, timeout=0.2)
    del tensor
    gc.collect()
    assert place_of_new() != place
    pycomm.barrier(aside)


def test_memory_that_a_late_rank_may_write_to_is_not_used_again() -> None:
    run_ranks(2, give_up_with_shared_buffers)
