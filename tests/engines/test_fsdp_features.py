"""What FSDP offers beside sharding changes nothing, or what it says: see ``features_job`` for the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pycomm
from engines.cases import BOUND, OPTIMIZERS, Attention, Branches, TinyGPT, batches, loss_of, make, train_alone
from engines.fsdp_cases import STRATEGIES, WRAP, error_of, expected_of, train, whole_gradient
from harness import run_ranks
from pycomm.engines.fsdp import ShardedGradScaler
from pycomm.engines.fsdp.pieces import Piece


def features_job(rank: int) -> None:
    for check in (
        choices_change_nothing,
        lossy_choices_train,
        identity_keeps_shapes,
        unused_parameters,
        frozen_and_reused,
        checkpointed,
        clipped,
        scaled,
        from_meta,
        state_dicts,
        compiled,
        memory,
    ):
        torch.manual_seed(3)
        check(rank)


def test_features() -> None:
    run_ranks(2, features_job)


def over_gloo_job(rank: int) -> None:
    """There calls run beside the computation, on a stream."""
    for strategy in ("full_shard", "shard_grad_op"):
        assert error_of(train("mlp", "sgd", strategy=strategy), expected_of("mlp", "sgd")) < BOUND[torch.float32]
    train("mlp", "sgd", compression="int8+ef", gather_compression="bf16")


def test_features_over_gloo() -> None:
    run_ranks(2, over_gloo_job, transport="torch")


def choices_change_nothing(rank: int) -> None:
    expected, bound = expected_of("gpt", "adamw"), BOUND[torch.float32]
    choices: dict[str, dict[str, Any]] = {
        "one unit": {"wrap": None},
        "by class": {"wrap": Attention},
        "by size": {"wrap": 400},
        "by function": {"wrap": lambda name, module: name == "blocks"},
        "kept after forward": {"reshard_after_forward": False},
        "overlapped": {"overlap": True, "prefetch": 2},
        "overlapped, ZeRO-2": {"overlap": True, "strategy": "shard_grad_op"},
        "overlapped, none": {"overlap": True, "strategy": "no_shard"},
        "optimizer offloaded": {"offload": "optimizer"},
        "optimizer offloaded, ZeRO-1": {"offload": "optimizer", "strategy": "shard_optimizer"},
        "parameters offloaded": {"offload": "parameters"},
        "views": {"keeps_views": True},
        "views, ZeRO-1": {"keeps_views": True, "strategy": "shard_optimizer"},
        "unused allowed": {"find_unused_parameters": True},
        "reduced in double": {"reduce_dtype": torch.float64},
    }
    for strategy in STRATEGIES:
        choices[f"accumulated, {strategy}"] = {"accumulate": 2, "strategy": strategy}
        choices[f"accumulated in shards, {strategy}"] = {"accumulate": 2, "is_synced": True, "strategy": strategy}
    errors = {what: error_of(train("gpt", "adamw", **each), expected) / bound for what, each in choices.items()}
    assert {what: error for what, error in errors.items() if not error <= 1} == {}


def lossy_choices_train(rank: int) -> None:
    """Rounded on the wire or in computation, and near all the same."""
    expected = expected_of("mlp", "sgd")
    limits: list[tuple[dict[str, Any], float]] = [
        ({"param_dtype": torch.bfloat16}, 0.06),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "strategy": "shard_grad_op"}, 0.06),
        ({"param_dtype": torch.bfloat16, "strategy": "no_shard", "offload": "optimizer"}, 0.06),
        ({"compression": "int8+ef"}, 0.06),
        ({"compression": "int4+ef", "gather_compression": "int8+ef", "overlap": True}, 0.3),
        ({"gather_compression": "bf16", "strategy": "shard_optimizer"}, 0.06),
        ({"compression": "powersgd:2+ef", "strategy": "no_shard"}, 0.5),
    ]
    for options, limit in limits:
        assert error_of(train("mlp", "sgd", **options), expected) < limit, options


def identity_keeps_shapes(rank: int) -> None:
    model = make("gpt")
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    pycomm.fully_shard(model, strategy="no_shard")
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == names


def unused_parameters(rank: int) -> None:
    fsdp = pycomm.FullyShardedDataParallel(Branches(), find_unused_parameters=True)
    for _ in range(3):
        fsdp.zero_grad()
        fsdp(torch.ones(1, 2), is_left=rank == 0).sum().backward()
    assert fsdp.module.idle.weight.grad is None
    assert fsdp.module.left.weight.grad is not None and fsdp.module.right.weight.grad is not None
    strict = pycomm.FullyShardedDataParallel(Branches(), wrap=nn.Linear, strategy="no_shard")
    with pytest.raises(pycomm.ConfigError, match=r"rank 0 .*right.weight.*rank 1 .*left.weight"):
        strict(torch.ones(1, 2), is_left=rank == 0).sum().backward()
    for strategy in ("shard_grad_op", "full_shard"):  # parts of the wrong unit, of the right size
        options = {"wrap": nn.Linear, "strategy": strategy, "find_unused_parameters": True}
        apart = pycomm.FullyShardedDataParallel(Branches(), **options)
        with pytest.raises(pycomm.CollectiveMismatchError, match="the ranks gathered and reduced different units"):
            apart(torch.ones(1, 2), is_left=rank == 0).sum().backward()


def frozen_and_reused(rank: int) -> None:
    """A frozen layer before a trained one in a unit, a unit that is called twice, and a weight without its gradient.

    All are needed after the last gradient of their unit has arrived.
    """

    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(functional.linear(x, self.weight.detach()))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), Detached(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.block(self.block(self.first(x))))

    inputs = torch.randn(4, 4)
    model = Twice()
    pycomm.broadcast_parameters(model)
    pycomm.broadcast(inputs, 0)
    alone = Twice()
    alone.load_state_dict(model.state_dict())
    fsdp = pycomm.FullyShardedDataParallel(model, wrap=(nn.Sequential, Detached))
    for net, x in ((fsdp, inputs.chunk(2)[rank]), (alone, inputs)):
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert error_of(fsdp.full_state_dict(), alone.state_dict()) < BOUND[torch.float32]


def checkpointed(rank: int) -> None:
    """What is computed again finds its parameters gathered."""

    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = make("mlp"), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner[:3], x, use_reentrant=self.reentrant)
            return self.inner[3:](x)

    x, alone = torch.ones(2, 8) + rank, make("mlp")
    for is_reentrant in (False, True):
        fsdp = pycomm.FullyShardedDataParallel(Checkpointed(is_reentrant), wrap=nn.Linear)
        fsdp(x.clone().requires_grad_()).square().sum().backward()
        alone.zero_grad()
        (sum(alone(torch.ones(2, 8) + each).square().sum() for each in range(2)) / 2).backward()
        expected = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
        torch.testing.assert_close(whole_gradient(fsdp), expected)
        for strategy in ("shard_optimizer", "full_shard"):  # the unit is around the checkpoint
            fsdp = pycomm.FullyShardedDataParallel(Checkpointed(is_reentrant), strategy=strategy)
            fsdp(x.clone().requires_grad_()).square().sum().backward()
            torch.testing.assert_close(whole_gradient(fsdp), expected)
    plain = make("mlp")
    wrapped = nn.Sequential(*plain[:2], checkpoint_wrapper(plain[2]), *plain[3:])
    fsdp = pycomm.FullyShardedDataParallel(wrapped, wrap=nn.Linear)
    assert list(fsdp.full_state_dict()) == list(fsdp.state_dict()) == list(make("mlp").state_dict())
    assert all(type(each) is Piece for each in fsdp.state_dict().values())
    fsdp.load_state_dict(fsdp.full_state_dict())


def clipped(rank: int) -> None:
    inputs, targets = next(batches("gpt"))
    alone = make("gpt")
    loss_of(alone, inputs, targets).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    for strategy in STRATEGIES:
        fsdp = pycomm.FullyShardedDataParallel(make("gpt"), wrap=WRAP["gpt"], strategy=strategy)
        loss_of(fsdp, inputs.chunk(2)[rank], targets.chunk(2)[rank]).backward()
        torch.testing.assert_close(fsdp.clip_grad_norm_(0.1), expected)
        torch.testing.assert_close(fsdp.clip_grad_norm_(1.0), torch.tensor(0.1))
    fsdp = pycomm.FullyShardedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.complex64))
    fsdp(torch.full((1, 1), 3.0j)).abs().sum().backward()
    for norm, limit in ((3.0, 1.5), (1.5, 2.0)):
        torch.testing.assert_close(fsdp.clip_grad_norm_(limit), torch.tensor(norm))


def scaled(rank: int) -> None:
    """An overflow in one rank's part of the gradients makes all ranks skip the step and halve the scale."""
    for fused in (False, True):
        fsdp = pycomm.FullyShardedDataParallel(nn.Linear(8, 8, bias=False))
        before = fsdp.full_state_dict()["weight"]
        optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.5, fused=fused)
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        for overflow, scale in ((torch.inf, 2.0), (1.0, 2.0)):
            optimizer.zero_grad()
            factors = torch.tensor([overflow, *[1.0] * 7])  # of the rows; the first is in rank 0's part
            scaler.scale((fsdp(torch.ones(2, 8)) * factors).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            changed = (fsdp.full_state_dict()["weight"] != before).all(1).tolist()
            assert changed == [overflow == 1.0] * 8
    lone = [nn.Parameter(torch.ones(1))] if rank == 0 else []  # a rank has no gradient at all
    for each in lone:
        each.grad = torch.full((1,), torch.nan)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)), *lone], lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and all(each.item() == 1.0 for each in lone)


