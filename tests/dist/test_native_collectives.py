"""What MPI and gloo carry whole: as right as ``supports`` promises, the same bits on all ranks, bounded, splittable."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from functools import reduce as fold
from pathlib import Path

import pytest
import torch

import pycomm
from harness import run_ranks, transport_params, wait_until
from pycomm import CollectiveTimeoutError, ReduceOp
from pycomm.collectives.context import default_group
from pycomm.transport import Transport
from pycomm.types import DTYPES

WRAPPERS = [param for param in transport_params() if param.values[0] in ("torch", "mpi")]
ALL_DTYPES = [getattr(torch, dtype.name) for dtype in DTYPES]
NUMELS = (0, 1, 1009)
BINARY = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def my_transport() -> Transport:
    group = default_group()
    assert group is not None
    return group.transport


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that sums and products are exact in every type."""
    return ((torch.arange(numel) * (rank + 3) + rank) % 4 + 1).to(dtype)


def reduced(world_size: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    """What the ranks' ``data`` comes to; wide integers stand in for unsigned types that torch does not compute with."""
    wide = dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
    total = fold(BINARY[op], [data(rank, numel, dtype).to(wide) for rank in range(world_size)])
    return (total / world_size if op is ReduceOp.AVG else total).to(dtype)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def reductions_are_right(rank: int) -> int:
    """Every reduction that ``supports`` promises, for every type and operator. Returns how many that were."""
    transport = my_transport()
    world_size, root = transport.world_size, transport.world_size - 1
    promised = [(dtype, op) for dtype in ALL_DTYPES for op in ReduceOp if transport.supports("all_reduce", dtype, op)]
    for dtype, op in promised:
        for numel in NUMELS:
            mine, expected = data(rank, numel, dtype), reduced(world_size, numel, dtype, op)
            output = torch.empty_like(mine)
            transport.all_reduce(output, mine, op, 1.0, None)
            assert same_bytes(output, expected), ("all_reduce", dtype, op, numel)
            assert same_bytes(mine, data(rank, numel, dtype)), "the input was changed"
            output = data(rank, numel, dtype)
            transport.all_reduce(output, output, op, 1.0, None)
            assert same_bytes(output, expected), ("all_reduce in place", dtype, op, numel)

            assert transport.supports("reduce", dtype, op)
            output = torch.zeros_like(mine)
            transport.reduce(output, mine, op, 1.0, root, None)
            assert same_bytes(output, expected if rank == root else torch.zeros_like(mine)), ("reduce", dtype, op)
            assert same_bytes(mine, data(rank, numel, dtype)), "the input was changed"

            assert transport.supports("reduce_scatter_single", dtype, op)
            whole = data(rank, numel * world_size, dtype)
            output = torch.empty_like(mine)
            transport.reduce_scatter_single(output, whole, op, 1.0, None)
            part = reduced(world_size, numel * world_size, dtype, op)[rank * numel : (rank + 1) * numel]
            assert same_bytes(output, part), ("reduce_scatter_single", dtype, op, numel)
            assert same_bytes(whole, data(rank, numel * world_size, dtype)), "the input was changed"
    return len(promised)


def moves_are_right(rank: int) -> None:
    transport = my_transport()
    world_size, root = transport.world_size, transport.world_size - 1
    ranks = range(world_size)
    for dtype in ALL_DTYPES:
        for numel in NUMELS:
            each = [data(peer, numel, dtype) for peer in ranks]
            joined = torch.cat(each)
            flat = each[rank].clone()
            transport.broadcast(flat, root, None)
            assert same_bytes(flat, each[root]), ("broadcast", dtype)

            output = torch.empty(numel * world_size, dtype=dtype)
            transport.all_gather_single(output, each[rank], None)
            assert same_bytes(output, joined), ("all_gather_single", dtype)
            output[rank * numel : (rank + 1) * numel] = each[rank]
            transport.all_gather_single(output, output[rank * numel : (rank + 1) * numel], None)
            assert same_bytes(output, joined), ("all_gather_single in place", dtype)

            output = torch.empty(numel * world_size, dtype=dtype)
            transport.gather(output if rank == root else None, each[rank], root, None)
            assert rank != root or same_bytes(output, joined), ("gather", dtype)
            part = torch.empty(numel, dtype=dtype)
            transport.scatter(part, joined if rank == root else None, root, None)
            assert same_bytes(part, each[rank]), ("scatter", dtype)

            # Rank i sends (i + j) % 3 * numel elements to rank j, all of its own.
            sent = [(rank + peer) % 3 * numel for peer in ranks]
            output = torch.empty(sum(sent), dtype=dtype)  # the table of sizes is symmetric
            transport.all_to_all_single(output, data(rank, 1, dtype).repeat(sum(sent)), sent, sent, None)
            expected = torch.cat([data(peer, 1, dtype).repeat(sent[peer]) for peer in ranks])
            assert same_bytes(output, expected), ("all_to_all_single", dtype)
        transport.barrier(None)


def bits_are_the_same(rank: int) -> list[str]:
    """Sums whose value depends on the order of the additions. Returns fingerprints of the results."""
    transport = my_transport()
    generator = torch.Generator().manual_seed(rank)
    fingerprints = []
    for dtype in (torch.float32, torch.float64, torch.complex64):
        for numel in (1, 2, 5, 100, 4099, 300_001):
            mine = torch.randn(numel, generator=generator, dtype=dtype)
            mine *= 10.0 ** torch.randint(-8, 8, (numel,), generator=generator).double()
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                output = torch.empty_like(mine)
                transport.all_reduce(output, mine, op, 1.0, None)
                fingerprints.append(hashlib.sha256(output.numpy().tobytes()).hexdigest())
    return fingerprints


def splits_work(rank: int) -> None:
    transport = my_transport()
    assert transport.split([1, 0] if rank == 2 else None, 1) is None
    evens = transport.split([2, 0] if rank != 1 else None, 2)
    assert (evens is None) == (rank == 1)
    if evens is not None:
        assert (evens.world_size, evens.rank, evens.name) == (2, [2, 0].index(rank), transport.name)
        flat = torch.tensor([float(rank)])
        evens.all_reduce(flat, flat, ReduceOp.SUM, 1.0, None)
        assert flat.item() == 2.0
        evens.broadcast(flat.fill_(rank), 0, None)
        assert flat.item() == 2.0
        evens.close()
        evens.close()
    transport.barrier(None)


def timeout_is_bounded(rank: int, path: str) -> None:
    transport = my_transport()
    transport.barrier(None)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce .* within 0\.3 s"):
            transport.all_reduce(torch.ones(3), torch.ones(3), ReduceOp.SUM, 1.0, 0.3)
        assert time.monotonic() - start > 0.2
        Path(path).touch()
    else:
        wait_until(Path(path).exists)  # who closes the group is another error


def all_of_two(rank: int, _path: str) -> tuple[int, list[str]]:
    result = reductions_are_right(rank), bits_are_the_same(rank)
    moves_are_right(rank)
    return result


def all_of_three(rank: int, path: str) -> tuple[int, list[str]]:
    result = all_of_two(rank, path)
    splits_work(rank)
    lengths_change(rank)
    if my_transport().name == "mpi":
        as_if_counts_were_small(rank)
    timeout_is_bounded(rank, path)  # last: it breaks the group
    return result


def lengths_change(rank: int) -> None:
    """Calls of all lengths one after the other, some of them of another length on rank 1; none writes too much."""
    dice = random.Random(4711)  # the same on all ranks
    for step in range(120):
        numel, of_rank_1 = (dice.choice((0, 1, 240, 241, 272, 5000, 16_384, 60_000, 140_000)) for _ in range(2))
        is_equal = step % 4 != 3 or numel == of_rank_1
        numel = numel if is_equal or rank != 1 else of_rank_1
        is_sum = dice.random() < 0.7
        whole = data(rank, numel + 1, torch.float32)
        expected = whole.clone()
        if is_equal:
            expected[:numel] = reduced(3, numel, torch.float32, ReduceOp.SUM) if is_sum else data(2, numel, whole.dtype)
        with contextlib.nullcontext() if is_equal else pytest.raises(pycomm.CollectiveMismatchError):
            pycomm.all_reduce(whole[:numel]) if is_sum else pycomm.broadcast(whole[:numel], 2)
        assert torch.equal(whole, expected), f"step {step}: {numel} elements, {'' if is_equal else 'not '}on all ranks"


def as_if_counts_were_small(rank: int) -> None:
    """The paths of messages beyond 2^31, with a limit of 1000."""
    from pycomm.transport import _mpi_memory as memory

    limit, memory.LARGEST_COUNT = memory.LARGEST_COUNT, 1000
    try:
        reductions_are_right(rank)
        moves_are_right(rank)
        flat = torch.arange(5_000_001, dtype=torch.int64)  # a made-up type of several whole pieces and a rest
        gathered = torch.empty(3 * flat.numel(), dtype=torch.int64)
        my_transport().all_gather_single(gathered, flat + rank, None)
        assert torch.equal(gathered.view(3, -1), torch.stack([flat, flat + 1, flat + 2]))
    finally:
        memory.LARGEST_COUNT = limit


@pytest.mark.parametrize(("world_size", "job"), [(2, all_of_two), (3, all_of_three)])
@pytest.mark.parametrize("transport", WRAPPERS)
def test_native_collectives(transport: str, world_size: int, job: object, tmp_path: Path) -> None:
    path = str(tmp_path / "timed out")
    results = run_ranks(world_size, job, path, transport=transport)  # type: ignore[arg-type]
    assert len(set(map(str, results))) == 1, "the ranks have different bits"
    # gloo: 2 floats x 3, 4 integers x 7, 2 complex x 2; MPI: 4 floats x 3, 8 integers x 7.
    assert results[0][0] == {"torch": 38, "mpi": 68}[transport]


def test_gloo_gives_the_same_bits_to_five_ranks() -> None:
    results = run_ranks(5, bits_are_the_same, transport="torch")
    assert all(result == results[0] for result in results)


def empty_tensors_are_carried(rank: int) -> None:
    ranks, empty = pycomm.world_size(), torch.empty(0)
    lists = [torch.empty(0) for _ in range(ranks)] if rank == 0 else None
    for call in (
        lambda: pycomm.all_reduce(empty, algorithm="native"),
        lambda: pycomm.all_reduce(empty, ReduceOp.AVG, algorithm="native"),
        lambda: pycomm.reduce_scatter_single(torch.empty(0), empty, algorithm="native"),
        lambda: pycomm.all_gather_single(torch.empty(0), empty, algorithm="native"),
        lambda: pycomm.all_to_all_single(torch.empty(0), empty, algorithm="native"),
        lambda: pycomm.broadcast(empty, 0, algorithm="native"),
        lambda: pycomm.reduce(empty, 0, algorithm="native"),
        lambda: pycomm.gather(empty, lists, 0, algorithm="native"),
        lambda: pycomm.scatter(empty, lists, 0, algorithm="native"),
    ):
        try:
            call()
        except (pycomm.ConfigError, pycomm.PlanError) as error:  # before a byte moves
            assert "does not carry" in str(error), error
    total = torch.ones(5)
    pycomm.all_reduce(total)
    assert total.tolist() == [ranks] * 5


@pytest.mark.parametrize("transport", transport_params())
def test_tensors_without_elements(transport: str) -> None:
    run_ranks(4, empty_tensors_are_carried, transport=transport)
