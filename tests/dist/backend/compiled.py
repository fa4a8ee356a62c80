"""torch.compile of programs with collectives: slow to compile, so in a job of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel

from backend.training import batch, check_gradients, joined_gradients, network, rank, world


def case_compile() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    expected = torch.full((8,), 2.0 * world() + 1)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(step, backend=backend, fullgraph=True)(torch.ones(8)), expected), backend
    torch._dynamo.reset()
    model = network()
    expected_gradients = joined_gradients(model)
    ddp = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    ddp(batch(rank())).square().mean().backward()
    check_gradients(model, expected_gradients)
