"""DDP on n ranks equals one process on the joined batch; the ranks hold the same bits; mistakes are errors everywhere.

Many cases run in one started job: starting the ranks takes longer than they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from engines.cases import (
    BOUND,
    MODELS,
    OPTIMIZERS,
    STEPS,
    Branches,
    batches,
    loss_of,
    make,
    make_on_rank,
    relative_error,
    train_alone,
    train_on_rank,
)
from harness import run_ranks


def same_on_all_ranks(state: dict[str, torch.Tensor]) -> bool:
    flat = torch.cat([value.detach().double().reshape(-1) for value in state.values()])
    everyone = torch.empty(pycomm.world_size(), flat.numel(), dtype=flat.dtype)
    pycomm.all_gather_single(everyone, flat)
    return all(torch.equal(flat, each) for each in everyone)


def train(
    name: str,
    optimizer_name: str,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    keeps_views: bool = False,
    wrap: Callable[..., Any] = pycomm.DistributedDataParallel,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Trains on this rank's rows and returns the module's state."""
    model = make_on_rank(name, dtype)
    ddp = wrap(model, **options)
    train_on_rank(ddp, name, optimizer_name, dtype, accumulate=accumulate, keeps_views=keeps_views)
    assert same_on_all_ranks(dict(model.named_parameters()))
    ddp.sync_parameters()  # buffers: since the last forward pass those of each rank
    return ddp.state_dict()


# -- equality --------------------------------------------------------------------------------------------------------


def equality_job(rank: int) -> dict[str, float]:
    world_size = pycomm.world_size()
    errors = {}
    cases = [*itertools.product(MODELS, OPTIMIZERS, [torch.float32]), *itertools.product(MODELS, ["adamw"], BOUND)]
    for name, optimizer, dtype in dict.fromkeys(cases):
        expected = train_alone(name, optimizer, dtype, shares=world_size if name == "conv" else 1)
        found = train(name, optimizer, dtype, bucket_bytes=2048, first_bucket_bytes=256, overlap=rank < 0)
        errors[f"{name} {optimizer} {dtype}"] = relative_error(found, expected) / BOUND[dtype]
    if world_size != 3:
        return errors
    expected = train_alone("gpt", "adamw")
    bound = BOUND[torch.float32]
    options: dict[str, dict[str, Any]] = {
        "overlapped": {"overlap": True, "bucket_bytes": 1024},
        "auto": {"bucket_bytes": "auto"},
        "views": {"keeps_views": True},
        "unused allowed": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "uncompressed by name": {"compression": "none"},
        "bf16 on the wire": {"compression": "bf16"},
    }
    for what, each in options.items():
        limit = 0.02 if each.get("compression") == "bf16" else bound
        errors[what] = relative_error(train("gpt", "adamw", **each), expected) / limit
    errors["accumulation"] = relative_error(train("gpt", "sgd", accumulate=2), train_alone("gpt", "sgd")) / bound
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_process_on_the_joined_batch(world_size: int) -> None:
    for errors in run_ranks(world_size, equality_job):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}


# -- everything else, on two ranks -------------------------------------------------------------------------------------


def features_job(rank: int) -> None:
    for check in (
        exact_where_sums_are,
        error_feedback_trains,
        unused_parameters,
        reentrant_checkpoint,
        uneven_inputs,
        buffers_averaged,
        hooks_clip_and_explicit,
        checkpoint_names,
        compiled,
        distributed_optimizer,
        layout_after_first_step,
    ):
        torch.manual_seed(3)
        check(rank)


def test_features() -> None:
    run_ranks(2, features_job)


def test_features_over_gloo() -> None:
    run_ranks(2, over_gloo_job, transport="torch")


def over_gloo_job(rank: int) -> None:
    errors = relative_error(train("mlp", "sgd", bucket_bytes=512, first_bucket_bytes=64), train_alone("mlp", "sgd"))
    assert errors < BOUND[torch.float32]
    unused_parameters(rank)


