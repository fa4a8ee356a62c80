"""How calls may be spelled, on every transport: with keywords, as programs for torch do, with others' numbers."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
import torch

import pycomm
from harness import run_ranks, transport_params
from pycomm import ConfigError, ReduceOp

everywhere = pytest.mark.parametrize("transport", transport_params())


def keywords(rank: int) -> None:
    """The same calls with keywords, with torch's operators, and with the group by its place or by its name."""
    n, world = pycomm.world_size(), pycomm.get_group()
    total, root = n * (n + 1) / 2, n - 1
    theirs = torch.distributed.ReduceOp
    for call, expected in (
        (lambda t: pycomm.all_reduce(tensor=t), total),
        (lambda t: pycomm.all_reduce(t, op=ReduceOp.MAX), n),
        (lambda t: pycomm.all_reduce(t, theirs.MIN), 1),
        (lambda t: pycomm.all_reduce(t, op=theirs.AVG, group=world), total / n),
        (lambda t: pycomm.all_reduce(t, theirs.SUM, world), total),
        (lambda t: pycomm.all_reduce(t, ReduceOp.SUM, None, False), total),
        (lambda t: pycomm.all_reduce(group=None, op=theirs.PRODUCT, tensor=t), math.factorial(n)),
        (lambda t: pycomm.broadcast(t, src=root), n),
        (lambda t: pycomm.broadcast(t, root, world), n),
        (lambda t: pycomm.broadcast(src=root, tensor=t, group=world, async_op=False), n),
    ):
        tensor = torch.full((3,), rank + 1.0)
        call(tensor)
        assert (tensor == expected).all(), (tensor, expected)
    own = torch.full((3,), rank + 1.0)
    for op in (ReduceOp.MAX, theirs.MAX):
        reduced = own.clone()
        pycomm.reduce(reduced, op=op, dst=root)
        assert (reduced == (n if rank == root else rank + 1)).all()
    gathered = [torch.zeros(3) for _ in range(n)] if rank == root else None
    pycomm.gather(own, dst=root, gather_list=gathered)
    assert gathered is None or [each[0].item() for each in gathered] == [r + 1.0 for r in range(n)]
    taken = torch.zeros(3)
    pycomm.scatter(taken, src=root, scatter_list=gathered)
    assert torch.equal(taken, own)
    work = pycomm.isend(own, tag=3, dst=(rank + 1) % n)
    assert pycomm.recv(taken, tag=3, src=(rank - 1) % n) == (rank - 1) % n and (taken == (rank - 1) % n + 1).all()
    work.wait()
    receive = pycomm.irecv(taken, (rank - 1) % n, world)
    pycomm.send(own, (rank + 1) % n, None, 0)
    assert receive.wait() and (taken == (rank - 1) % n + 1).all()
    for wrong in (
        lambda: pycomm.all_reduce(own, tensor=own),
        lambda: pycomm.all_reduce(own, ReduceOp.SUM, world, group=world),
        lambda: pycomm.all_reduce(own, root=0),
        lambda: pycomm.broadcast(src=0),
        lambda: pycomm.all_reduce(*[own] * 9),
    ):
        with pytest.raises((TypeError, ConfigError)):
            wrong()
    pycomm.all_reduce(own)
    assert (own == total).all()


@everywhere
@pytest.mark.parametrize("world_size", [1, 3])
def test_keywords(transport: str, world_size: int) -> None:
    run_ranks(world_size, keywords, transport=transport)


def torch_operators(rank: int) -> None:
    n = pycomm.world_size()
    dist_op = torch.distributed.ReduceOp
    for op, expected in (
        (dist_op.SUM, n * (n + 1) / 2),
        (dist_op.MAX, float(n)),
        (dist_op(dist_op.MIN), 1.0),
        (torch.distributed._make_nccl_premul_sum(2.0), float(n * (n + 1))),
    ):
        tensor = torch.full((5,), rank + 1.0)
        pycomm.all_reduce(tensor, op)
        assert (tensor == expected).all(), op


@everywhere
def test_operators_of_torch(transport: str) -> None:
    run_ranks(2, torch_operators, transport=transport)


def integers_as_operators(rank: int) -> None:
    for op in (0, 7, True):
        tensor = torch.full((2,), rank + 2.0)
        for is_async in (False, True):
            with pytest.raises(pycomm.ConfigError, match="unknown op"):
                pycomm.all_reduce(tensor, op, async_op=is_async)
        with pytest.raises(pycomm.ConfigError, match="unknown op"):
            pycomm.reduce(tensor, 0, op)
        with pytest.raises(pycomm.ConfigError, match="unknown op"):
            pycomm.reduce_scatter_single(torch.zeros(1), tensor, op)
        assert (tensor == rank + 2).all()


@everywhere
def test_an_integer_is_no_operator(transport: str) -> None:
    run_ranks(2, integers_as_operators, transport=transport)


def other_spellings(rank: int) -> None:
    n = pycomm.world_size()
    pycomm.barrier(None, False, None, timedelta(seconds=500))  # as torch's, by their places
    pycomm.barrier(timeout=500)
    pycomm.barrier(None, True, None, 500).wait()
    sent = torch.full((n,), float(rank))
    for ones in (np.ones(n, np.int32), torch.ones(n, dtype=torch.int64), (1,) * n, range(1, 2) if n == 1 else [1] * n):
        received = torch.zeros(n)
        pycomm.all_to_all_single(received, sent, ones, ones)
        assert received.tolist() == list(range(n))
    group = pycomm.split(np.int64(1), key=np.int32(-rank))
    assert group.ranks == tuple(reversed(range(n)))
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    assert pycomm.rank(outside) == pycomm.world_size(outside) == -1


@everywhere
def test_other_spellings(transport: str) -> None:
    run_ranks(2, other_spellings, transport=transport)
