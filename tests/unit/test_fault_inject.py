"""Faults as data: what a fault may be, whom it strikes and when; on ranks that are threads."""

from __future__ import annotations

import time

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import ConfigError, PeerLostError
from pycomm.collectives.short_cuts import not_now
from pycomm.fault import InjectedFault, fail_at, inject


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"how": "explode"}, "unknown how 'explode'; known: kill, segv"),
        ({"how": "kill", "moment": "during"}, "unknown moment 'during'; known: before, inside, after"),
        ({"how": "raise", "moment": "inside"}, "expected moment 'before' or 'after', got 'inside'"),
        ({"how": "kill", "op_number": 0}, "op_number >= 1"),
        ({"how": "kill", "delay_s": -1.0}, "times >= 0"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fail_at(**{"rank": 0, "op_number": 1, **arguments})  # type: ignore[arg-type]


def refuse(rank: int) -> None:
    with pytest.raises(ConfigError, match="threads of one"):
        inject(fail_at(0, 1, "kill"))
    with pytest.raises(ConfigError, match=r"ranks 0\.\.1, got 2"):
        inject(fail_at(2, 1, "slow"))
    pycomm.barrier()


def test_a_fault_that_the_transport_cannot_suffer_is_refused() -> None:
    run_ranks(2, refuse, transport="local")


def raise_in_the_third(rank: int) -> None:
    injection = inject(fail_at(1, 3, "raise", moment="after"))
    for number in range(1, 5):
        if rank == 1 and number == 3:
            with pytest.raises(InjectedFault, match="rank 1 at collective 3"):
                pycomm.all_reduce(torch.ones(3))
        else:
            pycomm.all_reduce(torch.ones(3))
    assert injection.op_number == 4
    injection.detach()
    injection.detach()
    pycomm.barrier()
    assert injection.op_number == 4


def test_it_strikes_its_rank_at_its_collective_alone() -> None:
    run_ranks(2, raise_in_the_third, transport="local")


def lose_a_connection(rank: int) -> None:
    with inject(fail_at(1, 2, "drop_connection")):
        pycomm.barrier()
        with pytest.raises((PeerLostError, pycomm.TransportError)):
            pycomm.barrier()


def test_a_dropped_connection_is_an_error_on_both_sides() -> None:
    run_ranks(2, lose_a_connection, transport="local")


def be_late(rank: int) -> tuple[float, float]:
    begin = time.monotonic()
    with inject(fail_at(0, 1, "slow", lasts_s=0.2)):
        pycomm.barrier()
    return begin, time.monotonic()


def test_a_slow_rank_is_waited_for() -> None:
    (begin, _), *_ = spans = run_ranks(2, be_late, transport="local")  # the slow rank's begin counts, for all of them
    assert all(end - begin >= 0.2 for _, end in spans), spans


def watch_the_short_cut(rank: int) -> None:
    group = pycomm.new_group([0])
    assert group.fast_all_reduce is not not_now
    with inject(group=group):
        assert group.fast_all_reduce is not_now, "a call would pass the faults by"
    assert group.fast_all_reduce is not not_now


def test_short_cuts_come_back() -> None:
    run_ranks(1, watch_the_short_cut)
