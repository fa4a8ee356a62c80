"""Every verb on every transport, in worlds of 1 to 5, against torch's arithmetic; results bit-equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, product

import pytest
import torch
from cases import ALL_DTYPES, Guarded, argument_of, contribution, fingerprint, guarded, ops_of, same_bits, total

import pycomm
from harness import run_ranks, transport_params
from pycomm import ReduceOp

# 0, 1, a prime, one past what fits a cache line or two beside a header, a page, a window; 8 MiB + 3 bytes comes last.
SWEEP = (0, 1, 7, 15, 17, 49, 97, 1025, 4097, 65537)
FEW = (1, 67)
HOW = (None, "auto", "direct")
# A case returns what all ranks must have alike, or None, and appends to ``wrong``.
Case = Callable[[list[str]], torch.Tensor | None]


def all_reduce(numel: int, dtype: torch.dtype, op: ReduceOp, algorithm: str | None, wrong: list[str]) -> torch.Tensor:
    rank, n = pycomm.rank(), pycomm.world_size()
    buffer = guarded(contribution(rank, n, numel, dtype, op))
    pycomm.all_reduce(buffer.flat, argument_of(op, rank), **how(algorithm))
    expect(wrong, buffer, total(n, numel, dtype, op))
    return buffer.flat


def all_reduce_sparse(rows: int, dtype: torch.dtype, is_average: bool, wrong: list[str]) -> torch.Tensor:
    """Rank r has r + 1 entries and its first one twice, some where other ranks have one; rank 1 has none."""
    rank, n = pycomm.rank(), pycomm.world_size()
    op, shape = ReduceOp.AVG if is_average else ReduceOp.SUM, (rows, 3, 2)
    inputs = []
    for r in range(n):
        entries = torch.arange(r + 1) if r != 1 else torch.arange(0)
        indices = torch.stack([(entries * 3 + r) % rows, entries % 3])
        indices = torch.cat([indices, indices[:, :1]], 1)
        values = contribution(r, n, 2 * indices.shape[1], dtype, op).view(-1, 2)
        inputs.append(torch.sparse_coo_tensor(indices, values, shape, check_invariants=True))
    sparse = inputs[rank].clone()
    work = pycomm.all_reduce(sparse, op, async_op=is_average)
    if work is not None:
        work.wait()
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(each.to_dense().to(wide) for each in inputs) / (n if is_average else 1)  # type: ignore[attr-defined]
    if not torch.equal(sparse.to_dense(), expected.to(dtype)):
        wrong.append(f"got {sparse}, expected {expected}")
    if not sparse.is_coalesced():
        wrong.append("the result is not coalesced")
    return torch.cat([sparse.indices().view(-1).view(torch.uint8), sparse.values().view(-1).view(torch.uint8)])


def reduce(numel: int, dtype: torch.dtype, op: ReduceOp, algorithm: str | None, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    mine, root = contribution(rank, n, numel, dtype, op), numel % n
    buffer = guarded(mine)
    pycomm.reduce(buffer.flat, root, argument_of(op, rank), **how(algorithm))
    expect(wrong, buffer, total(n, numel, dtype, op) if rank == root else mine)


def reduce_scatter_single(
    numel: int, dtype: torch.dtype, op: ReduceOp, algorithm: str | None, wrong: list[str]
) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    mine = contribution(rank, n, n * numel, dtype, op)
    source, buffer = guarded(mine), Guarded(numel, dtype)
    pycomm.reduce_scatter_single(buffer.flat, source.flat, argument_of(op, rank), **how(algorithm))
    expect(wrong, source, mine)
    expect(wrong, buffer, total(n, n * numel, dtype, op)[rank * numel : (rank + 1) * numel])


def reduce_scatter_in_place(numel: int, dtype: torch.dtype, op: ReduceOp, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    mine = contribution(rank, n, n * numel, dtype, op)
    whole = guarded(mine)
    part = whole.flat[rank * numel : (rank + 1) * numel]
    pycomm.reduce_scatter_single(part, whole.flat, argument_of(op, rank))
    expected = mine.clone()
    expected[rank * numel : (rank + 1) * numel] = total(n, n * numel, dtype, op)[rank * numel : (rank + 1) * numel]
    expect(wrong, whole, expected)


def broadcast(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> torch.Tensor:
    rank, n = pycomm.rank(), pycomm.world_size()
    root = numel % n
    buffer = guarded(contribution(rank, n, numel, dtype))
    pycomm.broadcast(buffer.flat, root, **how(algorithm))
    expect(wrong, buffer, contribution(root, n, numel, dtype))
    return buffer.flat


def all_gather_single(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> torch.Tensor:
    rank, n = pycomm.rank(), pycomm.world_size()
    buffer = Guarded(n * numel, dtype)
    pycomm.all_gather_single(buffer.flat, contribution(rank, n, numel, dtype), **how(algorithm))
    expect(wrong, buffer, torch.cat([contribution(r, n, numel, dtype) for r in range(n)]))
    return buffer.flat


def all_gather_in_place(numel: int, dtype: torch.dtype, wrong: list[str]) -> torch.Tensor:
    rank, n = pycomm.rank(), pycomm.world_size()
    buffer = Guarded(n * numel, dtype)
    part = buffer.flat[rank * numel : (rank + 1) * numel]
    part.copy_(contribution(rank, n, numel, dtype))
    pycomm.all_gather_single(buffer.flat, part)
    expect(wrong, buffer, torch.cat([contribution(r, n, numel, dtype) for r in range(n)]))
    return buffer.flat


def all_gather(numel: int, dtype: torch.dtype, is_even: bool, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    numels = [numel if is_even else numel + r for r in range(n)]
    buffers = [Guarded(each, dtype) for each in numels]
    pycomm.all_gather([buffer.flat for buffer in buffers], contribution(rank, n, numels[rank], dtype))
    for r, buffer in enumerate(buffers):
        expect(wrong, buffer, contribution(r, n, numels[r], dtype))


def reduce_scatter(numel: int, dtype: torch.dtype, op: ReduceOp, is_even: bool, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    numels = [numel if is_even else numel + r for r in range(n)]
    buffer = Guarded(numels[rank], dtype)
    inputs = [contribution(rank, n, each, dtype, op) for each in numels]
    pycomm.reduce_scatter(buffer.flat, inputs, argument_of(op, rank))
    expect(wrong, buffer, total(n, numels[rank], dtype, op))


def all_to_all_single(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    sent = [contribution(r, n, n * numel, dtype) for r in range(n)]
    buffer = Guarded(n * numel, dtype)
    pycomm.all_to_all_single(buffer.flat, sent[rank], **how(algorithm))
    expect(wrong, buffer, torch.cat([each[rank * numel : (rank + 1) * numel] for each in sent]))


def all_to_all_uneven(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> None:
    """Rank i sends (i * n + j) % 3 * numel rows of two to rank j: nothing at all to some."""
    rank, n = pycomm.rank(), pycomm.world_size()
    rows = [[(i * n + j) % 3 * numel for j in range(n)] for i in range(n)]
    sent = [contribution(i, n, 2 * sum(rows[i]), dtype).view(-1, 2) for i in range(n)]
    received = [rows[i][rank] for i in range(n)]
    buffer = Guarded(2 * sum(received), dtype)
    output = buffer.flat.view(-1, 2)
    pycomm.all_to_all_single(output, sent[rank], received, rows[rank], **how(algorithm))
    starts = [sum(rows[i][:rank]) for i in range(n)]
    expected = torch.cat([sent[i][starts[i] : starts[i] + rows[i][rank]] for i in range(n)])
    expect(wrong, buffer, expected.view(-1))


def all_to_all(numel: int, dtype: torch.dtype, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    buffers = [Guarded(numel + (r + rank) % 3, dtype) for r in range(n)]
    inputs = [contribution(rank * n + r, n, numel + (r + rank) % 3, dtype) for r in range(n)]
    pycomm.all_to_all([buffer.flat for buffer in buffers], inputs)
    for r, buffer in enumerate(buffers):
        expect(wrong, buffer, contribution(r * n + rank, n, numel + (r + rank) % 3, dtype))


def gather(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    root = numel % n
    buffers = [Guarded(numel, dtype) for _ in range(n)] if rank == root else []
    flats = [buffer.flat for buffer in buffers] or None
    pycomm.gather(contribution(rank, n, numel, dtype), flats, root, **how(algorithm))
    for r, buffer in enumerate(buffers):
        expect(wrong, buffer, contribution(r, n, numel, dtype))


def scatter(numel: int, dtype: torch.dtype, algorithm: str | None, wrong: list[str]) -> None:
    rank, n = pycomm.rank(), pycomm.world_size()
    root = numel % n
    parts = [contribution(r, n, numel, dtype) for r in range(n)] if rank == root else None
    buffer = Guarded(numel, dtype)
    pycomm.scatter(buffer.flat, parts, root, **how(algorithm))
    expect(wrong, buffer, contribution(rank, n, numel, dtype))


def how(algorithm: str | None) -> dict[str, str]:
    """None takes a transport's short cut where there is one, "auto" its collective behind all checks."""
    return {} if algorithm is None else {"algorithm": algorithm}


