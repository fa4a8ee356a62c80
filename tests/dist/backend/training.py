"""What PyTorch builds on a process group: DDP, FSDP2, DTensor, tensor, pipeline parallelism, checkpoints, compile."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pycomm

WIDTH = 16


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def batch(of_rank: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + of_rank))


def joined_gradients(model: nn.Module, rows: int = 4) -> list[torch.Tensor]:
    """The gradients of one process on the joined batch."""
    model = copy.deepcopy(model)
    torch.stack([model(batch(each, rows)).square().mean() for each in range(world())]).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def check_gradients(model: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        mine = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(mine, gradient, atol=tolerance, rtol=tolerance)


def check_equal_ranks(tensor: torch.Tensor) -> None:
    first = tensor.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, tensor), "the ranks differ"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as mine:
        name = [mine]
        dist.broadcast_object_list(name, 0)
        yield Path(name[0])
        dist.barrier()


def case_ddp() -> None:
    model = network(seed=rank())  # DDP makes the parameters those of rank 0
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    expected = joined_gradients(model)
    for _ in range(3):
        ddp.zero_grad()
        ddp(batch(rank())).square().mean().backward()
        check_gradients(model, expected)
    with ddp.no_sync():
        ddp(batch(rank())).square().mean().backward()
    ddp(batch(rank())).square().mean().backward()
    check_gradients(model, [3 * each for each in expected])
    check_equal_ranks(model[0].weight.grad)


def case_ddp_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(batch(rank())).sum().backward()
    ddp(batch(rank()))  # its forward begins with rank 0's statistics
    check_equal_ranks(model[0].weight.grad)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    if torch.cuda.is_available():  # torch has it for accelerators alone
        assert synced is not None


def case_ddp_with_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, WIDTH, sparse=True), nn.Linear(WIDTH, 2))
    ddp = DistributedDataParallel(copy.deepcopy(model))
    words = [torch.arange(12).view(4, 3) * (each + 3) % 20 for each in range(world())]
    torch.stack([model(each).square().mean() for each in words]).mean().backward()
    for _ in range(2):
        ddp.zero_grad()
        ddp(words[rank()]).square().mean().backward()
        for mine, expected in zip(ddp.parameters(), model.parameters(), strict=True):
            assert mine.grad is not None and mine.grad.layout == expected.grad.layout  # type: ignore[union-attr]
            torch.testing.assert_close(mine.grad.to_dense(), expected.grad.to_dense())  # type: ignore[union-attr]
        check_equal_ranks(ddp.module[0].weight.grad.to_dense())


def case_ddp_with_unused_parameters() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[rank() % 2](x)

    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp(batch(rank())).square().mean().backward()
    check_equal_ranks(model.parts[0].weight.grad)
    assert model.parts[2].weight.grad is None


def pycomm_hook(group, bucket):  # torch compares annotations with types; ours are text
    """As it is written for torch.distributed, with ``pycomm.`` for ``dist.``."""
    work = pycomm.all_reduce(bucket.buffer(), pycomm.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def case_ddp_hooks() -> None:
    for hook, state, tolerance in (
        (pycomm_hook, dist.group.WORLD, 1e-6),
        (default_hooks.fp16_compress_hook, None, 1e-3),
        (default_hooks.allreduce_hook, None, 1e-6),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), None),
    ):
        model = network()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, hook)
        for _ in range(4):
            ddp.zero_grad()
            ddp(batch(rank())).square().mean().backward()
        if tolerance is not None:
            check_gradients(model, joined_gradients(model), tolerance)
        check_equal_ranks(model[2].weight.grad)


def case_ddp_with_uneven_inputs() -> None:
    model = network()
    ddp = DistributedDataParallel(model)
    with Join([ddp]):
        for _ in range(2 + 2 * rank()):
            ddp(batch(rank())).square().mean().backward()
    check_equal_ranks(model[0].weight.detach())


def case_fsdp2() -> None:
    model = network()
    reference, expected = copy.deepcopy(model), joined_gradients(model)
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(rank())).square().mean().backward()
    check_gradients(model, expected)
    optimizer.step()
    for parameter, start, gradient in zip(model.parameters(), reference.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), start - 0.1 * gradient)


def case_hsdp() -> None:
    model = network()
    expected = joined_gradients(model)
    mesh = init_device_mesh("cpu", (world() // 2 or 1, min(world(), 2)), mesh_dim_names=("replicate", "shard"))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    model(batch(rank())).square().mean().backward()
    check_gradients(model, expected)


def case_dtensor() -> None:
    mesh = init_device_mesh("cpu", (world(),))
    whole = torch.arange(float(8 * world())).view(4, 2 * world())
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            assert torch.equal(moved.full_tensor(), whole), (source, target)
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), torch.full((4, 4), float(world())))
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), torch.full((4, 4), float(world())))


def case_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, world()), mesh_dim_names=("one", "all"))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh["all"].get_group())
    assert tensor.tolist() == [world()] * 2
    dist.all_reduce(tensor, group=mesh.get_group("one"))
    assert tensor.tolist() == [world()] * 2


def case_tensor_parallel() -> None:
    model = network()
    expected = model(batch(0))
    mesh = init_device_mesh("cpu", (world(),))
    split = parallelize_module(copy.deepcopy(model), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = split(batch(0))
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    model(batch(0)).square().mean().backward()
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), model[0].weight.grad)


def case_pipeline() -> None:
    whole = nn.Sequential(*(network(seed) for seed in range(world())))
    inputs, targets = batch(0, rows=8), batch(1, rows=8)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        part = copy.deepcopy(whole[rank()])
        part.zero_grad()
        stage = PipelineStage(part, rank(), world(), torch.device("cpu"))
        run = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank() == 0:
            run.step(inputs)
        elif rank() == world() - 1:
            run.step(target=targets, losses=losses)
        else:
            run.step()
        for mine, reference in zip(part.parameters(), whole[rank()].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, reference.grad, atol=1e-5, rtol=1e-4)


def case_checkpoint() -> None:
    model = network()
    for part in (model[0], model):
        fully_shard(part)
    saved = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=str(folder / "now"))
        dcp.async_save(model.state_dict(), checkpoint_id=str(folder / "later")).result(timeout=500)
        for name in ("now", "later"):
            for parameter in model.parameters():
                parameter.data.to_local().zero_()
            state = model.state_dict()
            dcp.load(state, checkpoint_id=str(folder / name))
            for parameter, before in zip(model.parameters(), saved, strict=True):
                assert torch.equal(parameter.full_tensor(), before), name


def case_functional_collectives() -> None:
    group = dist.group.WORLD
    mine = torch.arange(4.0) + rank()
    summed = sum(torch.arange(4.0) + each for each in range(world()))
    assert torch.equal(funcol.all_reduce(mine, "sum", group), summed)
    gathered = funcol.all_gather_tensor(mine, 0, group)
    assert gathered.shape == (4 * world(),) and torch.equal(gathered[:4], torch.arange(4.0))
    assert torch.equal(funcol.reduce_scatter_tensor(gathered, "sum", 0, group), world() * mine)
    assert torch.equal(funcol.broadcast(mine, 0, group), torch.arange(4.0))
    swapped = funcol.all_to_all_single(torch.arange(float(world())) + 10 * rank(), None, None, group)
    assert swapped.tolist() == [10.0 * each + rank() for each in range(world())]
    leaf = mine.clone().requires_grad_()
    (funcol.all_gather_tensor_autograd(leaf, 0, group) * (rank() + 1)).sum().backward()
    assert torch.equal(leaf.grad, torch.full((4,), world() * (world() + 1) / 2))
    both = funcol.all_reduce_coalesced([mine, 2 * mine], "sum", group)
    assert torch.equal(both[1], 2 * summed)


def case_profiler() -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 5))
        dist.all_reduce(torch.ones(7), async_op=True).wait()
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
    if dist.get_backend() != "pycomm":
        return
    ranges = {event.name: event for event in profile.events() if event.name.startswith("pycomm:")}
    assert {"pycomm:all_reduce", "pycomm:broadcast", "pycomm:barrier"} <= set(ranges), set(ranges)
    shapes = [event.input_shapes for event in profile.events() if event.name == "pycomm:all_reduce"]
    assert [[3, 5]] in shapes and [[7]] in shapes, shapes


def case_a_profiler_may_stop_at_any_moment() -> None:
    """A range that ended after it wrote into memory that was freed: a dozen sessions ended the process."""
    for _ in range(12):
        with torch.profiler.profile() as profile:
            waited = dist.all_reduce(torch.ones(7), async_op=True)
            waited.wait()
            under_way = dist.all_reduce(torch.ones(70_000), async_op=True)
        assert "pycomm:all_reduce" in {event.name for event in profile.events()} or dist.get_backend() != "pycomm"
        del profile
        gc.collect()
        held = [bytes(length % 128) for length in range(5000)]
        under_way.wait()
        del held
