"""FSDP on n ranks equals one process on the joined batch, whatever is sharded; mistakes are errors everywhere.

Many cases run in one started job: starting the ranks takes longer than they do.
"""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pycomm
import pycomm.torch_backend
from engines.cases import MODELS, OPTIMIZERS, Attention, TinyGPT, batches, loss_of, make, relative_error, train_alone
from engines.test_ddp import BOUND
from harness import run_ranks
from pycomm.engines.fsdp.pieces import Piece, boxes
from pycomm.engines.tensor import ColumnParallelLinear, RowParallelLinear

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


# -- everything else ---------------------------------------------------------------------------------------------------


def features_job(rank: int) -> None:
    for check in (
        choices_change_nothing,
        lossy_choices_train,
        identity_keeps_shapes,
        unused_parameters,
        frozen_and_reused,
        checkpointed,
        clipped,
        from_meta,
        state_dicts,
        several_passes,
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


class Branches(nn.Module):
    """Uses ``left`` or ``right``, never ``idle``."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
        return self.left(x) if is_left else self.right(x)


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
        torch.testing.assert_close(whole_gradient(fsdp), torch.cat([p.grad.reshape(-1) for p in alone.parameters()]))


def whole_gradient(fsdp: pycomm.FullyShardedDataParallel) -> torch.Tensor:
    """Returns the ranks' parts of the gradient, as one SGD step shows them."""
    before = fsdp.full_state_dict()
    torch.optim.SGD(fsdp.parameters(), lr=1.0).step()
    return torch.cat([(before[name] - after).reshape(-1) for name, after in fsdp.full_state_dict().items()])


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


def several_passes(rank: int) -> None:
    """Evaluation between forward and backward, a loss that is never used, and an error in the middle of a pass."""
    fsdp = pycomm.FullyShardedDataParallel(make("mlp"), wrap=nn.Linear)
    inputs, targets = next(batches("mlp"))
    loss = loss_of(fsdp, inputs, targets)
    with torch.no_grad():
        fsdp(inputs)
    loss.backward()
    expected = [p.grad.clone() for p in fsdp.parameters()]
    loss_of(fsdp, inputs, targets)
    fsdp.zero_grad()

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    hidden = fsdp.module[2].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="in the middle"):
        loss_of(fsdp, inputs, targets).backward()
    hidden.remove()
    fsdp.zero_grad()
    loss_of(fsdp, inputs, targets).backward()
    torch.testing.assert_close([p.grad for p in fsdp.parameters()], expected)


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


def test_hybrid_shards_and_meshes() -> None:
    for errors in run_ranks(4, hybrid_job):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def trained(strategy: str, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Returns an engine and its optimizer after some steps on the whole batch, the same in every world."""
    fsdp = pycomm.FullyShardedDataParallel(make("gpt"), wrap=WRAP["gpt"], strategy=strategy)
    optimizer = OPTIMIZERS["adamw"](fsdp.parameters())
    for inputs, targets in itertools.islice(batches("gpt"), steps):
        optimizer.zero_grad()
        loss_of(fsdp, inputs, targets).backward()
        optimizer.step()
    return fsdp, optimizer


def save_job(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=pycomm.world_size())
    fsdp, optimizer = trained("full_shard", steps=3)
    state = {"model": fsdp.state_dict(), "optimizer": fsdp.optimizer_state_dict(optimizer)}
    assert isinstance(state["model"]["embedding.weight"], Piece)
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    dist.destroy_process_group()


def load_job(rank: int, folder: str) -> None:
    pycomm.torch_backend.register()
    store = dist.FileStore(f"{folder}/another")
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=pycomm.world_size())
    fsdp, optimizer = trained("shard_optimizer", steps=0)
    state = {"model": fsdp.state_dict(), "optimizer": fsdp.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    fsdp.load_state_dict(state["model"])
    fsdp.load_optimizer_state_dict(optimizer, state["optimizer"])
    dist.destroy_process_group()
    expected, expected_optimizer = trained("no_shard", steps=3)
    for engine, each in ((fsdp, optimizer), (expected, expected_optimizer)):
        each.zero_grad()
        loss_of(engine, *next(batches("gpt"))).backward()
        each.step()
    assert error_of(fsdp.full_state_dict(), expected.full_state_dict()) < 1e-5


def test_checkpoints_load_into_another_world(tmp_path: Path) -> None:
    """Saved by three ranks, loaded by two that shard otherwise, and by a process that knows no engine."""
    run_ranks(3, save_job, str(tmp_path))
    run_ranks(2, load_job, str(tmp_path))
    plain = make("gpt")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    alone = make("gpt")
    optimizer = OPTIMIZERS["adamw"](alone.parameters())
    for inputs, targets in itertools.islice(batches("gpt"), 3):
        optimizer.zero_grad()
        loss_of(alone, inputs, targets).backward()
        optimizer.step()
    assert relative_error(plain.state_dict(), alone.state_dict()) < 1e-5


def test_boxes_cover_a_run_of_elements_once() -> None:
    for shape in ((), (7,), (3, 5), (2, 3, 4), (3, 1, 2, 2), (4, 0, 2)):
        whole = torch.arange(prod(shape)).view(shape)
        for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
            found = []
            for box in boxes(shape, start, stop):
                part = whole[tuple(slice(at, at + length) for at, length in zip(box.offsets, box.sizes))]
                assert part.reshape(-1)[0] == box.start
                found += part.reshape(-1).tolist()
            assert found == list(range(start, stop))


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
    for layer in (nn.LayerNorm, nn.BatchNorm1d):  # without buffers, which are sent before parameters, and with
        for overlap in (False, True):
            changed = wrap(nn.Sequential(nn.Linear(2, 2), layer(2)), overlap=overlap)
            if rank == 1:
                changed.module.register_parameter("late", nn.Parameter(torch.zeros(1)))
            error = pycomm.ConfigError if rank == 1 else pycomm.CollectiveMismatchError
            with pytest.raises(error, match="barrier" if rank != 1 else "late"):
                changed(torch.ones(3, 2))


def test_mistakes_are_errors_on_every_rank() -> None:
    run_ranks(3, mistakes_job)
