"""What has to hold whatever breaks; the bodies of ranks that the tests of this directory run."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import pytest
import torch

import pycomm
from harness import check_sum, transport_params
from pycomm import PeerLostError
from pycomm.fault import fail_at, inject

VICTIM = 2
RANKS = 4
# Those whose ranks are processes. MPI starts them anew for each test, which takes seconds: it has fewer of them.
TRANSPORTS = [param for param in transport_params() if param.values[0] in ("shm", "torch")]
MPI = [param for param in transport_params() if param.values[0] == "mpi"]
EVERYWHERE = [param for param in transport_params() if param.values[0] != "local"]

# Seconds that a test waits before it calls a rank hung. What the times really are, benchmarks/faults.py says.
HUNG_S = 500.0


class Death(NamedTuple):
    """When a rank dies: the moment, so many seconds into it, all_reducing so many elements, with a peer so late."""

    moment: str
    delay_s: float = 0.0
    numel: int = 1000
    peer_sleeps_s: float = 0.0


DEATHS = {
    "before": Death("before"),
    "while a peer waits": Death("inside", 0.05, peer_sleeps_s=0.3),
    "in the middle of 64 MiB": Death("inside", 0.01, 16 << 20),
    "after": Death("after"),
}


class Stop(NamedTuple):
    """When a rank is stopped: the moment, so many seconds into it, all_reducing so many elements."""

    moment: str
    delay_s: float = 0.0
    numel: int = 1000


STOPS = {
    "before": Stop("before"),
    "inside a small one, whose end it may miss": Stop("inside", 0.001),
    "inside 64 MiB": Stop("inside", 0.02, 8 << 20),
    "after": Stop("after"),
}
STOPPED_S = 0.4


def reduce_until_lost(numel: int) -> PeerLostError:
    """Returns the error that ends a loop of all_reduces, each of which is right until then."""
    begin = time.monotonic()
    tensor = torch.empty(numel)
    while time.monotonic() - begin < HUNG_S:
        tensor.fill_(1.0)
        try:
            pycomm.all_reduce(tensor)
        except PeerLostError as error:
            return error
        assert (tensor == pycomm.world_size()).all(), "a wrong sum, without an error"
    raise AssertionError(f"no error within {HUNG_S} s")


def victim_of(ranks: int) -> int:
    """Returns the rank to strike: one in the middle where there is one."""
    return min(VICTIM, ranks - 1)


def survive(rank: int, how: str, when: str) -> None:
    """A rank dies in its third collective. The others name it, stay without a hang, and go on without it."""
    death, ranks = DEATHS[when], pycomm.world_size()
    victim = victim_of(ranks)
    pids = torch.zeros(ranks, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    fault = fail_at(victim, 3, how, moment=death.moment, delay_s=death.delay_s)
    with inject(fault):
        check_sum()
        check_sum()
        if rank == (victim + 1) % ranks:
            time.sleep(death.peer_sleeps_s)
        error = reduce_until_lost(death.numel)
    assert error.rank == victim, error
    assert f"rank {victim} (pid {pids[victim]}" in str(error), error
    assert f"rank {rank} of {ranks}" in str(error) and "all_reduce" in str(error), error
    with pytest.raises(PeerLostError) as again:  # and so does every later call
        pycomm.barrier()
    assert again.value.rank == victim
    survivors = pycomm.new_group([member for member in range(ranks) if member != victim])
    check_sum(survivors)
    check_sum(survivors, 100_003)
