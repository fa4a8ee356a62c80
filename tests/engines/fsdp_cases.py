"""Training with FSDP, and what it is compared with: one process on the joined batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pycomm
from engines.cases import make_on_rank, relative_error, train_alone, train_on_rank

__all__ = ["STRATEGIES", "WRAP", "error_of", "expected_of", "train", "whole_gradient"]

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
WRAP = {"mlp": nn.Linear, "conv": (nn.Conv2d, nn.BatchNorm2d), "gpt": ["blocks.0", "blocks.1"]}


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
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Trains on this rank's rows and returns the whole state."""
    fsdp = pycomm.FullyShardedDataParallel(make_on_rank(name, dtype), **{"wrap": WRAP[name], **options})
    train_on_rank(
        fsdp, name, optimizer_name, dtype, accumulate=accumulate, is_synced=is_synced, keeps_views=keeps_views
    )
    pycomm.broadcast_parameters(list(fsdp.module.named_buffers()) if name == "conv" else [("none", torch.zeros(1))])
    return whole_state(fsdp)


def expected_of(name: str, optimizer: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return train_alone(name, optimizer, dtype, shares=pycomm.world_size() if name == "conv" else 1)


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return relative_error({name: found[name] for name in expected}, expected)


def whole_gradient(fsdp: pycomm.FullyShardedDataParallel) -> torch.Tensor:
    """Returns the ranks' parts of the gradient, as one SGD step shows them."""
    before = fsdp.full_state_dict()
    torch.optim.SGD(fsdp.parameters(), lr=1.0).step()
    return torch.cat([(before[name] - after).reshape(-1) for name, after in fsdp.full_state_dict().items()])
