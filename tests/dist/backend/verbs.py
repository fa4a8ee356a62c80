"""Every verb of torch.distributed, with the element types and operators that it may be asked for."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

import pycomm

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
# Torch 2.14 and 2.15 forward to a backend in Python neither source_rank nor is_completed.
FORWARDS_SOURCES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
NUMELS = (1, 17, 5000)
OPERATORS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul}
INTEGER_OPERATORS = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def data(of_rank: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, so that sums and products are exact in every type."""
    return ((torch.arange(numel) * (of_rank + 3) + of_rank) % 3 + 1).to(dtype)


def total(numel: int = 6, dtype: torch.dtype = torch.float32, combine: object = torch.add) -> torch.Tensor:
    return functools.reduce(combine, [data(each, numel, dtype) for each in range(world())])  # type: ignore[arg-type]


def case_all_reduce() -> None:
    for dtype in DTYPES:
        for numel in NUMELS:
            operators = OPERATORS if dtype.is_floating_point else OPERATORS | INTEGER_OPERATORS
            for op, combine in ({dist.ReduceOp.SUM: torch.add} if dtype.is_complex else operators).items():
                tensor = data(rank(), numel, dtype)
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, total(numel, dtype, combine)), (dtype, numel, op)
    average = torch.full((3,), float(rank()))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average, torch.full((3,), (world() - 1) / 2))
    strided = torch.zeros(4, 6)
    strided.t()[:] = float(rank() + 1)
    dist.all_reduce(strided.t())
    assert torch.equal(strided, torch.full((4, 6), world() * (world() + 1) / 2))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    alone = torch.tensor(3.0)
    dist.all_reduce(alone)
    assert alone.item() == 3 * world()


def case_all_reduce_of_sparse_tensors() -> None:
    def sparse(of_rank: int) -> torch.Tensor:
        return (data(of_rank, 24).view(6, 4) - 1).to_sparse(1)

    expected = sum(sparse(each).to_dense() for each in range(world()))
    for is_async in (False, True):
        tensor = sparse(rank())
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            (result,) = work.get_future().wait()
            assert torch.equal(result.to_dense(), expected)
        assert tensor.is_sparse and torch.equal(tensor.to_dense(), expected)


def case_reduce() -> None:
    for root in range(world()):
        tensor = data(rank())
        dist.reduce(tensor, root)
        if rank() == root:
            assert torch.equal(tensor, total())


def case_broadcast() -> None:
    for dtype in DTYPES:
        for root in range(world()):
            tensor = data(rank(), 17, dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, data(root, 17, dtype)), (dtype, root)


def case_all_gather() -> None:
    for dtype in DTYPES:
        parts = [torch.empty(17, dtype=dtype) for _ in range(world())]
        dist.all_gather(parts, data(rank(), 17, dtype))
        assert all(torch.equal(part, data(each, 17, dtype)) for each, part in enumerate(parts)), dtype
    output = torch.empty(world() * 5)
    dist.all_gather_into_tensor(output, data(rank(), 5))
    assert torch.equal(output, torch.cat([data(each, 5) for each in range(world())]))
    stacked = torch.empty(world(), 5)
    dist.all_gather_into_tensor(stacked, data(rank(), 5))
    assert torch.equal(stacked.flatten(), output)
    lists = [[torch.empty(5), torch.empty(3)] for _ in range(world())]
    dist.all_gather_coalesced(lists, [data(rank(), 5), data(rank() + 1, 3)])
    for each, parts in enumerate(lists):
        assert torch.equal(parts[0], data(each, 5)) and torch.equal(parts[1], data(each + 1, 3))


def case_reduce_scatter() -> None:
    parts = [data(rank() + each, 5) for each in range(world())]
    expected = functools.reduce(torch.add, [data(each + rank(), 5) for each in range(world())])
    output = torch.empty(5)
    dist.reduce_scatter(output, parts)
    assert torch.equal(output, expected)
    output.zero_()
    dist.reduce_scatter_tensor(output, torch.cat(parts))
    assert torch.equal(output, expected)


