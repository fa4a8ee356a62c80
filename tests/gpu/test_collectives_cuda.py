"""Collectives and messages of CUDA tensors between two processes that share a GPU, over shared memory: what they give
is what CPU tensors give, to the bit. Skips with its reason where there is no GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from harness import run_ranks

DEVICE = torch.device("cuda")
NUMEL = 70_001

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]


@contextmanager
def staging_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this group's transport moves CPU memory", RuntimeWarning)
        yield


def values_of(rank: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10
    return values.to(dtype)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE, copy=True)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == DEVICE.type
    assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def run_verbs(rank: int, dtype: torch.dtype) -> None:
    mine = values_of(rank, dtype)
    even = mine[: NUMEL // 2 * 2]
    others = values_of(1 - rank, dtype)

    def both(verb: Any, *shapes: int) -> None:
        """Calls ``verb(input, outputs)`` with tensors of the CPU, then of the GPU."""
        here = [torch.zeros(numel, dtype=dtype) for numel in shapes]
        there = [torch.zeros(numel, dtype=dtype, device=DEVICE) for numel in shapes]
        verb(mine, here)
        verb(on_gpu(mine), there)
        for a, b in zip(here, there, strict=True):
            same(b, a)

    for op in (pycomm.ReduceOp.SUM, pycomm.ReduceOp.MAX, *([pycomm.ReduceOp.AVG] if dtype.is_floating_point else [])):
        for numel in (1, 3000, NUMEL):
            here, there = mine[:numel].clone(), on_gpu(mine[:numel])
            pycomm.all_reduce(here, op)
            pycomm.all_reduce(there, op)
            same(there, here)
        both(lambda x, out, op=op: pycomm.reduce_scatter_tensor(out[0], x[: even.numel()], op), NUMEL // 2)
    both(lambda x, out: pycomm.all_gather_into_tensor(out[0], x), 2 * NUMEL)
    both(lambda x, out: pycomm.all_gather(out, x), NUMEL, NUMEL)
    both(lambda x, out: pycomm.all_to_all_single(out[0], x[: even.numel()]), NUMEL // 2 * 2)
    both(lambda x, out: pycomm.gather(x, out if rank == 1 else None, dst=1), NUMEL, NUMEL)
    both(lambda x, out: pycomm.scatter(out[0], [x, 2 * x] if rank == 0 else None, src=0), NUMEL)
    there = on_gpu(mine)
    pycomm.broadcast(there, src=1)
    same(there, values_of(1, dtype))
    strided = torch.zeros(2, NUMEL, dtype=dtype, device=DEVICE).t()[:, 1]  # every other element of its memory
    strided.copy_(mine)
    pycomm.all_reduce(strided)
    pycomm.all_reduce(here := mine.clone())
    same(strided.contiguous(), here)
    there = torch.zeros(NUMEL, dtype=dtype, device=DEVICE)
    pycomm.send(on_gpu(mine), 1 - rank) if rank == 0 else pycomm.recv(there, 1 - rank)
    if rank == 1:
        same(there, others)
    works = [pycomm.irecv(there, 1 - rank), pycomm.isend(on_gpu(mine), 1 - rank)]
    for work in works:
        work.wait()
    same(there, others)


def verbs(rank: int, dtype: torch.dtype) -> None:
    with staging_is_meant():
        run_verbs(rank, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_verb_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    run_ranks(2, verbs, dtype)


def side_streams(rank: int) -> None:
    """What another stream still computes is waited for, and what follows on that stream sees the result."""
    stream = torch.cuda.Stream()
    with staging_is_meant(), torch.cuda.stream(stream):
        x = torch.full((1 << 22,), 1.0, device=DEVICE)
        for _ in range(50):
            x = x * 1.0
        x += rank
        pycomm.all_reduce(x)
        doubled = 2 * x
        work = pycomm.all_reduce(x, async_op=True)
        work.wait()
        again = x + 1
    stream.synchronize()
    same(doubled, torch.full((1 << 22,), 6.0))
    same(again, torch.full((1 << 22,), 7.0))


def test_the_callers_stream_is_kept_to() -> None:
    run_ranks(2, side_streams)


def compressed(rank: int, compression: str) -> list[torch.Tensor]:
    results = []
    for device in (torch.device("cpu"), DEVICE):
        group = pycomm.new_group([0, 1])  # of its own: random numbers go by the number of a group's call
        total = torch.zeros(NUMEL)
        for step in range(3):  # with what error feedback keeps from call to call
            x = (values_of(rank, torch.float32) + step).to(device, copy=True)
            with staging_is_meant():
                pycomm.all_reduce(x, group=group, compression=compression, name="gradient")
            total += x.cpu()
        results.append(total)
    return results


@pytest.mark.parametrize(
    "compression", ["bf16", "int8", "int4+ef", "topk:0.01+ef", "sign+ef", "mxfp8", "ternary", "randomk:0.1+ef"]
)
def test_compressed_sums_are_those_of_the_cpu(compression: str) -> None:
    """Of two ranks, whose sum has one order: a GPU adds what several choose of one element in any."""
    (here, there), others = run_ranks(2, compressed, compression)
    assert torch.equal(here, others[0]) and torch.equal(there, others[1])
    assert torch.equal(there, here)


def streamed(rank: int) -> None:
    with staging_is_meant(), pycomm.CommStream("gradients") as stream:
        tensors = [on_gpu(values_of(rank, torch.float32, 10_000 + i)) for i in range(5)]
        works = [stream.all_reduce(tensor) for tensor in tensors]
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            expected = values_of(rank, torch.float32, 10_000 + i)
            pycomm.all_reduce(expected)
            same(tensor, expected)
        slow = on_gpu(torch.zeros(4))

        def fill_late(_: pycomm.Group) -> None:
            torch.cuda._sleep(200_000_000)
            slow.fill_(1.0)

        work = stream.submit(fill_late, hold=slow)
        assert not stream.synchronize(0.0)
        assert stream.synchronize(60.0) and work.is_completed()
        same(slow, torch.ones(4))


def test_a_comm_stream_takes_cuda_tensors() -> None:
    run_ranks(2, streamed)


def trained(rank: int, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).to(device)
    with staging_is_meant():
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = values_of(10 * step + rank, torch.float32, 400).view(20, 20).to(device)
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def backend(rank: int, path: str) -> None:
    import pycomm.torch_backend  # noqa: F401  the name, as from a source tree

    store = dist.FileStore(path, 2)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=2)
    try:
        for here, there in zip(trained(rank, torch.device("cpu")), trained(rank, DEVICE), strict=True):
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
            both = [torch.empty_like(there, device=DEVICE) for _ in range(2)]
            with staging_is_meant():
                dist.all_gather(both, there.to(DEVICE))
            assert torch.equal(both[0], both[1])
    finally:
        dist.destroy_process_group()


def test_torchs_own_ddp_trains_on_a_gpu(tmp_path) -> None:
    run_ranks(2, backend, str(tmp_path / "store"))
