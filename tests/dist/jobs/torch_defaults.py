"""A job with another default device and dtype of torch's from its first line on: ``torch_defaults.py shm torch``.

Over each transport named, and as the backend of torch.distributed, ranks join, make groups and reduce. Each rank prints
"right".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
import pycomm.torch_backend  # registers the backend where pycomm is not installed


def ours() -> torch.Tensor:
    return torch.full((1000,), 3.0, dtype=torch.float32, device="cpu")


def over_pycomm(transport: str) -> None:
    with pycomm.init(transport) as world, pycomm.new_group() as other:
        for group in (world, other):
            mine = ours()
            pycomm.all_reduce(mine, group=group)
            assert mine.tolist() == [3.0 * group.world_size] * 1000


def over_torch() -> None:
    dist.init_process_group("pycomm")
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("outer", "inner"))
    for group in (None, dist.new_group(), mesh.get_group("inner"), mesh.get_group("outer")):
        mine = ours()
        dist.all_reduce(mine, group=group)
        assert mine.tolist() == [3.0 * dist.get_world_size(group)] * 1000
    told = [None] * world_size
    dist.all_gather_object(told, dist.get_rank())
    assert told == list(range(world_size))
    dist.barrier()
    model = torch.nn.Linear(4, 4, dtype=torch.float32, device="meta")  # built without memory, as FSDP2 wants it
    fully_shard(model, mesh=mesh["inner"])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    model(torch.ones(2, 4, dtype=torch.float32, device="cpu")).sum().backward()
    assert all((p.grad.to_local() == 2).all() for p in model.parameters())
    dist.destroy_process_group()


def main() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    for transport in sys.argv[1:]:
        over_pycomm(transport)
    over_torch()
    print("right", flush=True)


if __name__ == "__main__":
    assert pycomm.torch_backend
    main()
