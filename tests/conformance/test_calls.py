"""What surrounds the verbs, on every transport: messages, objects, asynchronous calls, coalescing, other groups."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from harness import run_ranks, transport_params
from pycomm import ConfigError, ReduceOp
from pycomm.collectives.tensors import consecutive

everywhere = pytest.mark.parametrize("transport", transport_params())


def messages(rank: int) -> None:
    n = pycomm.world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    # A ring, with tags that cross, and sizes 0 and 1.
    for numel in (0, 1, 5, 70_000):
        first, second = torch.full((numel,), rank, dtype=torch.int32), torch.full((numel,), -rank, dtype=torch.int32)
        works = [pycomm.isend(first, right, tag=1), pycomm.isend(second, right, tag=2)]
        got_second, got_first = torch.full((numel,), 99, dtype=torch.int32), torch.full((numel,), 99, dtype=torch.int32)
        receives = [pycomm.irecv(got_second, left, tag=2), pycomm.irecv(got_first, left, tag=1)]
        for work in [*receives, *works]:
            assert work.wait() is True
            assert work.is_completed() and work.exception() is None
        assert (got_first == left).all() and (got_second == -left).all()
    # Order with one tag.
    works = [pycomm.isend(torch.tensor([number]), right) for number in range(10)]
    received = torch.empty(1, dtype=torch.int64)
    for number in range(10):
        assert pycomm.recv(received, left) == left
        assert received.item() == number
    for work in works:
        work.wait()
    pycomm.barrier()
    # From anyone: rank 0 hears from each other rank once.
    if rank == 0:
        heard = set()
        for _ in range(n - 1):
            source = pycomm.recv(received, tag=7)
            assert received.item() == source * 11
            heard.add(source)
        assert heard == set(range(1, n))
    else:
        pycomm.send(torch.tensor([rank * 11]), 0, tag=7)
    # To oneself, either first.
    work = pycomm.isend(torch.tensor([5.0]), rank, tag=np.int64(3))
    own = torch.zeros(1)
    assert pycomm.recv(own, rank, tag=3) == rank and own.item() == 5.0
    work.wait()
    receive = pycomm.irecv(own, rank, tag=4)
    pycomm.send(torch.tensor([6.0]), rank, tag=4)
    receive.wait()
    assert own.item() == 6.0


def batches(rank: int) -> None:
    n = pycomm.world_size()
    exchange(range(n), lambda op, tensor, peer: pycomm.P2POp(op, tensor, peer))
    torchs = {pycomm.isend: torch.distributed.isend, pycomm.irecv: torch.distributed.irecv}
    exchange(range(n), lambda op, tensor, peer: pycomm.P2POp(torchs[op], tensor, peer))
    everybody = pycomm.new_group()
    exchange(range(n), lambda op, tensor, peer: pycomm.P2POp(op, tensor, group=everybody, tag=5, group_peer=peer))
    some = pycomm.new_group([1, 2])
    if some:
        exchange([1, 2], lambda op, tensor, peer: pycomm.P2POp(op, tensor, peer, some))
        exchange([1, 2], lambda op, tensor, peer: pycomm.P2POp(op, tensor, group=some, group_peer=peer - 1))
    # Of a batch with a message that cannot be right, none is started.
    after, before, kept = (rank + 1) % n, (rank - 1) % n, torch.zeros(3)
    good = pycomm.P2POp(pycomm.irecv, kept, before)
    mistakes = (
        (f"rank {n} is not in group", pycomm.P2POp(pycomm.isend, kept, n)),
        ("tag: expected", pycomm.P2POp(pycomm.isend, kept, after, tag=-1)),
        ("cannot be moved", pycomm.P2POp(pycomm.isend, torch.empty(3, dtype=torch.int4), after)),
        ("group_dst: expected", pycomm.P2POp(pycomm.isend, kept, group_peer=n)),
    )
    for words, mistaken in mistakes:
        with pytest.raises(ConfigError, match=words):
            pycomm.batch_isend_irecv([good, mistaken])
    exchange([before, after], lambda op, tensor, peer: pycomm.P2POp(op, tensor, peer))
    assert (kept == 0).all()


def exchange(peers: Sequence[int], message: Callable[[Any, torch.Tensor, int], pycomm.P2POp]) -> None:
    """Sends to every peer, and receives from it, in one batch: sends first, then in another order."""
    rank = pycomm.rank()
    inputs = [torch.tensor([rank * 10.0 + peer]) for peer in peers]
    outputs = [torch.zeros(1) for _ in peers]
    sends = [message(pycomm.isend, sent, peer) for sent, peer in zip(inputs, peers, strict=True)]
    receives = [message(pycomm.irecv, received, peer) for received, peer in zip(outputs, peers, strict=True)]
    for batch in ([*sends, *receives], [*receives, *sends], tuple(receives + sends)):
        for received in outputs:
            received.zero_()
        works = pycomm.batch_isend_irecv(batch)
        assert len(works) == len(batch)
        for work in works:
            assert work.wait()
        assert [each.item() for each in outputs] == [peer * 10.0 + rank for peer in peers]


def strided_messages(rank: int) -> None:
    n = pycomm.world_size()
    matrix = torch.arange(12.0).view(3, 4) + 100 * rank
    target = torch.zeros(3, 4)
    work = pycomm.isend(matrix[:, 1], (rank + 1) % n)
    assert pycomm.recv(target[:, 2], (rank - 1) % n) == (rank - 1) % n
    work.wait()
    expected = torch.zeros(3, 4)
    expected[:, 2] = torch.tensor([1.0, 5.0, 9.0]) + 100 * ((rank - 1) % n)
    assert torch.equal(target, expected)


def take_while_waiting_elsewhere(rank: int) -> None:
    """Rank 0 comes to the barrier once rank 1, who waits there, has taken a message of another group."""
    group = pycomm.new_group()
    long = torch.full((100_000,), rank)
    if rank == 0:
        pycomm.send(long, 1, group)
        pycomm.barrier()
    else:
        work = pycomm.irecv(long, 0, group) if rank == 1 else None
        pycomm.barrier()
        assert work is None or (work.wait() and (long == 0).all())


@everywhere
def test_messages(transport: str) -> None:
    run_ranks(3, all_messages, transport=transport)


def all_messages(rank: int) -> None:
    messages(rank)
    batches(rank)
    strided_messages(rank)
    take_while_waiting_elsewhere(rank)


def ranks_of_groups(rank: int) -> None:
    """A root and a peer are global ranks in a group of others, too, by their place and by their name."""
    group = pycomm.new_group([1, 2])
    if not group:
        return
    other = 3 - rank
    for first, second in ((1, 2), (2, 1)):
        tensor = torch.full((3,), float(rank))
        pycomm.broadcast(tensor, first, group)
        assert (tensor == first).all()
        pycomm.broadcast(tensor.fill_(rank), src=second, group=group)
        assert (tensor == second).all()
        pycomm.reduce(tensor.fill_(rank), dst=first, group=group)
        assert (tensor == (3 if rank == first else rank)).all()
        parts = [torch.zeros(3), torch.zeros(3)] if rank == first else None
        pycomm.gather(tensor.fill_(rank), parts, group=group, dst=first)
        assert parts is None or [each[0].item() for each in parts] == [1.0, 2.0]
        pycomm.scatter(tensor.zero_(), parts, first, group)
        assert (tensor == rank).all()
        if rank == first:
            pycomm.send(tensor, second, group, 4)
            assert pycomm.recv(tensor, src=second, group=group, tag=5) == second and (tensor == second).all()
            assert pycomm.recv(tensor, group=group) == second  # from anybody
        else:
            received = torch.zeros(3)
            assert pycomm.recv(received, first, group=group, tag=4) == first and (received == first).all()
            pycomm.send(tensor, dst=first, group=group, tag=5)
            pycomm.send(tensor, first, group)
        received = torch.zeros(3)
        works = [pycomm.irecv(received, src=other, group=group), pycomm.isend(tensor.fill_(rank), other, group)]
        assert all(work.wait() for work in works) and (received == other).all()
        assert works[0].source_rank() == other
    for wrong in (
        lambda: pycomm.broadcast(tensor, src=0, group=group),
        lambda: pycomm.gather(tensor, [tensor.clone(), tensor.clone()] if rank == 1 else None, group=group),
        lambda: pycomm.scatter(tensor, [tensor.clone(), tensor.clone()] if rank == 1 else None, group=group),
        lambda: pycomm.send(tensor, 0, group=group),
    ):
        with pytest.raises(ConfigError):
            wrong()
    pycomm.barrier(group=group)


def lists(rank: int) -> None:
    """Lists of tensors that lie by themselves, one behind the other, or, on one rank, in no order; short and long."""
    n = pycomm.world_size()
    for numel in (1, 7, 3_000, 60_000):
        for layout in ("apart", "one", "strided on one"):
            is_strided = layout == "strided on one" and rank == n - 1

            def tensors(
                values: Sequence[float], layout: str = layout, numel: int = numel, is_strided: bool = is_strided
            ) -> list[torch.Tensor]:
                if layout == "one":
                    return list(torch.tensor(values).repeat_interleave(numel).view(n, numel))
                made = [torch.full((numel, 2) if is_strided else (numel,), value) for value in values]
                return [each[:, 0] for each in made] if is_strided else made

            own, whole = torch.full((numel,), rank + 1.0), [torch.full((numel,), r + 1.0) for r in range(n)]
            outputs = tensors([0.0] * n)
            pycomm.all_gather(outputs, own)
            assert all(torch.equal(got, each) for got, each in zip(outputs, whole, strict=True)), (numel, layout)
            inputs = tensors([10.0 * r + rank for r in range(n)])
            reduced = torch.zeros(numel)
            pycomm.reduce_scatter(reduced, inputs, op=ReduceOp.MAX)
            assert (reduced == 10 * rank + n - 1).all()
            outputs = tensors([0.0] * n)
            pycomm.all_to_all(outputs, inputs)
            for source, got in enumerate(outputs):
                assert (got == 10 * rank + source).all(), (numel, layout)
            # In place.
            outputs = tensors([rank + 1.0 if r == rank else 0.0 for r in range(n)])
            pycomm.all_gather(outputs, outputs[rank])
            assert all(torch.equal(got, each) for got, each in zip(outputs, whole, strict=True))
            pycomm.reduce_scatter(inputs[rank], inputs, torch.distributed.ReduceOp.SUM)
            assert (inputs[rank] == 10 * rank * n + n * (n - 1) / 2).all()
    for wrong in (
        lambda: pycomm.all_gather([own] * n, own.clone()),
        lambda: pycomm.all_gather(whole[:-1], own),
        lambda: pycomm.all_gather([each[1:] for each in whole], own),
        lambda: pycomm.all_to_all(whole, [each.double() for each in whole]),
        lambda: pycomm.all_to_all(whole, whole),
        lambda: pycomm.reduce_scatter(own, [each.int() for each in whole]),
        lambda: pycomm.reduce_scatter(whole[(rank + 1) % n], whole),
    ):
        with pytest.raises(ConfigError):
            wrong()


@everywhere
def test_lists_and_ranks_of_groups(transport: str) -> None:
    run_ranks(3, lists_and_groups, transport=transport)


def lists_and_groups(rank: int) -> None:
    lists(rank)
    ranks_of_groups(rank)


def objects(rank: int) -> None:
    n = pycomm.world_size()
    mine = {"rank": rank, "text": "é" * rank * 1000, "tensor": torch.full((3,), rank)}
    gathered: list[Any] = [None] * n
    pycomm.all_gather_object(gathered, mine)
    assert [each["rank"] for each in gathered] == list(range(n))
    assert gathered[n - 1]["text"] == "é" * (n - 1) * 1000 and torch.equal(gathered[1]["tensor"], torch.full((3,), 1))

    on_root: list[Any] | None = [None] * n if rank == 1 else None
    pycomm.gather_object(("from", rank), on_root, dst=1)
    assert on_root is None or on_root == [("from", each) for each in range(n)]

    shared = ["a", 7, None, {"x": [1, 2]}] if rank == 2 else [None] * 4
    pycomm.broadcast_object_list(shared, src=2)
    assert shared == ["a", 7, None, {"x": [1, 2]}]

    mine_only: list[Any] = [None]
    pycomm.scatter_object_list(mine_only, [f"for {each}" * each for each in range(n)] if rank == 0 else None)
    assert mine_only == [f"for {rank}" * rank]

    if rank == 0:
        pycomm.send_object_list(["to", 1], 1)
    elif rank == 1:
        received: list[Any] = [None, None]
        assert pycomm.recv_object_list(received) == 0
        assert received == ["to", 1]

    # Without pickle.
    pycomm.all_gather_object(
        gathered, {"rank": rank}, dumps=lambda value: json.dumps(value).encode(), loads=lambda data: json.loads(data)
    )
    assert gathered == [{"rank": each} for each in range(n)]


@everywhere
def test_objects(transport: str) -> None:
    run_ranks(3, objects, transport=transport)


def asynchronous(rank: int) -> None:
    n = pycomm.world_size()
    total = n * (n + 1) // 2
    tensors = [torch.full((1000,), float(rank + 1)) for _ in range(20)]
    works = [pycomm.all_reduce(tensor, async_op=True) for tensor in tensors]
    # A synchronous call waits its turn.
    last = torch.ones(3)
    assert pycomm.all_reduce(last) is None
    assert all(work.is_completed() for work in works) and (last == n).all()
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait() is True and work.is_success() and work.exception() is None
        assert work.result() is tensor and (tensor == total).all()

    seen = []
    tensor = torch.ones(5)
    following = pycomm.all_reduce(tensor, async_op=True).then(lambda work: seen.append(work.result()) or "done")
    assert following.result() == "done" and seen[0] is tensor and (tensor == n).all()
    failing = pycomm.barrier(async_op=True).then(lambda work: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert isinstance(failing.exception(), ZeroDivisionError)

    # A dropped handle: the call is made all the same, and the library keeps its tensors.
    kept = torch.full((100_000,), 1.0)
    pycomm.all_reduce(kept, async_op=True)
    pycomm.all_gather_single(torch.empty(n * 1000), torch.ones(1000), async_op=True)
    pycomm.barrier()
    assert (kept == n).all()

    # Waited on by another thread.
    work = pycomm.broadcast(kept.fill_(rank), src=n - 1, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join(600)
    assert not thread.is_alive() and (kept == n - 1).all()


def coalesced(rank: int) -> None:
    n = pycomm.world_size()
    floats = [torch.full((numel,), float(rank)) for numel in (1, 0, 7, 1000)]
    column = torch.zeros(4, 3)
    column[:, 1] = rank
    ints = torch.full((5,), rank + 1)
    maxima = torch.full((5,), float(rank))
    other = torch.tensor([float(rank)])
    records: list[Any] = []
    world = pycomm.new_group()
    assert isinstance(world, pycomm.Group)
    world.add_hook(records.append)
    with pycomm.coalescing(world):
        for tensor in floats:
            pycomm.all_reduce(tensor, group=world)
        pycomm.all_reduce(column[:, 1], group=world)
        pycomm.all_reduce(ints, group=world)
        pycomm.all_reduce(maxima, ReduceOp.MAX, group=world)
        pycomm.broadcast(other, 1, group=world)
        assert other.item() == 1.0  # other calls run at once
    total = n * (n - 1) / 2
    assert all((tensor == total).all() for tensor in floats)
    assert (column[:, 1] == total).all() and (column[:, 0] == 0).all() and (column[:, 2] == 0).all()
    assert (ints == total + n).all() and (maxima == n - 1).all()
    verbs = [(record.verb, record.op, record.dtype, record.numel) for record in records]
    assert verbs == [
        ("broadcast", None, "float32", 1),
        ("all_reduce", "SUM", "float32", 1012),
        ("all_reduce", "SUM", "int64", 5),
        ("all_reduce", "MAX", "float32", 5),
    ]
    tensor = torch.ones(4)
    with pycomm.coalescing(world, async_op=True) as manager:
        pycomm.all_reduce(tensor, group=world)
    manager.wait()
    assert (tensor == n).all()
    whole = torch.full((9,), float(rank))
    parts = whole[1:8].split([3, 4]) if rank else (torch.zeros(3), torch.zeros(4))  # which lie apart on one rank
    assert (consecutive(parts) is None) == (rank == 0)
    with pycomm.coalescing(world):
        for part in parts:
            pycomm.all_reduce(part, group=world)
    assert all((part == total).all() for part in parts) and (whole[[0, 8]] == rank).all()
    changed = torch.ones(3, 4)
    with pycomm.coalescing(world):  # which reads at its end, whatever the layout
        for tensor in (changed[0], changed[1:, 1]):
            pycomm.all_reduce(tensor, group=world)
            tensor.mul_(3)
    assert changed[0].eq(3 * n).all() and changed[1:, 1].eq(3 * n).all() and changed[1:, 2:].eq(1).all()
    factors = [torch.ones(3), torch.ones(5)]
    with pycomm.coalescing(world):  # of which some ranks have two, and rank 0 has one
        for tensor, factor in zip(factors, (1, rank + 1), strict=True):
            pycomm.all_reduce(tensor, pycomm.premul_sum(factor), world)
    assert factors[0].eq(n).all() and factors[1].eq(total + n).all()
    for again, op in ((changed[0], ReduceOp.SUM), (changed[1:, 1], ReduceOp.MAX), (changed[:, 1], ReduceOp.SUM)):
        before = changed.clone()
        with (
            pytest.raises(pycomm.ConfigError, match="coalesced shares memory"),
            pycomm.coalescing(world),
        ):
            pycomm.all_reduce(changed[0], group=world)
            pycomm.all_reduce(changed[1:, 1], group=world)
            pycomm.all_reduce(again, op, group=world)
        assert torch.equal(changed, before)
    world.close()


def asynchronous_and_coalesced(rank: int) -> None:
    asynchronous(rank)
    coalesced(rank)


@everywhere
def test_asynchronous_and_coalesced(transport: str) -> None:
    run_ranks(3, asynchronous_and_coalesced, transport=transport)


def groups(rank: int) -> None:
    n = pycomm.world_size()
    evens = pycomm.new_group([2, 0])
    if rank % 2 == 0 and rank < 3:
        assert evens.ranks == (0, 2) and evens.rank == rank // 2  # ordered by rank, as torch does
        tensor = torch.tensor([float(rank)])
        pycomm.broadcast(tensor, src=2, group=evens)  # a global rank
        assert tensor.item() == 2.0
        pycomm.broadcast(tensor.fill_(rank), group_src=0, group=evens)
        assert tensor.item() == 0.0
        received = torch.zeros(1)
        works = [pycomm.isend(tensor, 2 - rank, group=evens), pycomm.irecv(received, 2 - rank, group=evens)]
        for work in works:
            work.wait()
        assert works[1].source_rank() == 2 - rank
        with pytest.raises(pycomm.ConfigError, match="not in group"):
            pycomm.broadcast(tensor, src=1, group=evens)
    else:
        assert evens is pycomm.NON_MEMBER and pycomm.rank(evens) == -1
        with pytest.raises(pycomm.ConfigError, match="not a member"):
            pycomm.all_reduce(torch.zeros(1), group=evens)

    # All that torch's new_group takes, by its place: in the order given, and named.
    timeout, device = timedelta(seconds=500), torch.device("cuda:1")
    as_given = pycomm.new_group([2, 0, 1], timeout, None, None, False, "odd", device, False)
    assert (rank == 3) == (as_given is pycomm.NON_MEMBER)
    if isinstance(as_given, pycomm.Group):
        assert as_given.ranks == (2, 0, 1) and as_given.name == "odd" and as_given.timeout_s == 500
        gathered = torch.empty(3, dtype=torch.int64)
        pycomm.all_gather_single(gathered, torch.tensor([rank]), as_given)
        assert gathered.tolist() == [2, 0, 1]
    with pycomm.new_group(use_local_synchronization=True) as whole:  # which leaves nobody outside
        assert whole.ranks == tuple(range(n))

    backwards = pycomm.split(0, key=-rank)
    assert isinstance(backwards, pycomm.Group)
    assert backwards.ranks == tuple(reversed(range(n))) and backwards.rank == n - 1 - rank
    gathered = torch.empty(n, dtype=torch.int64)
    pycomm.all_gather_single(gathered, torch.tensor([rank]), backwards)
    assert gathered.tolist() == list(reversed(range(n)))

    halves = pycomm.split(rank % 2)
    assert isinstance(halves, pycomm.Group)
    with halves:
        tensor = torch.ones(10)
        pycomm.all_reduce(tensor, group=halves)
        assert (tensor == halves.world_size).all()
        inner = pycomm.split(0, group=halves)
        assert isinstance(inner, pycomm.Group) and inner.ranks == halves.ranks
        pycomm.all_reduce(tensor, group=inner)
        assert (tensor == halves.world_size**2).all()
    with pytest.raises(pycomm.TransportError, match="closed"):
        pycomm.all_reduce(tensor, group=halves)

    alone = pycomm.split(None if rank == 0 else rank)
    assert (alone is pycomm.NON_MEMBER) == (rank == 0)
    if rank:
        tensor = torch.ones(3)
        pycomm.all_reduce(tensor, group=alone)
        assert (tensor == 1).all() and pycomm.world_size(alone) == 1
    # The first group still works, and so does the world.
    everyone = torch.ones(1)
    pycomm.all_reduce(everyone)
    assert everyone.item() == n


@everywhere
def test_groups(transport: str) -> None:
    run_ranks(4, groups, transport=transport)


def hooked(rank: int) -> None:
    n = pycomm.world_size()
    group = pycomm.new_group()
    assert isinstance(group, pycomm.Group)
    records: list[pycomm.CollectiveRecord] = []
    group.add_hook(records.append)
    pycomm.all_reduce(torch.ones(10), group=group)
    pycomm.all_gather_single(torch.empty(2 * n, dtype=torch.float64), torch.ones(2, dtype=torch.float64), group=group)
    pycomm.all_reduce(torch.ones(3), ReduceOp.MAX, group, async_op=True).wait()
    pycomm.scatter(torch.empty(4), [torch.ones(4)] * n if rank == 0 else None, group=group)
    pycomm.barrier(group)
    group.remove_hook(records.append)
    pycomm.all_reduce(torch.ones(1), group=group)
    facts = [(r.verb, r.op, r.dtype, r.numel, r.nbytes) for r in records]
    assert facts[:4] == [
        ("all_reduce", "SUM", "float32", 10, 40),
        ("all_gather_single", None, "float64", 2 * n, 16 * n),
        ("all_reduce", "MAX", "float32", 3, 12),
        ("scatter", None, "float32", 4 * n, 16 * n),
    ]
    assert facts[4][0] == "barrier" and len(facts) == 5
    assert [r.seq for r in records] == [1, 2, 3, 4, 5]
    assert all(r.end_ns >= r.start_ns and r.group_name == group.name for r in records)
    group.close()


@everywhere
def test_hooks(transport: str) -> None:
    run_ranks(2, hooked, transport=transport)