def case_all_to_all() -> None:
    received = [torch.empty(each + 1) for each in range(world())]
    dist.all_to_all(received, [torch.full((rank() + 1,), float(10 * rank() + each)) for each in range(world())])
    assert all(torch.equal(part, torch.full((each + 1,), 10.0 * each + rank())) for each, part in enumerate(received))
    output = torch.empty(2 * world())
    dist.all_to_all_single(output, torch.arange(2.0 * world()) + 100 * rank())
    assert output.view(world(), 2)[:, 0].tolist() == [100 * each + 2 * rank() for each in range(world())]
    rows = torch.empty(sum(range(1, world() + 1)), 3)
    sent = torch.full((world() * (rank() + 1), 3), float(rank()))
    dist.all_to_all_single(rows, sent, list(range(1, world() + 1)), [rank() + 1] * world())
    assert rows[:, 0].tolist() == [float(each) for each in range(world()) for _ in range(each + 1)]


def case_gather_and_scatter() -> None:
    for root in range(world()):
        parts = [torch.empty(6) for _ in range(world())] if rank() == root else None
        dist.gather(data(rank()), parts, root)
        assert parts is None or all(torch.equal(part, data(each)) for each, part in enumerate(parts))
        output = torch.empty(6)
        sent = [data(each + root) for each in range(world())] if rank() == root else None
        dist.scatter(output, sent, root)
        assert torch.equal(output, data(rank() + root))


def case_messages() -> None:
    after, before = (rank() + 1) % world(), (rank() - 1) % world()
    for numel in (1, 100_000):
        received = torch.empty(numel)
        sending = dist.isend(torch.full((numel,), float(rank())), after, tag=3)
        dist.recv(received, before, tag=3)
        sending.wait()
        assert torch.equal(received, torch.full((numel,), float(before)))
    sending = dist.isend(torch.full((2,), float(rank())), after)
    received = torch.empty(2)
    if FORWARDS_SOURCES:
        assert dist.recv(received) == before
    else:
        with pytest.raises(RuntimeError, match="sourceRank"):
            dist.recv(received)
    assert received.tolist() == [before] * 2
    sending.wait()
    received = torch.empty(50_000)
    messages = [
        dist.P2POp(dist.isend, torch.full((50_000,), float(rank())), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert torch.equal(received, torch.full((50_000,), float(before)))


def case_large_message_and_collective() -> None:
    """A message that nobody has received yet holds no collective up, on either side."""
    tensor, one = torch.arange(3e5), torch.ones(1)
    if rank() == 0:
        sending = dist.isend(tensor, 1)
        dist.all_reduce(one)
        sending.wait()
    elif rank() == 1:
        received = torch.empty(300_000)
        dist.all_reduce(one)
        dist.recv(received, 0)
        assert torch.equal(received, tensor)
    else:
        dist.all_reduce(one)
    assert one.item() == world()


def case_objects() -> None:
    objects: list[object] = [None] * world()
    dist.all_gather_object(objects, {"rank": rank(), "text": "x" * rank()})
    assert objects == [{"rank": each, "text": "x" * each} for each in range(world())]
    listed = [rank(), "text"] if rank() == 0 else [None, None]
    dist.broadcast_object_list(listed, 0)
    assert listed == [0, "text"]
    gathered = [None] * world() if rank() == 1 else None
    dist.gather_object(rank() * 2, gathered, 1)
    assert gathered in (None, [2 * each for each in range(world())])
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [{"to": each} for each in range(world())] if rank() == 0 else None, 0)
    assert scattered == [{"to": rank()}]
    if rank() == 0:
        dist.send_object_list(["hello", 5], 1)
    elif rank() == 1:
        objects = [None, None]
        assert dist.recv_object_list(objects, 0) == 0
        assert objects == ["hello", 5]


def case_asynchronous_calls_and_futures() -> None:
    tensors = [data(rank(), 1000 + each) for each in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() or not FORWARDS_SOURCES
    assert all(torch.equal(tensor, total(tensor.numel())) for tensor in tensors)
    tensor = data(rank())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), total() * 2)
    assert torch.equal(future.wait()[0], total())
    gathered = [torch.empty(6) for _ in range(world())]
    work = dist.all_gather(gathered, data(rank()), async_op=True)
    sync = torch.ones(2)
    dist.all_reduce(sync)  # after the one under way
    work.wait()
    assert torch.equal(gathered[-1], data(world() - 1)) and sync.tolist() == [world()] * 2


