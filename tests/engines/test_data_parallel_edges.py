"""What users do beside a plain training loop: freeze and unfreeze, clip, differentiate twice, copy, end early."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pycomm
from harness import run_ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def edges_job(rank: int) -> None:
    for check in (
        optimizer_with_more_parameters,
        clips_the_gradients_that_there_are,
        gradients_of_inputs,
        outputs_that_are_parameters,
        gradients_that_do_not_fit,
        fused_optimizers_with_channels_last,
        cast_after_wrapping,
        cannot_be_copied,
        buffers_of_all_kinds,
        several_forward_passes_a_step,
        buffers_of_two_forward_passes,
        goes_on_after_a_pass_that_raised,
        optimizer_goes_on_after_a_pass_that_raised,
        trains_in_eval_mode,
        a_child_that_is_called_module,
        a_norm_that_is_not_a_number,
        join_that_raises,
        scheduler_before_the_optimizer,
        optimizer_state_with_named_tuples,
        sharded_engines_end_their_threads,
        sharded_engines_are_freed,
    ):
        torch.manual_seed(3 + rank)
        check(rank)


def fused_optimizers_with_channels_last(rank: int) -> None:
    """They go through a parameter and its gradient by memory, so both have to lie alike."""
    torch.manual_seed(5)
    images = torch.randn(2, 3, 8, 8)

    def convolutions() -> nn.Module:
        torch.manual_seed(6)
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, (3, 2), bias=False), nn.ReLU(), nn.Conv2d(5, 2, 1)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    for wraps_optimizer, compression in ((False, None), (True, None), (False, "none+ef")):
        alone, model = convolutions(), convolutions()
        expected = torch.optim.AdamW(alone.parameters(), lr=0.1, fused=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        engine: nn.Module = model
        if wraps_optimizer:
            optimizer = pycomm.DistributedOptimizer(optimizer, model.named_parameters())
        else:
            engine = pycomm.DistributedDataParallel(model, compression=compression)
        for step in range(4):
            for each, net in ((expected, alone), (optimizer, engine)):
                each.zero_grad(set_to_none=step % 2 == 0)
                net(images).square().mean().backward()
                each.step()
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert mine.grad is not None and mine.grad.stride() == mine.stride()
                assert torch.allclose(mine, theirs, atol=1e-6)

    mixed = convolutions() if rank else convolutions().to(memory_format=torch.contiguous_format)
    with pytest.raises(pycomm.CollectiveMismatchError, match=r"'0.weight: .*, dimensions \[0, 2, 3, 1\] in memory'"):
        pycomm.DistributedDataParallel(mixed)
    engine = pycomm.DistributedDataParallel(convolutions())
    engine.to(memory_format=torch.contiguous_format)
    with pytest.raises(pycomm.ConfigError, match="memory format: 0.weight, 2.weight"):
        engine(images)


class Raises(torch.autograd.Function):
    """The identity, whose backward pass raises while it is told to."""

    is_told = True

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if Raises.is_told:
            raise ValueError("on purpose")
        return gradient


def goes_on_after_a_pass_that_raised(rank: int) -> None:
    """In the first one, which is looked at for the order of the buckets."""
    alone, inputs = mlp(), torch.randn(4, 3)

    def loss(model: nn.Sequential) -> torch.Tensor:
        return model[2](Raises.apply(model[1](model[0](inputs)))).square().mean()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self) -> torch.Tensor:
            return loss(self.net)

    ddp = pycomm.DistributedDataParallel(Whole(), bucket_bytes=64)
    Raises.is_told = True
    with pytest.raises(ValueError, match="on purpose"):
        ddp().backward()
    Raises.is_told = False
    for _ in range(4):
        ddp.zero_grad()
        alone.zero_grad()
        ddp().backward()
        loss(alone).backward()
        for mine, its in zip(ddp.module.net.parameters(), alone.parameters(), strict=True):
            pycomm.all_reduce_mean(its.grad)
            torch.testing.assert_close(mine.grad, its.grad)
        norm = torch.nn.utils.get_total_norm([its.grad for its in alone.parameters()])
        torch.testing.assert_close(ddp.clip_grad_norm_(1e9), norm)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, is_used: bool) -> torch.Tensor:
        return self.layer(x) if is_used else 2 * x


def optimizer_goes_on_after_a_pass_that_raised(rank: int) -> None:
    """In any pass of several that add up, also where no step has been made in between."""
    alone, model = mlp(), mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = pycomm.DistributedOptimizer(sgd, model.named_parameters(), bucket_bytes=64, backward_passes_per_step=2)
    inputs = torch.randn(4, 3)
    for raising in ([], [0], [1], [0, 1], []):
        optimizer.zero_grad()
        alone.zero_grad()
        for micro in range(2):
            if micro in raising:
                kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                Raises.is_told = True
                with pytest.raises(ValueError, match="on purpose"):
                    model[2](Raises.apply(model[1](model[0](inputs)))).sum().backward()
                Raises.is_told = False
                for parameter, before in zip(model.parameters(), kept, strict=True):
                    parameter.grad = before
            for net in (model, alone):
                net(inputs + micro).square().mean().backward()
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            pycomm.all_reduce_mean(its.grad)
            torch.testing.assert_close(mine.grad, its.grad)
        optimizer.step()
        alone.load_state_dict(model.state_dict())


def trains_in_eval_mode(rank: int) -> None:
    """As who tunes a model with the statistics of its BatchNorms fixed; one rank may also evaluate alone."""
    alone, net, inputs = mlp(), mlp(), torch.randn(4, 3)
    net[0].bias.requires_grad_(False)
    ddp = pycomm.DistributedDataParallel(net, bucket_bytes=64).eval()
    for step in range(4):
        ddp.zero_grad()
        alone.zero_grad()
        if rank == step % 2:
            ddp(inputs)  # evaluates
        if step == 1:
            with pytest.raises(ValueError, match="on purpose"):
                Raises.is_told = True
                Raises.apply(ddp(inputs)).sum().backward()
            Raises.is_told = False
        for model in (ddp, alone):
            model(inputs).square().mean().backward()
        for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
            pycomm.all_reduce_mean(its.grad)
            if mine is not net[0].bias:
                torch.testing.assert_close(mine.grad, its.grad)
    either = pycomm.DistributedDataParallel(Either(), find_unused_parameters=True).eval()
    for used_by in (0, 1):
        either.zero_grad()
        either(torch.full((1, 1), 3.0, requires_grad=True), rank == used_by).sum().backward()
        assert either.module.layer.weight.grad.item() == 1.5
    net.requires_grad_(False)
    ddp(inputs.requires_grad_()).sum().backward()
    assert inputs.grad is not None, "freezing is not refused: an adversarial example"
    net[0].bias.requires_grad_(True)
    with pytest.raises(pycomm.ConfigError, match=r"were unfrozen .* would not be averaged: 0.bias\. Wrap"):
        ddp(inputs)
    with torch.no_grad():
        ddp(inputs)


def a_child_that_is_called_module(rank: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)
            self.module = nn.ModuleDict({"head": nn.Linear(1, 1)})

    net = Net()
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    ddp = pycomm.DistributedDataParallel(net, buffers=None)
    pycomm.broadcast_parameters(expected)
    assert ddp.state_dict().keys() == expected.keys()
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in expected.items())
    other = {name: value + 1 for name, value in expected.items()}
    ddp.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in net.state_dict().items())


def a_norm_that_is_not_a_number(rank: int) -> None:
    """Is in all gradients then, as torch has it, and not hidden."""
    ddp = pycomm.DistributedDataParallel(nn.Linear(2, 1))
    ddp(torch.tensor([[float("nan"), 1.0]])).sum().backward()
    assert ddp.clip_grad_norm_(1.0).isnan()
    assert all(parameter.grad.isnan().all() for parameter in ddp.parameters())


def join_that_raises(rank: int) -> None:
    """Leaves no scale behind, by which the mean was over those who had data."""
    ddp = pycomm.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="on purpose"), ddp.join():
        ddp(torch.ones(1, 1)).backward()
        ddp.reducer.scale = 2.0  # as if another had ended
        raise ValueError("on purpose")
    ddp.zero_grad()
    ddp(torch.ones(1, 1)).backward()
    assert ddp.module.weight.grad.item() == 1.0


def scheduler_before_the_optimizer(rank: int) -> None:
    net = mlp()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = pycomm.DistributedOptimizer(plain, net.named_parameters())
    net(torch.full((1, 3), rank + 1.0)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(pycomm.ConfigError, match="no closure"):
        optimizer.step(lambda: 0.0)


class Moments(NamedTuple):
    first: torch.Tensor
    second: int


def optimizer_state_with_named_tuples(rank: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["moments"] = Moments(torch.full((2,), float(rank)), rank)
    pycomm.broadcast_optimizer_state(optimizer)
    moments = optimizer.param_groups[0]["moments"]
    assert isinstance(moments, Moments) and moments.first.tolist() == [0.0, 0.0] and moments.second == 0


def sharded_engines_end_their_threads(rank: int) -> None:
    def streams() -> int:
        return sum(thread.name == "pycomm-stream-fsdp" for thread in threading.enumerate())

    before = streams()
    fsdp = pycomm.FullyShardedDataParallel(mlp(), overlap=True)
    fsdp(torch.ones(1, 3)).sum().backward()
    assert streams() > before
    fsdp.close()
    assert streams() == before
    state = fsdp.full_state_dict()
    assert all(torch.equal(state[name], each) for name, each in mlp().state_dict().items())
    with pytest.raises(pycomm.TransportError, match="stream 'fsdp' is closed"):
        fsdp(torch.ones(1, 3))
    pycomm.FullyShardedDataParallel(mlp(), overlap=False).close()


def sharded_engines_are_freed(rank: int) -> None:
    engines = [pycomm.FullyShardedDataParallel(mlp())]

    def drop(*_: object) -> None:
        engines.clear()
        gc.collect()

    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        dropping = register(drop)  # in the middle of a step, while torch goes through its hooks
        engines.append(pycomm.FullyShardedDataParallel(mlp()))
        torch.optim.SGD(mlp().parameters(), lr=0.1).step()
        assert not engines
        dropping.remove()
    for strategy in ("no_shard", "full_shard"):
        net = mlp()
        engine = pycomm.FullyShardedDataParallel(net, strategy=strategy)
        engine(torch.ones(1, 3)).sum().backward()
        gone = [weakref.ref(engine), weakref.ref(net)]
        del engine, net
        gc.collect()
        assert [each() for each in gone] == [None, None]


def test_edges() -> None:
    run_ranks(2, edges_job)


def optimizer_with_more_parameters(rank: int) -> None:
    """Added or unfrozen parameters would drift apart; after wrapping again all are averaged."""
    for change in ("unfrozen", "added"):
        model = mlp()
        model[0].requires_grad_(False)
        parameters = model.parameters() if change == "unfrozen" else model[2].parameters()
        optimizer = pycomm.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model[2].named_parameters())
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        model[0].requires_grad_(True)
        if change == "added":
            optimizer.add_param_group({"params": model[0].parameters()})
        with pytest.raises(pycomm.ConfigError, match=r"2 parameters, of shapes \[\(4, 3\), \(4,\)\].*expected the 2"):
            optimizer.step()
        assert pycomm.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        assert same_on_all_ranks(model.parameters()), change
    if rank == 0:  # a rank that is alone with it lets the others know
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(pycomm.ConfigError if rank == 0 else pycomm.CollectiveMismatchError):
        optimizer.step()
        optimizer.synchronize()


def clips_the_gradients_that_there_are(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        ddp = pycomm.DistributedDataParallel(mlp().to(dtype), bucket_bytes=32)
        inputs = torch.randn(2, 3).to(dtype)
        ddp(inputs).abs().sum().backward()
        check_clipping(ddp)
        for parameter in ddp.module[2].parameters():  # as with a frozen last layer
            parameter.grad = None
        check_clipping(ddp)
        for parameter in ddp.module[0].parameters():
            parameter.grad = parameter.grad * 3
        check_clipping(ddp)
        ddp.zero_grad()
        assert ddp.clip_grad_norm_(1.0) == 0
        with ddp.no_sync():
            ddp(inputs).abs().sum().backward()
        check_clipping(ddp)


def check_clipping(ddp: nn.Module) -> None:
    before = norm_of(ddp)
    torch.testing.assert_close(ddp.clip_grad_norm_(before.item() / 2).double(), before, rtol=1e-2, atol=0)
    torch.testing.assert_close(norm_of(ddp), before / 2, rtol=1e-2, atol=0)


def norm_of(module: nn.Module) -> torch.Tensor:
    gradients = [p.grad.to(torch.complex128).flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients).abs().square().sum().sqrt()


def gradients_of_inputs(rank: int) -> None:
    """autograd.grad through an output is no backward pass, whatever it is for; a penalty on it is part of the next."""
    for options in ({}, {"overlap": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        model, alone = mlp(), mlp()
        ddp = pycomm.DistributedDataParallel(model, **options)
        everyone = torch.arange(12.0).view(4, 3).sin()
        for _ in range(2):
            ddp.zero_grad(), alone.zero_grad()
            share = everyone.chunk(2)[rank].clone().requires_grad_()
            penalized(ddp, share).backward()
            (sum(penalized(alone, rows.clone().requires_grad_()) for rows in everyone.chunk(2)) / 2).backward()
            for parameter, expected in zip(model.parameters(), alone.parameters()):
                torch.testing.assert_close(parameter.grad, expected.grad)
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        torch.autograd.grad(ddp(share).sum(), [share, model[0].weight])
        torch.autograd.grad(ddp(share).sum(), model[0].bias)
        assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), kept))
    strict = pycomm.DistributedDataParallel(mlp())
    with pytest.raises(pycomm.ConfigError, match="got no gradient"):
        (strict(share).detach().requires_grad_() + strict(share)).sum().backward(inputs=[strict.module[0].weight])


def penalized(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + slope.square().mean()


class Scaled(nn.Module):
    """Returns its scale beside its result; ``is_alone``: only the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, is_alone: bool = False) -> tuple[torch.Tensor, ...]:
        return (self.scale,) if is_alone else (self.linear(x), self.scale)


