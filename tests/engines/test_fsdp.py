"""FSDP on n ranks equals one process on the joined batch, whatever is sharded; mistakes are errors everywhere.

Many cases run in one started job: starting the ranks takes longer than they do.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from engines.cases import MODELS, OPTIMIZERS, batches, loss_of, make, relative_error, train_alone
from engines.test_ddp import BOUND
from harness import run_ranks

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
WRAP = {"mlp": nn.Linear, "conv": (nn.Conv2d, nn.BatchNorm2d), "gpt": ["blocks.0", "blocks.1"]}


def whole_state(fsdp: pycomm.FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    with fsdp.full_parameters():
        state = {name: parameter.detach().clone() for name, parameter in fsdp.module.named_parameters(remove_duplicate=False)}
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


# -- equality --------------------------------------------------------------------------------------------------------


def equality_job(rank: int) -> dict[str, float]:
    errors = {}
    cases = [*itertools.product(MODELS, OPTIMIZERS, [torch.float32]), *itertools.product(MODELS, ["adamw"], BOUND)]
    for name, optimizer, dtype in dict.fromkeys(cases):
        expected = expected_of(name, optimizer, dtype)
        for strategy in STRATEGIES:
            found = train(name, optimizer, dtype, strategy=strategy)
            errors[f"{strategy} {name} {optimizer} {dtype}"] = error_of(found, expected) / BOUND[dtype]
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_process_on_the_joined_batch(world_size: int) -> None:
    for errors in run_ranks(world_size, equality_job, timeout_s=100):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}
