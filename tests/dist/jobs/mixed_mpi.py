"""Run by mpirun: four ranks that believe to be on two hosts, so that MPI carries what goes between them."""

from __future__ import annotations

import torch
from hosts import disagreements

import pycomm
from pycomm.collectives import agreement, exchange
from pycomm.topology import detect_launch


def main() -> None:
    host = f"host{detect_launch().rank // 2}"
    for module in (agreement, exchange):
        vars(module)["host_id"] = lambda: host
    group = pycomm.init("mixed", timeout=600)
    transport = group.transport
    disagreements()
    for numel in (0, 1, 1009, 1 << 20):
        tensor = torch.full((numel,), float(group.rank))
        pycomm.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((numel,), 6.0)), numel
    gathered = torch.empty(4 * 100)
    pycomm.all_gather_single(gathered, torch.full((100,), float(group.rank)))
    assert torch.equal(gathered, torch.arange(4.0).repeat_interleave(100))
    sources = []
    for _ in range(3 if group.rank == 0 else 0):
        sources.append(pycomm.recv(torch.empty(70_000), tag=3))
    if group.rank != 0:
        pycomm.send(torch.ones(70_000), 0, tag=3)
    assert sorted(sources) == ([1, 2, 3] if group.rank == 0 else [])
    column = pycomm.new_group([0, 2])
    names = transport.name, transport.inner.name, transport.outer.name
    pycomm.finalize()
    print(f"rank {group.rank}: {'/'.join(names)} {column.transport.name if group.rank % 2 == 0 else '-'}", flush=True)


if __name__ == "__main__":
    main()