def case_results_are_the_tensors_that_were_written() -> None:
    n = world()
    row, rows, parts = torch.empty(6), torch.empty(6 * n), [torch.empty(6) for _ in range(n)]
    mine, all_of_mine = data(rank()), [data(rank()) for _ in range(n)]
    at_root = rank() == 0
    calls = [
        (lambda: dist.all_reduce(row, async_op=True), [row]),
        (lambda: dist.broadcast(row, 0, async_op=True), [row]),
        (lambda: dist.all_gather(parts, mine, async_op=True), parts),
        (lambda: dist.all_gather_into_tensor(rows, mine, async_op=True), [rows]),
        (lambda: dist.reduce_scatter(row, all_of_mine, async_op=True), [row]),
        (lambda: dist.reduce_scatter_tensor(row, torch.cat(all_of_mine), async_op=True), [row]),
        (lambda: dist.gather(mine, parts if at_root else None, async_op=True), parts if at_root else []),
        (lambda: dist.scatter(row, all_of_mine if at_root else None, async_op=True), [row]),
        (lambda: dist.all_to_all(parts, all_of_mine, async_op=True), parts),
        (lambda: dist.all_to_all_single(rows, torch.cat(all_of_mine), async_op=True), [rows]),
    ]
    for call, written in calls:
        for ask in (lambda work: work.get_future().wait(), lambda work: work.result()):
            result = ask(call())
            assert [each.data_ptr() for each in result] == [each.data_ptr() for each in written]
    if FORWARDS_SOURCES:
        work = dist.all_reduce(row, async_op=True)
        with pytest.raises(pycomm.ConfigError, match="expected the handle of a receive, got that of all_reduce"):
            work._source_rank()
        work.wait()


def case_what_functional_collectives_return() -> None:
    """Tensors that are waited for when they are used, as tensor parallelism hands them to a pipeline's messages."""
    after, before = (rank() + 1) % world(), (rank() - 1) % world()
    for _ in range(3):
        made = functional.all_reduce(data(rank()), "sum", dist.group.WORLD)
        assert isinstance(made, functional.AsyncCollectiveTensor)
        received = torch.empty(6)
        receive = dist.irecv(received, before)
        dist.send(made, after)
        receive.wait()
        assert torch.equal(received, total())
        dist.all_reduce(made)
        assert torch.equal(made, total() * world())
        gathered = torch.empty(6 * world())
        dist.all_gather_into_tensor(gathered, functional.all_reduce(data(rank()), "sum", dist.group.WORLD))
        assert torch.equal(gathered, total().repeat(world()))


def case_a_message_of_one_thread_beside_a_collective_of_another() -> None:
    """Which waits for a rank that waits for the message first."""
    hears = rank() != 0
    tensor, one = torch.ones(4), torch.zeros(1)
    dist.barrier()
    if hears:
        dist.recv(one, 0, tag=2)
        dist.all_reduce(tensor)
    else:
        thread = threading.Thread(target=lambda: dist.all_reduce(tensor))
        thread.start()
        time.sleep(0.1)  # it is inside, most likely
        for peer in range(1, world()):
            dist.send(torch.ones(1), peer, tag=2)
        thread.join()
    assert tensor.tolist() == [world()] * 4 and (one.item() == 1 or not hears)


