"""A rank that dies while the ranks connect to each other costs them its restart, and no timeout."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from laws import TRANSPORTS

import pycomm
from harness import check_sum, run_ranks
from pycomm.collectives import init
from pycomm.fault import Membership, membership
from pycomm.transport import Patience

RANKS = 3
PATIENCE_S = 300.0  # longer than a busy machine stops anybody
AWAY_S = 0.3  # until it is started again: the others wait for it meanwhile, each where it got to


class Dies(Exception):
    """The incarnation of a rank that comes here is no more. Its process lives on, as its successor."""


def die(*_arguments: object) -> None:
    raise Dies


def die_connected(patience: Patience, store: dist.Store, name: str, *arguments: int, **words: str) -> list[str]:
    if name == "connected":
        raise Dies
    return meet(patience, store, name, *arguments, **words)


meet = Patience.meet
# Functions of a joining rank, and what they are for one that dies as it comes there.
MOMENTS = ((init, "exchange_hosts", die), (init, "_connect", die), (Patience, "meet", die_connected))


def come_back(rank: int, port: int, transport: str) -> list[float]:
    """Joins with each rank dying at each moment; returns how long each took."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    took_s = []
    membership._PATIENCE_S = PATIENCE_S
    for number, (moment, victim) in enumerate((moment, victim) for moment in MOMENTS for victim in (0, RANKS - 1)):
        job = dist.PrefixStore(str(number), store)
        member = Membership(rank, RANKS, job, transport=transport)
        begin = time.monotonic()
        if rank == victim:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Dies):
                patch.setattr(*moment)
                member.join()
            time.sleep(AWAY_S)
            member = Membership(rank, RANKS, job, transport=transport)
        generation = member.join()
        took_s.append(time.monotonic() - begin)
        assert generation.number == 2, f"{moment[1]} of rank {victim}"
        check_sum()
        pycomm.barrier()
        pycomm.finalize()
    return took_s


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_as_the_ranks_connect_costs_no_timeout(transport: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for took_s in run_ranks(RANKS, come_back, store.port, transport):
        assert max(took_s) < PATIENCE_S / 2, took_s