def expect(wrong: list[str], buffer: Guarded, expected: torch.Tensor) -> None:
    if not same_bits(buffer.flat, expected):
        wrong.append(f"got {buffer.flat[:8].tolist()}, expected {expected[:8].tolist()} (first elements)")
    if not buffer.is_intact():
        wrong.append("wrote outside the buffer")


def reduction_cases() -> Iterator[Case]:
    # What has the same inputs and total follows one another.
    for dtype in ALL_DTYPES:
        for op, numel in product(ops_of(dtype), FEW):
            for algorithm in HOW if dtype in (torch.float32, torch.bfloat16) else (None,):
                yield partial(all_reduce, numel, dtype, op, algorithm)
                yield partial(reduce, numel, dtype, op, algorithm)
                yield partial(reduce_scatter_single, numel, dtype, op, algorithm)
    for numel in SWEEP:
        for algorithm in HOW:
            yield partial(all_reduce, numel, torch.float32, ReduceOp.SUM, algorithm)
            yield partial(all_reduce, numel, torch.bfloat16, ReduceOp.AVG, algorithm)
            yield partial(reduce, numel, torch.float32, ReduceOp.MAX, algorithm)
            yield partial(reduce_scatter_single, numel, torch.float16, ReduceOp.SUM, algorithm)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        yield partial(all_reduce_sparse, 7, dtype, False)
    for dtype in (torch.float16, torch.float64):
        yield partial(all_reduce_sparse, 4097, dtype, True)
    for numel in SWEEP:
        yield partial(reduce_scatter_in_place, numel, torch.float32, ReduceOp.SUM)
        yield partial(reduce_scatter, numel, torch.float32, ReduceOp.SUM, True)
        yield partial(reduce_scatter, numel, torch.int64, ReduceOp.MIN, False)


