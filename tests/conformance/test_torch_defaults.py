"""torch's default device and dtype are for the user's tensors: whatever they are, every call gives the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_compression import ALL, WRAPPED
from torch import nn

import pycomm
from harness import run_ranks, transport_params
from pycomm.ops._formats import FORMATS
from pycomm.ops.quantize import dequantize_reference, quantize_reference
from pycomm.ops.topk import topk_reference

Call = Callable[[int], list[Any]]


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """Inside, torch has another default device and dtype. Threads share the latter: it is put back after all calls."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    pycomm.barrier()
    try:
        yield
        pycomm.barrier()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def values(*shape: int, start: float = 1.0) -> torch.Tensor:
    """Returns float32 numbers in host memory whose sums are exact."""
    numel = int(np.prod(shape))
    return torch.arange(numel, dtype=torch.float32, device="cpu").remainder_(50).add_(start).view(shape)


def plain(result: Any) -> Any:
    """Returns ``result`` with its tensors as what can be compared and sent: all that ``==`` should see."""
    if isinstance(result, torch.Tensor):
        dense = result.detach().to_dense() if result.layout is not torch.strided else result.detach()
        return str(result.device), str(result.dtype), str(result.layout), dense.tolist()
    return [plain(each) for each in result] if isinstance(result, (list, tuple)) else result


# -- the calls -------------------------------------------------------------------------------------------------------


def verbs(rank: int) -> list[Any]:
    n = pycomm.world_size()
    found: list[Any] = []
    for algorithm in (None, "direct", "ring"):
        for mine in (values(5), values(3, 4).t(), values(30_001)):
            pycomm.all_reduce(mine, algorithm=algorithm)
            found.append(mine)
    averaged, scaled, rooted = values(7), values(7), values(7)
    pycomm.all_reduce(averaged, pycomm.ReduceOp.AVG)
    pycomm.all_reduce(scaled, pycomm.premul_sum(0.5))
    pycomm.all_reduce(rooted, async_op=True).wait()
    pycomm.reduce(rooted, 0)
    pycomm.broadcast(rooted, 0)
    array = np.ones(3)
    pycomm.all_reduce(array)
    apart = values(20).as_strided((2, 3), (4, 3))  # by its strides alone it might overlap itself
    pycomm.all_reduce(apart)
    gathered, part, swapped = values(n * 4), values(4), values(n * 4)
    pycomm.all_gather_single(gathered, values(4, start=rank))
    pycomm.reduce_scatter_single(part, values(n * 4))
    pycomm.all_to_all_single(swapped, values(n * 4, start=rank))
    uneven = [values(1 + each) for each in range(n)]
    pycomm.all_gather(uneven, values(1 + rank, start=rank))
    parts = [values(2) for _ in range(n)]
    pycomm.gather(values(2, start=rank), parts if rank == 0 else None)
    mine = values(2)
    pycomm.scatter(mine, parts if rank == 0 else None)
    pycomm.barrier()
    return [found, averaged, scaled, rooted, array.tolist(), apart, gathered, part, swapped, uneven, parts, mine]


def messages(rank: int) -> list[Any]:
    n = pycomm.world_size()
    found = []
    for numel in (3, 70_000):  # both that are sent in one piece and that are not
        work = pycomm.isend(values(numel, start=rank), (rank + 1) % n)
        target = values(numel)
        pycomm.recv(target, (rank - 1) % n)
        work.wait()
        found.append(target)
    work = pycomm.isend(values(2, start=rank), (rank + 1) % n, tag=7)
    anyones = values(2)
    source = pycomm.recv(anyones, tag=7)
    work.wait()
    return [found, anyones, source]


def objects(rank: int) -> list[Any]:
    n = pycomm.world_size()
    gathered: list[Any] = [None] * n
    pycomm.all_gather_object(gathered, {"rank": rank, "tensor": values(3, start=rank)})
    shared = ["a", None, values(2)] if rank == 0 else [None] * 3
    pycomm.broadcast_object_list(shared)
    mine: list[Any] = [None]
    pycomm.scatter_object_list(mine, list(range(n)) if rank == 0 else None)
    on_root: list[Any] | None = [None] * n if rank == 0 else None
    pycomm.gather_object(rank, on_root)
    sent = ["to", 1, ""] if rank == 0 else [None] * 3
    if rank == 0:
        pycomm.send_object_list(sent, 1)
    elif rank == 1:
        pycomm.recv_object_list(sent, 0)
    return [[list(each.values()) for each in gathered], shared, mine, on_root, sent]


def sparse(rank: int) -> list[Any]:
    places = torch.tensor([[rank, rank + 1]], dtype=torch.int64, device="cpu")
    mine = torch.sparse_coo_tensor(places, values(2, 3), (5, 3), check_invariants=True, device="cpu")
    pycomm.all_reduce(mine)
    return [mine]