def from_meta(rank: int) -> None:
    with torch.device("meta"):
        model = TinyGPT()
    fsdp = pycomm.FullyShardedDataParallel(
        model, wrap=WRAP["gpt"], initialize=lambda module: module.reset_parameters(), strategy="full_shard"
    )
    state = fsdp.full_state_dict()
    assert state["head.weight"] is state["embedding.weight"] and not any(each.isnan().any() for each in state.values())
    loss_of(fsdp, *next(batches("gpt"))).backward()
    for initialize, words in (
        (None, "are on the meta device"),
        (lambda module: None, "still has values that nobody set"),
    ):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        with pytest.raises(pycomm.ConfigError, match=words):
            pycomm.FullyShardedDataParallel(model, initialize=initialize)


def state_dicts(rank: int) -> None:
    """Full states go to an ordinary module and back into another strategy; optimizers likewise."""
    fsdp = pycomm.fully_shard(make("conv"), wrap=nn.Conv2d)
    optimizer = OPTIMIZERS["adamw"](fsdp.parameters())
    inputs, targets = next(batches("conv"))

    def step(net: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()

    step(fsdp, optimizer)
    assert list(fsdp.state_dict()) == list(make("conv").state_dict())
    state, moments = fsdp.full_state_dict(), fsdp.optimizer_state_dict(optimizer, full=True)
    assert fsdp.full_state_dict(rank=0).keys() == (state.keys() if rank == 0 else set())
    plain = make("conv")
    plain.load_state_dict(state)
    other = pycomm.fully_shard(make("conv"), strategy="shard_optimizer", wrap=nn.Linear)
    other.load_state_dict(state)
    found = other.load_state_dict({**{name: state[name] for name in state if name != "0.bias"}, "odd": 0}, strict=False)
    assert found.missing_keys == ["0.bias"] and found.unexpected_keys == ["odd"]
    with pytest.raises(RuntimeError, match='Missing key.*: "part.0.bias"'):
        nn.ModuleDict({"part": other}).load_state_dict(
            {f"part.{name}": state[name] for name in state if name != "0.bias"}
        )
    resumed = OPTIMIZERS["adamw"](other.parameters())
    other.load_optimizer_state_dict(resumed, moments)
    mirror = OPTIMIZERS["adamw"](plain.parameters())
    named = [name for name, _ in plain.named_parameters()]
    assert list(moments["state"]) == named and moments["state"]["0.weight"]["exp_avg"].shape == plain[0].weight.shape
    numbered = {index: moments["state"][name] for index, name in enumerate(named)}
    groups = [{**each, "params": [named.index(name) for name in each["params"]]} for each in moments["param_groups"]]
    mirror.load_state_dict({"state": numbered, "param_groups": groups})
    step(fsdp, optimizer), step(other, resumed), step(plain, mirror)
    bound = BOUND[torch.float32]
    assert error_of(fsdp.full_state_dict(), plain.state_dict()) < bound
    assert error_of(other.full_state_dict(), plain.state_dict()) < bound
    with pytest.raises(pycomm.CheckpointError, match=r"expected shape \(4, 1, 3, 3\), got \(1,\)"):
        fsdp.load_state_dict({**state, "0.weight": torch.zeros(1)})
    with pytest.raises(pycomm.ConfigError, match="make it from module.parameters"):
        fsdp.optimizer_state_dict(mirror)


def compiled(rank: int) -> None:
    """The module as a whole, or its units."""
    expected = list(train_alone("mlp", "sgd").values())
    units = nn.Sequential(*(torch.compile(module, backend="eager") for module in make("mlp")))
    for model, wrap in ((torch.compile(make("mlp"), backend="eager"), None), (units, ["0", "2"])):
        fsdp = pycomm.fully_shard(model, wrap=wrap)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for inputs, targets in batches("mlp"):
            optimizer.zero_grad()
            loss_of(model, inputs.chunk(2)[rank], targets.chunk(2)[rank]).backward()
            optimizer.step()
        torch.testing.assert_close(list(fsdp.full_state_dict().values()), expected)


def memory(rank: int) -> None:
    """Each stage holds what ZeRO's formula says, and the units at work; offloading moves it to the other column."""
    width, layers = 64, 24
    unit = width * width * 4
    whole, stages = layers * unit, {"no_shard": 4.0, "shard_optimizer": 3.0, "shard_grad_op": 2.5, "full_shard": 2.0}

    def peak(trains: int = layers, **options: Any) -> Any:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in model[trains:]:
            layer.requires_grad_(False)
        fsdp = pycomm.FullyShardedDataParallel(model, wrap=nn.Linear, measures_activations=True, **options)
        optimizer = torch.optim.AdamW([p for p in fsdp.parameters() if p.requires_grad])
        for _ in range(2):
            fsdp(torch.randn(8, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return fsdp.memory_stats()

    for strategy, copies in stages.items():
        stats = peak(strategy=strategy)
        assert copies * whole <= stats.states.device_peak <= 1.1 * copies * whole, (strategy, stats)
        assert stats.activations.device_peak == layers * 8 * width * 4 and stats.activations.device == 0
    shard = whole // 2
    assert peak(trains=1).parameters.device_peak <= shard + 2 * unit  # those that are frozen are freed, too
    states = peak(offload="optimizer")
    assert states.optimizer.device_peak == 0 and states.optimizer.host > 2 * shard and states.parameters.host == shard
    everything = peak(offload="parameters")
    assert everything.parameters.device == 0 and everything.parameters.device_peak <= 2 * unit
    assert everything.gradients.device_peak <= 2 * unit and everything.gradients.host == shard
