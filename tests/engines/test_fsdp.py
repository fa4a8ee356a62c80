"""FSDP on n ranks equals one process on the joined batch, whatever is sharded; mistakes are errors everywhere.

Many cases run in one started job: starting the ranks takes longer than they do.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from engines.cases import BOUND, MODELS, OPTIMIZERS, Branches, batches, loss_of, make
from engines.fsdp_cases import STRATEGIES, error_of, expected_of, train
from harness import run_ranks
from pycomm.engines.tensor import ColumnParallelLinear, RowParallelLinear


def equality_job(rank: int) -> dict[str, float]:
    """All combinations on three ranks; on two and four every other one, which still pairs all strategies and models."""
    errors = {}
    cases = [*itertools.product(MODELS, OPTIMIZERS, [torch.float32]), *itertools.product(MODELS, ["adamw"], BOUND)]
    for number, (name, optimizer, dtype) in enumerate(dict.fromkeys(cases)):
        expected = expected_of(name, optimizer, dtype)
        for strategy in STRATEGIES if pycomm.world_size() == 3 else STRATEGIES[(number + number // 2) % 2 :: 2]:
            found = train(name, optimizer, dtype, strategy=strategy)
            errors[f"{strategy} {name} {optimizer} {dtype}"] = error_of(found, expected) / BOUND[dtype]
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_process_on_the_joined_batch(world_size: int) -> None:
    for errors in run_ranks(world_size, equality_job):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}


# -- hybrids -----------------------------------------------------------------------------------------------------------


def hybrid_job(rank: int) -> dict[str, float]:
    """Two ranks share a model, twice; and tensor parallelism inside, where shards are of each rank's own layers."""
    errors, bound = {}, BOUND[torch.float32]
    mesh = pycomm.Mesh(dp=2, fsdp=2)
    pair = (mesh.group("dp"), mesh.group("fsdp"))
    for name, group in (("mlp", mesh), ("conv", pair), ("gpt", mesh)):
        for accumulate in (1, 3):
            found = train(name, "adamw", strategy="hybrid_shard", group=group, accumulate=accumulate)
            if name != "conv" or accumulate == 1:
                errors[f"{name} {accumulate}"] = error_of(found, expected_of(name, "adamw")) / bound
    found = train("gpt", "sgd", strategy="HYBRID_SHARD", group=mesh, overlap=True)
    errors["overlapped"] = error_of(found, expected_of("gpt", "sgd")) / bound
    with pytest.raises(pycomm.CollectiveMismatchError):  # on all ranks, though two of them agree
        pycomm.FullyShardedDataParallel(nn.Linear(2 + (rank == 3), 2), mesh, strategy="hybrid_shard")
    with pytest.raises(pycomm.ConfigError, match=r"got no gradient.*rank 0 of group .*idle"):
        fsdp = pycomm.FullyShardedDataParallel(Branches(), mesh, strategy="hybrid_shard")
        fsdp(torch.ones(1, 2), is_left=True).sum().backward()
    clip_hybrid(mesh)
    grid = pycomm.Mesh(dp=2, tp=2)
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    torch.manual_seed(5)
    parts = ColumnParallelLinear(4, 8, group=grid.group("tp")), RowParallelLinear(8, 4, group=grid.group("tp"))
    fsdp = pycomm.FullyShardedDataParallel(nn.Sequential(*parts), grid.group("dp"), wrap=tuple(map(type, parts)))
    inputs = torch.arange(16.0).view(4, 4) / 16
    for net, x in ((fsdp, inputs.chunk(2)[grid["dp"]]), (alone, inputs)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        errors["with tensor parallelism"] = (fsdp(inputs) - alone(inputs)).abs().max().item() / bound
    return errors


def clip_hybrid(mesh: pycomm.Mesh) -> None:
    """Each shard counts once, though replicas have it too."""
    inputs, targets = next(batches("mlp"))
    alone, fsdp = make("mlp"), pycomm.FullyShardedDataParallel(make("mlp"), mesh, strategy="hybrid_shard")
    loss_of(alone, inputs, targets).backward()
    loss_of(fsdp, inputs.chunk(4)[pycomm.rank()], targets.chunk(4)[pycomm.rank()]).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(fsdp.clip_grad_norm_(0.1), expected)
    norm = pycomm.clip_grad_norm_(fsdp.parameters(), 1.0, shards=mesh.group("fsdp"))
    torch.testing.assert_close(norm, torch.tensor(0.1))
    with pytest.raises(pycomm.ConfigError, match="shards=: .* sharded, got group 'dp' of ranks"):
        pycomm.clip_grad_norm_(fsdp.parameters(), 1.0, shards=mesh.group("dp"))


def test_hybrid_shards_and_meshes() -> None:
    for errors in run_ranks(4, hybrid_job):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}