def exact_where_sums_are(rank: int) -> None:
    """Integers times powers of two: the mean is exact, and so is every parameter after it."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.constant_(model.weight, 1.0)
    alone = nn.Linear(4, 2, bias=False)
    alone.load_state_dict(model.state_dict())
    ddp = pycomm.DistributedDataParallel(model)
    inputs = torch.arange(16.0).view(4, 4)
    ddp(inputs.chunk(2)[rank]).sum().backward()
    (alone(inputs).sum() / 2).backward()
    assert torch.equal(model.weight.grad, alone.weight.grad)


def error_feedback_trains(rank: int) -> None:
    """Sparse, stateful and by names; the error stays in the residual and the ranks stay equal (asserted in train)."""
    for compression in ("topk:0.25+ef", "powersgd:2+ef", "int8", "auto"):
        state = train("mlp", "sgd", compression=compression, bucket_bytes=1024)
        assert relative_error(state, train_alone("mlp", "sgd")) < 0.5, compression


def unused_parameters(rank: int) -> None:
    ddp = pycomm.DistributedDataParallel(Branches(), find_unused_parameters=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 2), is_left=rank == 0).sum().backward()
        assert torch.equal(ddp.module.left.weight.grad, torch.full((2, 2), 0.5))
        assert torch.equal(ddp.module.right.weight.grad, torch.full((2, 2), 0.5))
        assert ddp.module.idle.weight.grad is None
    strict = pycomm.DistributedDataParallel(Branches())
    with pytest.raises(pycomm.ConfigError, match=r"rank 0: .*right.weight.*rank 1: .*left.weight"):
        strict(torch.ones(1, 2), is_left=rank == 0).sum().backward()
    strict.module.register_parameter("late", nn.Parameter(torch.zeros(1)))
    with pytest.raises(pycomm.ConfigError, match="late"):
        strict(torch.ones(1, 2), is_left=True)


def reentrant_checkpoint(rank: int) -> None:
    """A layer that is checkpointed twice gets its gradient twice in a pass."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    model, inputs = Twice(), torch.randn(2, 3)
    alone = Twice()
    alone.load_state_dict(model.state_dict())
    ddp = pycomm.DistributedDataParallel(model, static_graph=True)
    pycomm.broadcast_parameters(alone)
    for _ in range(2):
        model.zero_grad(), alone.zero_grad()
        pycomm.broadcast(inputs, 0)
        ddp(inputs.clone().requires_grad_()).sum().backward()
        alone(inputs.clone().requires_grad_()).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, alone.layer.weight.grad)
    strict = pycomm.DistributedDataParallel(Twice())
    with pytest.raises(pycomm.ConfigError, match="static_graph=True"):
        strict(inputs.clone().requires_grad_()).sum().backward()


def uneven_inputs(rank: int) -> None:
    """Rank 0 has two steps, rank 1 four: the last two are rank 1's alone."""
    ddp = pycomm.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    nn.init.zeros_(ddp.module.weight)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ddp.join():
        for _ in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
    assert torch.equal(ddp.module.weight, torch.full((1, 2), -(2 * 1.5 + 2 * 2.0)))


def buffers_averaged(rank: int) -> None:
    for mode, expected in (("broadcast", 1.0), ("average", 1.5), (None, 1.0 + rank)):
        norm = nn.BatchNorm1d(2)
        ddp = pycomm.DistributedDataParallel(norm, buffers=mode)
        norm.running_mean.fill_(1.0 + rank)
        norm.momentum = 0.0
        ddp(torch.randn(4, 2))
        assert norm.running_mean.tolist() == [expected] * 2, mode
    with pytest.raises(pycomm.ConfigError, match="broadcast"):
        pycomm.DistributedDataParallel(norm, buffers="sum")


def hooks_clip_and_explicit(rank: int) -> None:
    ddp = pycomm.DistributedDataParallel(nn.Linear(3, 3), bucket_bytes=8)
    calls = []
    ddp.register_bucket_hook(before=lambda bucket: calls.append(("before", bucket.index)))
    ddp.register_bucket_hook(after=lambda bucket: calls.append(("after", bucket.index)))
    with ddp.no_sync():
        (1000 * (1 + rank) * ddp(torch.ones(1, 3)).sum()).backward()
    assert calls == [] and ddp.module.bias.grad.tolist() == [1000.0 * (1 + rank)] * 3
    ddp.sync_gradients()
    assert calls == [("before", 0), ("before", 1), ("after", 0), ("after", 1)]
    assert ddp.module.bias.grad.tolist() == [1500.0] * 3
    norm = torch.cat([p.grad.flatten() for p in ddp.parameters()]).norm()
    torch.testing.assert_close(ddp.clip_grad_norm_(1.0), norm)
    clipped = torch.cat([p.grad.flatten() for p in ddp.parameters()])
    torch.testing.assert_close(clipped.norm(), torch.tensor(1.0))


def checkpoint_names(rank: int) -> None:
    model = make("conv")
    outer = nn.Sequential(pycomm.DistributedDataParallel(model))
    assert list(outer[0].state_dict()) == list(model.state_dict())
    state = {name: torch.ones_like(value) for name, value in outer.state_dict().items()}
    assert list(state) == [f"0.{name}" for name in model.state_dict()]
    outer.load_state_dict(state)
    assert torch.equal(model[0].weight, torch.ones_like(model[0].weight))


def compiled(rank: int) -> None:
    """The backend "eager" traces as any other does, without a compiler's time."""
    compile_module = lambda module: torch.compile(module, backend="eager")  # noqa: E731
    state = train("mlp", "sgd", wrap=lambda model, **_: pycomm.DistributedDataParallel(compile_module(model)))
    expected = train_alone("mlp", "sgd")
    assert relative_error(dict(zip(expected, state.values())), expected) < BOUND[torch.float32]


