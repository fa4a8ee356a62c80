"""NCCL itself, in a world of one: what a single GPU can show. Skips with its reason where there is none."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.transport import ConnectSpec, nccl
from pycomm.types import ReduceOp

if not torch.cuda.is_available():
    REASON = "no CUDA device"
elif importlib.util.find_spec("nccl") is None:
    REASON = "nccl4py is not installed: pip install 'pycomm[cuda13]' or 'pycomm[cuda12]'"
else:
    REASON = ""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture
def transport():
    spec = ConnectSpec(rank=0, world_size=1, store=dist.HashStore(), host_ids=("host",), timeout_s=60.0)
    joined = nccl.connect(spec)
    yield joined
    joined.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_every_collective(transport: nccl.NcclTransport, dtype: torch.dtype) -> None:
    data = (torch.arange(1009, device="cuda") % 7).to(dtype)
    for op in (ReduceOp.SUM, ReduceOp.AVG) if dtype.is_floating_point else (ReduceOp.SUM,):
        for verb in (transport.all_reduce, transport.reduce_scatter_single):
            output = torch.empty_like(data)
            verb(output, data, op, 1.0, None)
            assert torch.equal(output, data)
        output = torch.empty_like(data)
        transport.reduce(output, data, op, 1.0, 0, None)
        assert torch.equal(output, data)
    copy, output = data.clone(), torch.empty_like(data)
    transport.broadcast(copy, 0, None)
    transport.all_gather_single(output, data, None)
    assert torch.equal(copy, data) and torch.equal(output, data)
    for move in (transport.gather, transport.scatter):
        output = torch.empty_like(data)
        move(output, data, 0, None)
        assert torch.equal(output, data)
    output = torch.empty_like(data)
    transport.all_to_all_single(output, data, [1009], [1009], None)
    assert torch.equal(output, data)
    transport.barrier(None)


def test_messages_to_self(transport: nccl.NcclTransport) -> None:
    sent, received = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda")
    receive, send = transport.irecv(received, 0), transport.isend(sent, 0)
    send.wait()
    receive.wait()
    assert torch.equal(received, sent)


def test_work_is_in_order_on_the_current_stream(transport: nccl.NcclTransport) -> None:
    stream = torch.cuda.Stream()
    with nccl.on_stream(stream):
        data = torch.zeros(1 << 24, device="cuda")
        for _ in range(20):
            data.add_(1)
        output = torch.empty_like(data)
        transport.all_reduce(output, data, ReduceOp.SUM, 1.0, None)
        total = output.sum()
    stream.synchronize()
    assert float(total) == 20.0 * (1 << 24)


def test_split_and_close(transport: nccl.NcclTransport) -> None:
    child = transport.split([0], 1)
    assert child is not None and (child.rank, child.world_size) == (0, 1)
    child.barrier(None)
    child.close()
    child.close()


def test_cupy_arrays_and_streams() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'pycomm[cupy13]' or 'pycomm[cupy12]'")
    with pycomm.init("nccl", rank=0, world_size=1), nccl.on_stream(cupy.cuda.Stream(non_blocking=True)):
        array = cupy.arange(1000, dtype=cupy.float32)
        pycomm.all_reduce(array)
        torch.cuda.current_stream().synchronize()
        assert float(array.sum()) == 499500.0