def case_a_callback_may_call_collectives() -> None:
    """As PowerSGD's hook does, and may wait for them."""
    tensor, after = data(rank(), 100_000), torch.ones(3)

    def reduce_more(done: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(after, async_op=True).get_future().wait()
        return dist.all_reduce(after, async_op=True).get_future().wait()[0]

    for _ in range(20):
        after.fill_(1)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(reduce_more)
        assert future.wait().tolist() == [world() ** 2] * 3


def case_coalescing() -> None:
    tensors = [data(rank(), numel) for numel in (3, 1000)]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(tensor, total(tensor.numel())) for tensor in tensors)
    outputs = [torch.empty(world() * 4) for _ in range(2)]
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for each, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, data(rank() + each, 4))
    manager.wait()
    for each, output in enumerate(outputs):
        assert torch.equal(output, torch.cat([data(other + each, 4) for other in range(world())]))
    output = torch.empty(4)
    with distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(output, torch.cat([data(rank(), 4)] * world()))
    assert torch.equal(output, total(4))
    dist.all_reduce_coalesced(tensors := [data(rank(), 5), data(rank(), 7)])
    assert torch.equal(tensors[1], total(7))


def case_groups() -> None:
    pair = dist.new_group([0, 1])
    if rank() < 2:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2, 2, 2]
        dist.broadcast(tensor.fill_(rank()), src=1, group=pair)
        assert tensor.tolist() == [1, 1, 1]
        dist.destroy_process_group(pair)
    for group in [dist.new_group([each]) for each in range(world())]:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 1
    backwards = dist.new_group(list(reversed(range(world()))))
    dist.barrier(backwards)
    mine, _ = dist.new_subgroups(1)
    assert dist.get_world_size(mine) == 1


def case_sequence_numbers() -> None:
    group = dist.group.WORLD
    if hasattr(group, "_get_sequence_number_for_group"):
        before = group._get_sequence_number_for_group()
        dist.barrier()
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert group._get_sequence_number_for_group() == before + 2
        work.wait()


def case_pycomm_calls_with_torch_groups() -> None:
    import pycomm

    tensor = torch.ones(4)
    pycomm.all_reduce(tensor, group=dist.group.WORLD)
    assert tensor.tolist() == [world()] * 4


def case_methods_of_a_process_group() -> None:
    """A user may call a group's own methods, with loose arguments: such calls are asynchronous."""
    group, tensor = dist.group.WORLD, data(rank())
    group.allreduce(tensor).wait()
    assert torch.equal(tensor, total())
    group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
    group.broadcast(tensor, 0).wait()
    group.reduce(tensor, 0, dist.ReduceOp.MIN).wait()
    parts = [torch.empty(6) for _ in range(world())]
    group.allgather(parts, data(rank())).wait()
    assert torch.equal(parts[-1], data(world() - 1))
    group.barrier().wait()
    output = torch.empty(3)
    group.reduce_scatter(output, [data(each, 3) for each in range(world())]).wait()
    assert torch.equal(output, world() * data(rank(), 3))
    assert group.rank() == rank() and group.size() == world()


def case_new_names() -> None:
    if not hasattr(dist, "all_gather_single"):
        return
    output = torch.empty(world() * 2)
    dist.all_gather_single(output, data(rank(), 2))
    assert torch.equal(output, torch.cat([data(each, 2) for each in range(world())]))
    part = torch.empty(2)
    dist.reduce_scatter_single(part, output)
    assert torch.equal(part, world() * data(rank(), 2))


def case_bad_arguments_raise_before_a_byte_moves() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather([torch.empty(2)] * (world() + 1), torch.empty(2))
    with pytest.raises((ValueError, RuntimeError)):
        dist.reduce_scatter_tensor(torch.empty(3), torch.empty(3 * world() + 1))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_to_all_single(torch.empty(4 * world()), torch.empty(4 * world()), [1] * world(), [4] * world())
    dist.barrier()