def movement_cases() -> Iterator[Case]:
    verbs = (broadcast, all_gather_single, all_to_all_single, all_to_all_uneven, gather, scatter)
    for algorithm in HOW:
        for verb in verbs:
            for dtype in ALL_DTYPES if algorithm is None else (torch.float32,):
                for numel in FEW:
                    yield partial(verb, numel, dtype, algorithm)
            for numel in SWEEP:
                yield partial(verb, numel, torch.uint8, algorithm)
    for numel in SWEEP:
        yield partial(all_gather_in_place, numel, torch.float32)
        yield partial(all_gather, numel, torch.float32, True)
        yield partial(all_gather, numel, torch.float32, False)
        yield partial(all_to_all, numel, torch.float32)


def run_cases(rank: int, stride: int) -> list[tuple[str, list[str], int | None]]:
    """Runs on one rank: (case, what is wrong, checksum of what ranks must have alike) of each case."""
    outcomes = []
    for case in islice(chain(reduction_cases(), movement_cases()), pycomm.world_size() % stride, None, stride):
        wrong: list[str] = []
        alike = case(wrong)  # type: ignore[call-arg, misc]
        name = f"{case.func.__name__}{case.args}"  # type: ignore[attr-defined]
        outcomes.append((name, wrong, None if alike is None else fingerprint(alike)))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("transport", transport_params())
def test_every_verb(transport: str, world_size: int) -> None:
    # Over sockets a call takes milliseconds, and of threads one runs at a time: there the five worlds share the cases.
    stride = 1 if transport == "shm" else 5
    by_rank = run_ranks(world_size, run_cases, stride, transport=transport)
    problems = [f"rank {r}: {name}: {wrong}" for r, ran in enumerate(by_rank) for name, wrong, _ in ran if wrong]
    for same_case in zip(*by_rank, strict=True):
        if len({checksum for _, _, checksum in same_case}) > 1:
            problems.append(f"ranks differ in {same_case[0][0]}")
    assert len(by_rank[0]) > 100
    assert not problems, "\n".join(problems[:20])


def run_large(rank: int) -> None:
    n = pycomm.world_size()
    numel = 8 * 2**20 + 3
    inputs = [torch.arange(numel, dtype=torch.int32).mul_(2 * r + 3).to(torch.uint8) for r in range(n)]
    expected = inputs[0].clone()
    for each in inputs[1:]:
        expected.bitwise_xor_(each)
    wrong: list[str] = []
    for algorithm in (None, "direct"):
        buffer = guarded(inputs[rank])
        pycomm.all_reduce(buffer.flat, ReduceOp.BXOR, **how(algorithm))
        expect(wrong, buffer, expected)
        part = Guarded(numel // n, torch.uint8)
        pycomm.reduce_scatter_single(part.flat, inputs[rank][: numel // n * n], ReduceOp.BXOR, **how(algorithm))
        expect(wrong, part, expected[rank * (numel // n) : (rank + 1) * (numel // n)])
        buffer = guarded(inputs[rank])
        pycomm.broadcast(buffer.flat, 1, **how(algorithm))
        expect(wrong, buffer, inputs[1])
        gathered = Guarded(n * numel, torch.uint8)
        pycomm.all_gather_single(gathered.flat, inputs[rank], **how(algorithm))
        expect(wrong, gathered, torch.cat(inputs))
    assert not wrong


@pytest.mark.parametrize("transport", transport_params())
def test_eight_mebibytes_and_three(transport: str) -> None:
    run_ranks(3, run_large, transport=transport)