def distributed_optimizer(rank: int) -> None:
    for passes in (1, 2):
        model = make("gpt")
        with torch.no_grad():
            model.embedding.weight.add_(rank)
        pycomm.broadcast_parameters(model)
        optimizer = pycomm.DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), backward_passes_per_step=passes
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        for inputs, targets in batches("gpt"):
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(2)[rank].chunk(passes), targets.chunk(2)[rank].chunk(passes)):
                (loss_of(model, x, y) / passes).backward()
            optimizer.step()
            schedule.step()
        assert isinstance(optimizer, torch.optim.AdamW) and same_on_all_ranks(model.state_dict())
        assert relative_error(model.state_dict(), train_alone("gpt", "adamw")) < BOUND[torch.float32]
    fresh = torch.optim.AdamW(model.parameters(), lr=5.0 + rank)
    pycomm.broadcast_optimizer_state(optimizer if rank == 0 else fresh)
    if rank == 1:
        assert fresh.param_groups[0]["lr"] == 1e-3
        assert fresh.state[model.embedding.weight]["step"].item() == STEPS
    with pytest.raises(pycomm.ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(pycomm.ConfigError, match="named_parameters"):
        pycomm.DistributedOptimizer(torch.optim.SGD(model.parameters()), list(model.named_parameters())[:1])
    with pytest.raises(pycomm.ConfigError, match=r"expected pairs .* pass model\.named_parameters\(\)"):
        pycomm.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.parameters())
    with pytest.raises(pycomm.ConfigError, match=r"expected a torch\.optim\.Optimizer, got"):
        pycomm.DistributedOptimizer(model, model.named_parameters())


def layout_after_first_step(rank: int) -> None:
    """Parameters are registered in another order than that in which gradients arrive."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.third, self.first = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x)))

    ddp = pycomm.DistributedDataParallel(Shuffled(), bucket_bytes=80, first_bucket_bytes=80)
    for _ in range(2):
        ddp(torch.randn(2, 4)).sum().backward()
    names = [{entry.name.split(".")[0] for entry in bucket.entries} for bucket in ddp.reducer.buckets]
    assert names == [{"third"}, {"second"}, {"first"}]
    assert all(p.grad is not None for p in ddp.parameters())


# -- mistakes ----------------------------------------------------------------------------------------------------------


def mistakes_job(rank: int) -> None:
    with pytest.raises(pycomm.CollectiveMismatchError, match=r"ranks \[0, 1\] have 'weight.*ranks \[2\] have"):
        pycomm.DistributedDataParallel(nn.Linear(2 + (rank == 2), 2))
    with pytest.raises(pycomm.ConfigError, match=r"ranks \[1\] are on the meta device"):
        pycomm.DistributedDataParallel(nn.Linear(2, 2, device="meta" if rank == 1 else "cpu"))
    with pytest.raises(pycomm.ConfigError, match="nothing to reduce"):
        pycomm.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    for name, wrong in (("bucket_bytes", 0), ("first_bucket_bytes", "banana"), ("first_bucket_bytes", 1.5)):
        with pytest.raises(pycomm.ConfigError, match="banana" if wrong == "banana" else name):
            pycomm.DistributedDataParallel(nn.Linear(2, 2), **{name: wrong})
    pycomm.DistributedDataParallel(nn.Linear(2, 2), bucket_bytes="8MiB", first_bucket_bytes="64KiB")
    for buffers in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), *([nn.BatchNorm1d(2)] if buffers else []))
        ddp = pycomm.DistributedDataParallel(model)
        ddp(torch.ones(2, 2)).sum().backward()
        if rank == 1:
            model[0].bias = nn.Parameter(torch.zeros(2))
        error = pycomm.ConfigError if rank == 1 else pycomm.CollectiveMismatchError
        with pytest.raises(
            error, match="requires_grad, dtype, device or memory format: 0.bias" if rank == 1 else r"rank 1: barrier"
        ):
            ddp(torch.ones(2, 2)).sum().backward()
        if rank != 1:  # the same change everywhere is that error everywhere
            model[0].bias = nn.Parameter(torch.zeros(2))
        with pytest.raises(pycomm.ConfigError, match=r"requires_grad, dtype, device or memory format: 0.bias"):
            ddp(torch.ones(2, 2))
    with pytest.raises(pycomm.ConfigError, match="does not make the 3 ranks"):
        pycomm.Mesh(dp=2, tp=2)
    mesh = pycomm.Mesh(tp=1, pp=3)
    assert mesh.axes == ("pp", "tp") and mesh["pp"] == rank and mesh.rank_at(pp=0) == 0
    total = torch.ones(1)
    pycomm.all_reduce(total, group=mesh.group("pp", "tp"))
    pycomm.all_reduce(total, group=mesh.group("tp"))
    assert total.item() == 3
    with pytest.raises(pycomm.ConfigError, match="no axis"):
        mesh.group("dp")


def test_mistakes_are_errors_on_every_rank() -> None:
    run_ranks(3, mistakes_job)