def groups(rank: int) -> list[Any]:
    everyone, own = pycomm.new_group(), pycomm.split(0, key=-rank)
    assert isinstance(everyone, pycomm.Group) and isinstance(own, pycomm.Group)
    found = []
    for group in (everyone, own):
        for algorithm in (None, "ring"):
            mine = values(9)
            pycomm.all_reduce(mine, group=group, algorithm=algorithm)
            found.append(mine)
        group.close()
    mesh = pycomm.Mesh(dp=-1)
    return [found, own.ranks, mesh["dp"], mesh.group("dp").ranks]


def coalesced(rank: int) -> list[Any]:
    floats = [values(numel) for numel in (4, 0, 5)]
    with pycomm.coalescing():
        for each in floats:
            pycomm.all_reduce(each)
    return floats


def compressed(rank: int) -> list[Any]:
    found = []
    for spec in ALL + WRAPPED:
        for mine in (values(60, 100), values(97)):
            pycomm.all_reduce(mine, compression=spec, name=f"{spec} {mine.numel()}")
            found.append([spec, mine])
    return found


def memory(rank: int) -> list[Any]:
    is_shm = pycomm.get_group().transport.name == "shm"
    made = [pycomm.zeros(4, dtype=torch.int32, shared=each) for each in ((False, True) if is_shm else (False,))]
    assert pycomm.empty(4).device.type == "cpu" and pycomm.empty(4).dtype == torch.get_default_dtype()
    for each in made:
        pycomm.all_reduce(each.add_(1))
    return made


def streams(rank: int) -> list[Any]:
    stream, mine, other = pycomm.CommStream(), values(40_000), values(3)
    stream.all_reduce(mine, priority=1).wait()
    stream.submit(lambda group: pycomm.all_reduce(other, group=group)).wait()
    stream.close()
    return [mine, other]


def references(rank: int) -> list[Any]:
    """What runs where there is no native code for a tensor, and what the tests compare with."""
    flat = values(1000, start=-25.0)
    found: list[Any] = []
    for name in FORMATS:
        payload, left = quantize_reference(flat, name)
        found += [name, payload, left, dequantize_reference(payload, flat.numel(), name)]
    return [*found, *topk_reference(flat, 10, threshold=3.0)]


def layers() -> nn.Sequential:
    """The same model whatever torch's defaults are."""
    made = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float32, device="cpu") for _ in range(2)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(values(*parameter.shape) / 64)
    return made


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)


def trained(model: nn.Module, rank: int, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(values(2, 4, start=rank + step)).square().mean().backward()
        optimizer.step()
    return []


def engines(rank: int) -> list[Any]:
    found: list[Any] = []
    for options in ({}, {"find_unused_parameters": True}, {"compression": "int8"}):
        ddp = pycomm.DistributedDataParallel(layers(), **options)
        trained(ddp, rank)
        with ddp.join():
            trained(ddp, rank, 1 + rank)
        found += ddp.module.parameters()
    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        fsdp = pycomm.FullyShardedDataParallel(layers(), wrap=nn.Linear, strategy=strategy)
        trained(fsdp, rank)
        found += [fsdp.clip_grad_norm_(0.1), *fsdp.full_state_dict().values()]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float32), nn.Linear(4, 4, dtype=torch.float32))
    fsdp = pycomm.FullyShardedDataParallel(model, wrap=nn.Linear, initialize=fill, find_unused_parameters=True)
    trained(fsdp, rank)
    found += fsdp.full_state_dict().values()
    pipeline = pycomm.Pipeline(layers(), nn.functional.mse_loss, 2)
    found += [pipeline.step(values(4, 4), values(4, 4)), len(pipeline.measured_times()), *pipeline.parameters()]
    found += [list(pycomm.DistributedSampler(range(10)))]
    pycomm.verify(layers())
    return found


EVERYWHERE: tuple[Call, ...] = (verbs, messages, objects, sparse, groups, coalesced, compressed, memory)
IN_ONE_PROCESS: tuple[Call, ...] = (references,)
OF_PROCESSES: tuple[Call, ...] = (streams,)
OF_TWO: tuple[Call, ...] = (engines,)


def run_calls(rank: int, are_others: bool, calls: tuple[Call, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    with other_defaults() if are_others else contextlib.nullcontext():
        return {call.__name__: plain(call(rank)) for call in calls}


def calls_over(transport: str) -> tuple[int, tuple[Call, ...]]:
    """Returns on how many ranks which calls are made: three, of which two share a host, over mixed."""
    if transport in ("local", "mpi"):
        return 2, EVERYWHERE
    if transport == "mixed":
        return 3, (*EVERYWHERE, *OF_PROCESSES)
    return 2, (*EVERYWHERE, *OF_PROCESSES, *OF_TWO, *(IN_ONE_PROCESS if transport == "shm" else ()))


@pytest.mark.parametrize("transport", transport_params())
def test_every_call_gives_the_same(transport: str) -> None:
    world_size, calls = calls_over(transport)
    expected = run_ranks(world_size, run_calls, False, calls, transport=transport)
    found = run_ranks(world_size, run_calls, True, calls, transport=transport)
    for rank, (mine, usual) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == usual.keys()
        for name, results in mine.items():
            different = [pair for pair in zip(results, usual[name], strict=True) if pair[0] != pair[1]]
            assert not different, f"rank {rank}, {name}: {str(different[0])[:600]}"
