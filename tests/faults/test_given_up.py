"""gloo's collectives that a call gave up: nobody waits for them afterwards, and nothing keeps what they held."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType, TracebackType

import pytest
import torch
import torch.distributed as dist
from laws import RANKS

import pycomm
from harness import run_ranks
from pycomm.ops import native

PAIR = 2
SOON_S = 20.0  # far less than a call's time limit; gloo is given half a second
SHORT_S = 0.05
HANDLES = dist.Work, dist.ProcessGroup, dist.Store, native().GlooMessage


def handles_kept_by(error: BaseException) -> list[object]:
    """Returns what of torch's ``error`` keeps through the calls that it ended: their variables, and their closures."""
    ways = BaseException, TracebackType, FrameType, FunctionType, MethodType, CellType, partial, tuple, list
    found, left, seen = [], [error], set()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            found += [each] if isinstance(each, HANDLES) else []
            left += gc.get_referents(each) if isinstance(each, ways) else []
    return found


def keep_errors_of_closed_groups(rank: int, are_gone: bool) -> None:
    """Whoever keeps an error does not keep torch's group with it: it would be destroyed wherever the error is."""
    small, large = torch.ones(10), torch.ones(1 << 20)
    calls: list[Callable[[pycomm.Group], object]] = [
        lambda group: pycomm.all_reduce(small, group=group),
        lambda group: pycomm.all_reduce(large, group=group),
        lambda group: pycomm.broadcast(large, 0, group),
        lambda group: pycomm.recv(small, 0, group),
        lambda group: group.exchanger(64)(torch.zeros(64, dtype=torch.uint8), "barrier"),
        pycomm.barrier,
    ]
    for call in calls:
        group = pycomm.new_group(range(RANKS), timeout=SOON_S if are_gone else SHORT_S)
        if rank != 1 and are_gone:
            group.close()
        if rank == 1:
            with pytest.raises(pycomm.TransportError) as raised:
                call(group)
            assert not handles_kept_by(raised.value), handles_kept_by(raised.value)
            gloo = group.transport.group
            group.close()
            deadline = time.monotonic() + SOON_S
            while (held := sys.getrefcount(gloo)) > 2 and time.monotonic() < deadline:  # a message may end a bit later
                time.sleep(0.01)
            assert held == 2, f"by this function and by {gc.get_referrers(gloo)}; {raised}"
        pycomm.barrier()
        group.close()


@pytest.mark.parametrize("are_gone", [False, True])  # else they do not come in time
def test_an_error_does_not_keep_the_group_of_torch(are_gone: bool) -> None:
    run_ranks(RANKS, keep_errors_of_closed_groups, are_gone, transport="torch")


def close_while_a_peer_lives_on(rank: int) -> None:
    """A call is given up as one rank has gone, while gloo waits for another, which lives."""
    group = pycomm.new_group(range(RANKS))
    if rank == 2:
        group.close()
    if rank == 0:
        with pytest.raises(pycomm.PeerLostError) as lost:
            pycomm.all_reduce(torch.ones(1 << 20), group=group)
        assert lost.value.rank == 2
        del lost
        begin = time.monotonic()
        group.close()
        del group
        gc.collect()
        assert time.monotonic() - begin < SOON_S
    pycomm.barrier()


def test_a_group_closes_though_a_peer_that_lives_never_comes() -> None:
    run_ranks(RANKS, close_while_a_peer_lives_on, transport="torch")


def close_in_the_middle_of_a_message(rank: int) -> None:
    """The rest of a message does not come: its sender is stopped."""
    group, data = pycomm.new_group(range(PAIR)), torch.full((64 << 20,), float(rank))
    pids = torch.zeros(PAIR, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    stopped = int(pids[1])
    if rank == 0:

        def stop() -> None:
            while data[0] != 1:  # the first of the message has arrived
                time.sleep(0)
            os.kill(stopped, signal.SIGSTOP)

        threading.Thread(target=stop).start()
        with pytest.raises(pycomm.CollectiveTimeoutError):
            group.transport.broadcast(data, 1, 1.0)
        assert data[-1] == 0, "the message has arrived as a whole"
        begin = time.monotonic()
        group.close()
        del group
        took_s = time.monotonic() - begin
        os.kill(stopped, signal.SIGCONT)
        assert took_s < SOON_S
    elif rank == 1:
        with pytest.raises(pycomm.TransportError):
            group.transport.broadcast(data, 1, None)
    pycomm.barrier()


def test_a_group_closes_in_the_middle_of_a_message() -> None:
    run_ranks(PAIR, close_in_the_middle_of_a_message, transport="torch")