# -- mistakes ----------------------------------------------------------------------------------------------------------


def mistakes_job(rank: int) -> None:
    wrap = pycomm.FullyShardedDataParallel
    with pytest.raises(pycomm.CollectiveMismatchError, match=r"ranks \[0, 1\] have 'weight.*ranks \[2\] have"):
        wrap(nn.Linear(2 + (rank == 2), 2))
    with pytest.raises(pycomm.ConfigError, match=r"ranks \[1\] are on the meta device.*initialize="):
        wrap(nn.Linear(2, 2, device="meta" if rank == 1 else "cpu"))
    choices: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "zero3"}, "strategy: expected one of no_shard, shard_optimizer.*got 'zero3'"),
        ({"wrap": nn.Conv2d}, "fits no module inside Sequential; it has Linear"),
        ({"wrap": ["2"]}, "fits no module"),
        ({"wrap": 10**6}, "fits no module"),
        ({"wrap": 1.5}, "wrap: expected classes"),
        ({"offload": "disk"}, "offload: expected one of"),
        ({"offload": "parameters", "strategy": "shard_grad_op"}, "take full_shard"),
        ({"param_dtype": torch.int8}, "param_dtype: expected a floating-point"),
        ({"buffers": "sum"}, "buffers: expected"),
        ({"prefetch": -1}, "prefetch: expected"),
        ({"strategy": "hybrid_shard"}, "hybrid_shard: expected group=Mesh of two axes"),
        ({"group": (None, None)}, "full_shard: expected one group"),
    ]
    for options, words in choices:
        with pytest.raises(pycomm.ConfigError, match=words):
            wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **options)
    with pytest.raises(pycomm.ConfigError, match="nothing to reduce"):
        wrap(nn.Linear(2, 2).requires_grad_(False))
    fsdp = wrap(nn.Linear(2, 2))
    with pytest.raises(pycomm.ConfigError, match="is sharded already"):
        wrap(fsdp.module)
    moved = wrap(nn.Linear(2, 2)).double()
    with pytest.raises(pycomm.ConfigError, match="were given other memory"):
        moved(torch.ones(1, 2).double())
    fsdp.module.register_parameter("late", nn.Parameter(torch.zeros(1)))
    with pytest.raises(pycomm.ConfigError, match="late.*Change a module before"):
        fsdp(torch.ones(1, 2))
    for copied in (fsdp, fsdp.module):
        with pytest.raises(pycomm.ConfigError, match="deepcopy.*expected a module that is not sharded"):
            copy.deepcopy(copied)
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        hooked = nn.Linear(2, 2)
        if rank == 1:
            getattr(hooked.bias, method)(lambda _: None)
        with pytest.raises(pycomm.PycommError, match="hooks of the gradient: bias" if rank == 1 else "other ranks"):
            wrap(hooked)
    ways: list[dict[str, Any]] = [
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "compression": "int8"},
        {"overlap": True, "gather_compression": "bf16"},
    ]
    for way in ways:  # one rank wants the gradient of its inputs alone
        apart, x = wrap(nn.Linear(2, 2), **way), torch.ones(1, 2, requires_grad=True)
        loss = apart(x).sum()
        with pytest.raises(pycomm.CollectiveMismatchError, match="barrier"):
            torch.autograd.grad(loss, x) if rank == 1 else loss.backward()
    for layer in (nn.LayerNorm, nn.BatchNorm1d):  # without buffers, which are sent before parameters, and with
        for way in ways:
            changed = wrap(nn.Sequential(nn.Linear(2, 2), layer(2)), **way)
            if rank == 1:
                changed.module.register_parameter("late", nn.Parameter(torch.zeros(1)))
            error = pycomm.ConfigError if rank == 1 else pycomm.CollectiveMismatchError
            with pytest.raises(error, match="barrier" if rank != 1 else "late"):
                changed(torch.ones(3, 2))


def test_mistakes_are_errors_on_every_rank() -> None:
    run_ranks(3, mistakes_job)