def outputs_that_are_parameters(rank: int) -> None:
    ddp = pycomm.DistributedDataParallel(Scaled(), find_unused_parameters=True)
    for _ in range(3):
        ddp.zero_grad()
        y, scale = ddp(torch.ones(1, 3))
        (y.sum().detach() + scale * (1 + rank)).backward()
        assert ddp.module.scale.grad.item() == 1.5
    (scale,) = ddp(torch.ones(1, 3), is_alone=True)
    (scale * (1 + rank)).backward()
    assert ddp.module.scale.grad.item() == 3.0
    assert not ddp.module.scale._backward_hooks


def gradients_that_do_not_fit(rank: int) -> None:
    sparse = pycomm.DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    with pytest.raises(pycomm.ConfigError, match=r"'0.weight' is torch.sparse_coo.*Embedding\(sparse=False\)"):
        sparse(torch.tensor([rank])).sum().backward()
    for overlap in (False, True):
        ddp = pycomm.DistributedDataParallel(mlp(), overlap=overlap)
        with pytest.raises(pycomm.ConfigError, match=r"'2\.\w+' has a graph of its own.*autograd.grad"):
            ddp(torch.ones(1, 3)).sum().backward(create_graph=True)
        ddp.zero_grad()
        with pytest.raises(pycomm.ConfigError if rank == 0 else pycomm.CollectiveMismatchError):
            ddp(torch.ones(1, 3)).sum().backward(create_graph=rank == 0)
        ddp.zero_grad()
        ddp(torch.full((1, 3), 1.0 + rank)).sum().backward()
        assert same_on_all_ranks(p.grad for p in ddp.parameters())
    model = mlp()
    optimizer = pycomm.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
    model.bfloat16()
    with pytest.raises(pycomm.ConfigError, match=r"is torch.bfloat16 on cpu.*cast and move a module before"):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()


