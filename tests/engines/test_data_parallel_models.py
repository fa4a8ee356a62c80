"""Models and uses that are not plain: memory formats, buffers in join(), hooks, states, and what engines refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from harness import run_ranks


def models_job(rank: int) -> None:
    for check in (
        memory_formats,
        buffers_averaged_in_join,
        skips_in_skips,
        returns_a_parameter,
        hooks_after_sharding,
        optimizer_state_is_cast,
        scalars_of_optimizers,
        pipeline_mistakes,
        modules_that_do_not_fit,
        versions_of_modules,
    ):
        torch.manual_seed(3)
        check(rank)


def test_models() -> None:
    run_ranks(2, models_job)


def convolutions() -> nn.Sequential:
    """Returns a model whose weights lie in three ways: channels_last, transposed, and with gaps."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 2))
    model = model.to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(torch.randn(8, 3).T)
    model[4].weight = nn.Parameter(torch.randn(2, 6)[:, ::2])
    return model


def memory_formats(rank: int) -> None:
    """Gradients have the parameters' strides, by which fused optimizers go."""
    everyone = torch.randn(4, 3, 4, 4)
    for options in (
        {},
        {"overlap": True, "bucket_bytes": 64},
        {"compression": "bf16"},
        {"find_unused_parameters": True},
    ):
        for accumulates in (False, True):
            alone, model = convolutions(), convolutions()
            ddp = pycomm.DistributedDataParallel(model, **options)
            for _ in range(2):
                ddp.zero_grad(set_to_none=not accumulates), alone.zero_grad()
                ddp(everyone.chunk(2)[rank]).square().sum().backward()
                (alone(everyone).square().sum() / 2).backward()
                close = {"rtol": 0.02, "atol": 0.2} if "compression" in options else {"rtol": 1e-4, "atol": 1e-4}
                for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, its.grad, **close)
                    assert mine.grad.stride() == its.grad.stride()
    for kind, settings in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})):
        alone, model = convolutions()[:2], convolutions()[:2]
        mine = kind(model.parameters(), lr=0.01, fused=True, **settings)
        mine = pycomm.DistributedOptimizer(mine, model.named_parameters())
        its = kind(alone.parameters(), lr=0.01, **settings)
        for _ in range(3):
            mine.zero_grad(), its.zero_grad()
            model(everyone.chunk(2)[rank]).square().sum().backward()
            (alone(everyone).square().sum() / 2).backward()
            mine.step(), its.step()
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-4, atol=1e-4)


def buffers_averaged_in_join(rank: int) -> None:
    """Over those who have data: the first rank ends, and what it has is neither counted nor copied."""
    norm = nn.BatchNorm1d(1, momentum=0.0)
    ddp = pycomm.DistributedDataParallel(norm, buffers="average")
    with ddp.join():
        for step in range(1 + rank):
            norm.running_mean.fill_((4.0 + 2 * rank) * (1 + step))
            norm.num_batches_tracked.fill_(10 * rank)
            ddp(torch.randn(4, 1)).sum().backward()
            expected = (5.0, 0) if step == 0 else (12.0, 10)  # of both ranks, and of the second alone
            assert (norm.running_mean.item(), norm.num_batches_tracked.item() - 1) == expected
        norm.running_mean.fill_(12.0 if rank else torch.nan)
    assert norm.running_mean.item() == 12.0


def skips_in_skips(rank: int) -> None:
    """Inside, gradients are this rank's own; an inner one does not end the outer one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = pycomm.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), backward_passes_per_step=2
    )
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    with optimizer.skip_synchronize():
        with optimizer.skip_synchronize():
            pass
        optimizer.step()
    assert model.weight.item() == -1.0 - rank
    optimizer.step()
    assert model.weight.item() == -2.5 - rank


def returns_a_parameter(rank: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.scale

    fsdp = pycomm.FullyShardedDataParallel(Scaled(), strategy="no_shard")
    full = next(slot.full for flat in fsdp.units[0].flats for slot in flat.slots if slot.name == "scale")
    for _ in range(2):
        fsdp.zero_grad()
        output, scale = fsdp(torch.ones(1, 2))
        (output.sum() + scale * (1 + rank)).backward()
        assert fsdp.module.scale.grad.item() == 1.5
        assert not full._backward_hooks


def hooks_after_sharding(rank: int) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        fsdp = pycomm.FullyShardedDataParallel(nn.Linear(2, 2))
        fsdp(torch.ones(1, 2)).sum().backward()
        handle = getattr(fsdp.module.weight, register)(print)
        with pytest.raises(pycomm.ConfigError, match="forward: expected parameters without hooks.*: weight;"):
            fsdp(torch.ones(1, 2))
        handle.remove()
        fsdp(torch.ones(1, 2)).sum().backward()


def optimizer_state_is_cast(rank: int) -> None:
    """As torch's own load_state_dict does: moments to the parameter's dtype, the number of steps stays."""
    fsdp = pycomm.FullyShardedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(fsdp.parameters())
    fsdp(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = fsdp.optimizer_state_dict(optimizer, full=True)
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].double()
    fsdp.load_optimizer_state_dict(optimizer, state)
    for parameter in fsdp.parameters():
        moments = optimizer.state[parameter]
        assert moments["exp_avg"].dtype == torch.float32 and moments["step"].item() == 1


class Counts(torch.optim.Optimizer):
    """Has a number for each parameter, in a tensor of one element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("count", torch.zeros(1)).add_(1)


