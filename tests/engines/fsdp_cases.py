"""Training with FSDP, and what it is compared with: one process on the joined batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pycomm
from engines.cases import OPTIMIZERS, batches, loss_of, make, relative_error, train_alone

__all__ = ["STRATEGIES", "WRAP", "Branches", "error_of", "expected_of", "train"]

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
WRAP = {"mlp": nn.Linear, "conv": (nn.Conv2d, nn.BatchNorm2d), "gpt": ["blocks.0", "blocks.1"]}


class Branches(nn.Module):
    """Uses ``left`` or ``right``, never ``idle``."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
        return self.left(x) if is_left else self.right(x)


def whole_state(fsdp: pycomm.FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    with fsdp.full_parameters():
        state = {
            name: parameter.detach().clone() for name, parameter in fsdp.module.named_parameters(remove_duplicate=False)
        }
    return {**state, **{name: buffer.clone() for name, buffer in fsdp.module.named_buffers()}}


def train(
    name: str,
    optimizer_name: str,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    is_synced: bool = False,
    keeps_views: bool = False,
    turn: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Trains on this rank's rows and returns the whole state."""
    rank, world_size = turn or (pycomm.rank(), pycomm.world_size())
    model = make(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # the engine starts from rank 0's
            parameter.add_(rank)
    fsdp = pycomm.FullyShardedDataParallel(model, **{"wrap": WRAP[name], **options})
    optimizer = OPTIMIZERS[optimizer_name](fsdp.parameters())
    for inputs, targets in batches(name, dtype):
        optimizer.zero_grad(set_to_none=not keeps_views)
        parts = list(
            zip(inputs.chunk(world_size)[rank].chunk(accumulate), targets.chunk(world_size)[rank].chunk(accumulate))
        )
        for x, y in parts[:-1]:
            if is_synced:
                (loss_of(fsdp, x, y) / accumulate).backward()
            else:
                with fsdp.no_sync():
                    (loss_of(fsdp, x, y) / accumulate).backward()
        (loss_of(fsdp, *parts[-1]) / accumulate).backward()
        optimizer.step()
    pycomm.broadcast_parameters(list(fsdp.module.named_buffers()) if name == "conv" else [("none", torch.zeros(1))])
    return whole_state(fsdp)


def expected_of(name: str, optimizer: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return train_alone(name, optimizer, dtype, shares=pycomm.world_size() if name == "conv" else 1)


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return relative_error({name: found[name] for name in expected}, expected)
