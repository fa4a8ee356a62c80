"""A job beside torch.distributed: its groups as ``group=``, its store to meet at. Each rank prints "right"."""

from __future__ import annotations

import torch
import torch.distributed as dist

import pycomm


def total(group: object = None) -> float:
    tensor = torch.full((10,), dist.get_rank() + 1, dtype=torch.bfloat16)
    pycomm.all_reduce(tensor, group=group)
    return float(tensor[0])


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyone = sum(range(1, world_size + 1))
    assert total(dist.group.WORLD) == everyone
    ends = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        assert total(ends) == 1 + world_size
        received = torch.zeros(3)
        if rank == 0:
            pycomm.send(torch.ones(3), world_size - 1, ends)
        else:
            pycomm.recv(received, 0, ends)
            assert received.tolist() == [1, 1, 1]

    pairs = pycomm.split(rank % 2, group=dist.group.WORLD)  # a group of pycomm's made from one of torch's
    assert total(pairs) == sum(range(1 + rank % 2, world_size + 1, 2))
    pairs.close()

    assert not pycomm.is_initialized()
    assert total() == everyone  # joins the ranks of torch.distributed by itself
    assert pycomm.is_initialized()
    pycomm.finalize()
    check = torch.ones(1)
    dist.all_reduce(check)  # torch's own group has been left alone
    assert check.item() == world_size
    dist.destroy_process_group()
    print("right", flush=True)


if __name__ == "__main__":
    main()