def scalars_of_optimizers(rank: int) -> None:
    """They are no parts of the parameter, though one rank has but one element of it."""
    fsdp = pycomm.FullyShardedDataParallel(nn.Linear(16, 1))  # 17 elements in parts of 16
    assert sorted(p.numel() for p in fsdp.parameters()) == ([0, 16], [0, 1])[rank]
    optimizer = Counts(fsdp.parameters())
    optimizer.step()
    state = fsdp.optimizer_state_dict(optimizer, full=True)["state"]
    assert {name: values["count"].tolist() for name, values in state.items()} == {"weight": [1.0], "bias": [1.0]}


def pipeline_mistakes(rank: int) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    batch = torch.ones(2, 2), torch.zeros(2, 2)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with torch.no_grad(), pytest.raises(pycomm.ConfigError, match=r"rank 0: gradients are off, .*; rank 1:"):
        pycomm.Pipeline(layers, nn.functional.mse_loss, 2).step(*batch)
    for own, loss, words in (
        ([nn.Sequential(nn.Linear(2, 2), Pair()), layers[1]], nn.functional.mse_loss, "stage 0 returned a tuple"),
        (layers, lambda _output, _targets: None, "loss: expected a function that returns a scalar tensor, got None"),
    ):
        with pytest.raises(pycomm.PycommError, match=words):
            pycomm.Pipeline(own, loss, 2).step(*batch)
    double = pycomm.Pipeline([layer.double() for layer in layers], nn.functional.mse_loss, 2)
    loss = double.step(*(each.double() for each in batch))
    assert loss.dtype == torch.float64 and loss != loss.float()


def modules_that_do_not_fit(rank: int) -> None:
    for engine in (pycomm.DistributedDataParallel, pycomm.FullyShardedDataParallel):
        with pytest.raises(pycomm.ConfigError, match="got some of lazy modules.*: 0.weight, 0.bias; run the module"):
            engine(nn.Sequential(nn.LazyLinear(2)))
    for strategy in ("no_shard", "full_shard"):
        sharded = pycomm.FullyShardedDataParallel(nn.Linear(2, 2), strategy=strategy)
        with pytest.raises(pycomm.ConfigError, match="expected a module that is not sharded.*weight, module.bias"):
            pycomm.DistributedDataParallel(sharded)


class Versioned(nn.Linear):
    """Goes by the version of what it loads."""

    _version = 7
    loaded = None

    def __init__(self) -> None:
        super().__init__(1, 1)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def versions_of_modules(rank: int) -> None:
    """State dicts have them by the modules' own names, also those of a wrapper inside of another module."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = plain.state_dict()._metadata
    assert expected["1"] == {"version": 2}
    ddp = pycomm.DistributedDataParallel(copy.deepcopy(plain))
    fsdp = pycomm.FullyShardedDataParallel(copy.deepcopy(plain))
    for state in (ddp.state_dict(), fsdp.state_dict(), fsdp.full_state_dict()):
        assert {name: state._metadata[name] for name in expected} == expected
    plain.load_state_dict(fsdp.full_state_dict())
    state = nn.Sequential(Versioned()).state_dict()
    before = copy.deepcopy(state._metadata)
    for engine in (pycomm.DistributedDataParallel, pycomm.FullyShardedDataParallel):
        versioned = Versioned()
        engine(nn.Sequential(versioned)).load_state_dict(state)
        assert versioned.loaded == 7 and state._metadata == before, "the caller's own is as it was"
    nested = nn.Sequential(ddp).state_dict()._metadata
    assert {name: nested[f"0.{name}".removesuffix(".")] for name in expected} == expected