def cast_after_wrapping(rank: int) -> None:
    """What a module's gradients lie in is exchanged by a cast; there and back, all is as it was."""
    ddp = pycomm.DistributedDataParallel(mlp())
    for is_kept in (True, False):
        inputs = torch.full((1, 3), 1.0 + rank)
        ddp(inputs).sum().backward()
        ddp.bfloat16()
        with pytest.raises(pycomm.ConfigError, match=r"dtype, device or memory format: 0.bias, 0.weight"):
            ddp(inputs.bfloat16())
        ddp.float()
        if not is_kept:
            ddp.zero_grad()
        ddp(inputs).sum().backward()
        assert ddp.module[2].bias.grad.tolist() == [2.0 if is_kept else 1.0] * 2
        assert same_on_all_ranks(p.grad for p in ddp.parameters())
        ddp.zero_grad()


def cannot_be_copied(rank: int) -> None:
    ddp = pycomm.DistributedDataParallel(mlp())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(pycomm.ConfigError, match=r"cannot be copied or pickled.*\.module"):
            attempt(ddp)
    net = mlp()
    optimizer = pycomm.DistributedOptimizer(torch.optim.SGD(net.parameters()), net.named_parameters())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(pycomm.ConfigError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            attempt(optimizer)
    with pytest.raises(pycomm.ConfigError, match="a group cannot be copied or pickled"):
        copy.deepcopy(pycomm.get_group(None).transport)
    assert torch.equal(copy.deepcopy(ddp.module)[0].weight, ddp.module[0].weight)


class Buffered(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def buffers_of_all_kinds(rank: int) -> None:
    for dtype, unit, averaged in ((torch.complex64, 1 + 1j, 1.5 + 1.5j), (torch.int32, 1, 1)):
        ddp = pycomm.DistributedDataParallel(Buffered(torch.zeros(2, dtype=dtype)), buffers="average")
        ddp.module.kept.fill_((1 + rank) * unit)
        ddp(torch.ones(1, 2))
        assert ddp.module.kept.tolist() == [averaged] * 2
    for buffer, words in ((torch.ones(1).expand(4), r"expanded to \(4,\)"), (torch.eye(2).to_sparse(), "sparse_coo")):
        with pytest.raises(pycomm.ConfigError, match=rf"buffer 'kept'.*{words}"):
            pycomm.DistributedDataParallel(Buffered(buffer))


def several_forward_passes_a_step(rank: int) -> None:
    """As of uneven inputs, with a forward pass that nothing comes of, one that is not synced, and two for a step."""
    for overlap in (False, True):
        ddp = pycomm.DistributedDataParallel(nn.Linear(2, 1, bias=False), overlap=overlap)
        nn.init.zeros_(ddp.module.weight)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        inputs = torch.full((1, 2), 1.0 + rank)
        with ddp.join():
            for _ in range(2 + 2 * rank):
                optimizer.zero_grad()
                ddp(inputs)
                with ddp.no_sync():
                    ddp(inputs).sum().backward()
                (ddp(inputs) + ddp(inputs)).sum().backward()
                optimizer.step()
        assert torch.equal(ddp.module.weight, torch.full((1, 2), -3 * (2 * 1.5 + 2 * 2.0)))


def buffers_of_two_forward_passes(rank: int) -> None:
    """Autograd keeps what a buffer was in the first one: a second one before the backward pass changes none."""
    for engine in (pycomm.DistributedDataParallel, pycomm.FullyShardedDataParallel):
        for mode, equal in (("broadcast", 1.0), ("average", 1.5)):
            norm = nn.BatchNorm1d(2)
            model = engine(nn.Sequential(nn.Linear(2, 2), norm), buffers=mode)
            norm.momentum = 0.0
            for _ in range(2):
                losses = []
                for kept in (equal, 1.0 + rank):  # of a step the first pass makes them equal, the second does not
                    norm.running_mean.data.fill_(1.0 + rank)
                    losses.append(model(torch.randn(4, 2)).square().sum())
                    assert norm.running_mean.tolist() == [kept] * 2, (engine, mode)
                sum(losses).backward()


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    everyone = torch.empty(pycomm.world_size(), flat.numel())
    pycomm.all_gather_single(everyone, flat)
    return all(torch.equal(flat, each) for each in everyone)
