"""FSDP where a program does other things than one forward and one backward pass a step."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pycomm
from engines.cases import Doubles, batches, loss_of, make
from engines.fsdp_cases import STRATEGIES, whole_gradient
from harness import run_ranks


def passes_job(rank: int) -> None:
    for check in (
        several_passes,
        averages_swapped,
        no_parameter_wanted,
        penalized,
        dropped,
        dataclasses_come_out,
        shared,
        changed_in_place,
        forces_inside,
        accumulated_before_an_error,
        set_to_zero_and_not_to_none,
    ):
        torch.manual_seed(3)
        check(rank)


def test_passes() -> None:
    run_ranks(2, passes_job)


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

    hidden = fsdp.module[2].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="in the middle"):
        loss_of(fsdp, inputs, targets).backward()
    hidden.remove()
    fsdp.zero_grad()
    loss_of(fsdp, inputs, targets).backward()
    torch.testing.assert_close([p.grad for p in fsdp.parameters()], expected)


def shared(rank: int) -> None:
    """A layer that stands in two units belongs to the one around them; one that is a unit by itself stays one."""
    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), layer))
    alone, inputs = copy.deepcopy(model), torch.randn(3, 8)
    alone(inputs).sum().backward()
    for wrap, names in ((["0", "1"], ["", "0", "1"]), (["0", "1", "0.0"], ["", "0", "0.0", "1"])):
        fsdp = pycomm.FullyShardedDataParallel(copy.deepcopy(model), wrap=wrap)
        found = {unit.name: [slot.name for flat in unit.flats for slot in flat.slots] for unit in fsdp.units}
        assert list(found) == names and found["0.0" if "0.0" in names else ""] == ["0.0.weight", "0.0.bias"], found
        fsdp(inputs).sum().backward()
        expected = [p.grad.reshape(-1) for _, p in alone.named_parameters(remove_duplicate=False)]
        torch.testing.assert_close(whole_gradient(fsdp), torch.cat(expected))


def fail(_gradient: torch.Tensor) -> None:
    raise ValueError("in the middle")


class Forces(nn.Module):
    """Computes with the gradient of an energy, by which the weights are trained too, and goes on after that."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.energy(x)
        hook = x.register_hook(fail)
        with suppress(ValueError):  # a run that ends in the middle
            torch.autograd.grad(energy.sum(), x, retain_graph=True)
        hook.remove()
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return x + energy + self.scale * forces


def forces_inside(rank: int) -> None:
    alone, inputs = nn.Sequential(nn.Linear(6, 6), Forces(), Forces(), nn.Linear(6, 6)), torch.randn(3, 6)
    for strategy, wrap, finds_unused in itertools.product(
        STRATEGIES, (None, Forces, nn.Linear, (Forces, nn.Linear)), (False, True)
    ):
        fsdp = pycomm.FullyShardedDataParallel(
            copy.deepcopy(alone), strategy=strategy, wrap=wrap, find_unused_parameters=finds_unused
        )
        for is_training in (True, False, True):
            results = []
            for model in (alone, fsdp):
                model.train(is_training).zero_grad()
                results.append(model(inputs))
                if is_training:
                    results[-1].square().sum().backward()
            torch.testing.assert_close(results[1], results[0])
        expected = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
        torch.testing.assert_close(whole_gradient(fsdp), expected, msg=str((strategy, wrap, finds_unused)))


def accumulated_before_an_error(rank: int) -> None:
    """After a pass that raised the gradients are those from before it, or what it had added to them; none is lost."""
    inputs = torch.randn(4, 6)
    for strategy in STRATEGIES:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        fsdp = pycomm.FullyShardedDataParallel(model, strategy=strategy, wrap=nn.Linear, overlap=True)
        gradients = []
        for factor in (2, 1):
            fsdp.zero_grad()
            fsdp(factor * inputs).square().sum().backward()
            gradients.append([p.grad.clone() for p in fsdp.parameters()])

        hidden = fsdp.module[0].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
        with pytest.raises(ValueError, match="in the middle"):
            fsdp(2 * inputs).square().sum().backward()
        hidden.remove()
        with torch.no_grad():
            fsdp(inputs)  # puts an end to it
        for (name, parameter), added, before in zip(fsdp.named_parameters(), *gradients, strict=True):
            assert parameter.grad is not None, (strategy, name)
            is_added = bool((parameter.grad - before).abs().max() > 1e-4) if before.numel() else False
            assert not (is_added and name.startswith("0.")), (strategy, name)
            torch.testing.assert_close(parameter.grad, before + added if is_added else before, msg=f"{strategy} {name}")


def set_to_zero_and_not_to_none(rank: int) -> None:
    """In the middle of an accumulation, which then begins anew with what comes after it."""
    inputs = torch.randn(4, 6)
    for strategy in STRATEGIES:
        fsdp = pycomm.FullyShardedDataParallel(nn.Linear(6, 2), strategy=strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        fsdp(inputs).sum().backward()
        expected = whole_gradient(fsdp)
        with fsdp.no_sync():
            fsdp(0 * inputs).sum().mul(0).backward()
        optimizer.zero_grad(set_to_none=False)
        fsdp(inputs).sum().backward()
        torch.testing.assert_close(whole_gradient(fsdp), expected, msg=strategy)
        with fsdp.no_sync():
            fsdp(inputs).sum().mul(0).backward()
        fsdp(inputs).sum().backward()
        torch.testing.assert_close(whole_gradient(fsdp), 2 * expected, msg=f"{strategy}, zeros came")


class Viewed(nn.Module):
    """A unit that gives back a view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def changed_in_place(rank: int) -> None:
    """What a unit gives, a view as a linear layer's of more than two dimensions is, is changed by the next layer."""
    layers = [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), Viewed(), Doubles(), nn.Linear(6, 6), Doubles()]
    alone, inputs = nn.Sequential(*layers), torch.randn(2, 3, 6)
    for wrap in (nn.Linear, (nn.Linear, Viewed, Doubles)):
        fsdp = pycomm.FullyShardedDataParallel(copy.deepcopy(alone), wrap=wrap)
        for _ in range(2):
            alone.zero_grad()
            alone(inputs).square().sum().backward()
            fsdp.zero_grad()
            fsdp(inputs).square().sum().backward()
        expected = [(p.grad if p.requires_grad else torch.zeros_like(p)).reshape(-1) for p in alone.parameters()]
        torch.testing.assert_close(whole_gradient(fsdp), torch.cat(expected))


def averages_swapped(rank: int) -> None:
    """Other values by ``p.data`` for evaluation, such as averages, and then those that are trained again."""
    inputs, targets = next(batches("mlp"))
    for strategy in STRATEGIES:
        fsdp = pycomm.FullyShardedDataParallel(make("mlp"), strategy=strategy)
        losses = []
        for factor, mode in ((1.0, torch.no_grad), (0.5, torch.enable_grad), (2.0, torch.no_grad)):
            for p in fsdp.parameters():
                p.data.mul_(factor)
            with mode():
                losses.append(loss_of(fsdp, inputs, targets).item())
        assert losses[0] == losses[2] != losses[1], (strategy, losses)


def no_parameter_wanted(rank: int) -> None:
    """The gradient of an input alone leaves the parameters' as they are, also sums that wait for their reduction."""
    inputs, targets = next(batches("mlp"))
    alone, x = make("mlp"), inputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(alone, x, targets), x)
    for options in ({}, {"overlap": True}, {"strategy": "no_shard"}, {"compression": "int8+ef", "overlap": True}):
        fsdp = pycomm.FullyShardedDataParallel(make("mlp"), wrap=nn.Linear, **options)
        (found,) = torch.autograd.grad(loss_of(fsdp, x, targets), x)
        torch.testing.assert_close(found, expected)
        assert all(p.grad is None for p in fsdp.parameters())
        for is_synced in (False, True):
            with nullcontext() if is_synced else fsdp.no_sync():
                fsdp(inputs).sum().backward()
            before = [p.grad.clone() for p in fsdp.parameters()]
            torch.autograd.grad(loss_of(fsdp, x, targets), x)
            torch.testing.assert_close([p.grad for p in fsdp.parameters()], before, rtol=0, atol=0)


def penalized(rank: int) -> None:
    """A gradient with a graph of its own, differentiated in the pass that follows."""
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    pycomm.broadcast_parameters(alone)
    fsdp = pycomm.FullyShardedDataParallel(copy.deepcopy(alone), wrap=nn.Sequential)
    held = fsdp.memory_stats().parameters.device
    for net in (alone, fsdp, fsdp):
        net.zero_grad()
        x = torch.ones(2, 4, requires_grad=True)
        output = net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.sum() + slope.square().sum()).backward()
    torch.testing.assert_close(whole_gradient(fsdp), torch.cat([p.grad.reshape(-1) for p in alone.parameters()]))
    assert fsdp.memory_stats().parameters.device == held
    lbfgs = torch.optim.LBFGS(fsdp.parameters())
    with pytest.raises(pycomm.ConfigError, match="LBFGS: expected whole parameters"):
        lbfgs.step(lambda: torch.zeros(()))


def dropped(rank: int) -> None:
    """What passes in no_sync() have left goes with zero_grad(), of the optimizer and of the engine."""
    for strategy, keeps in itertools.product(STRATEGIES, (False, True)):
        for reduce_dtype in (None, torch.float64):
            fsdp = pycomm.FullyShardedDataParallel(make("mlp"), strategy=strategy, reduce_dtype=reduce_dtype)
            optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
            inputs, targets = next(batches("mlp"))
            loss_of(fsdp, inputs, targets).backward()
            expected = [p.grad.clone() for p in fsdp.parameters()]
            for is_fresh, drop in itertools.product((False, True), (optimizer.zero_grad, fsdp.zero_grad)):
                if is_fresh:
                    optimizer.zero_grad()
                with fsdp.no_sync():
                    loss_of(fsdp, inputs * 9, targets).backward()
                    loss_of(fsdp, inputs * 7, targets).backward()
                drop(set_to_none=not keeps or drop == optimizer.zero_grad)
                loss_of(fsdp, inputs, targets).backward()
                torch.testing.assert_close([p.grad for p in fsdp.parameters()], expected)


@dataclass
class Hidden:
    tensors: list[torch.Tensor]


class Blocks(nn.Module):
    """Units that return a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tensors[0]).tensors[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden([self.down(self.up(x).tanh())])


def dataclasses_come_out(rank: int) -> None:
    alone, x = Blocks(), torch.ones(2, 4)
    pycomm.broadcast_parameters(alone)
    fsdp = pycomm.FullyShardedDataParallel(copy.deepcopy(alone), wrap=Block)
    fsdp(x).square().sum().backward()
    alone(x).square().sum().backward()
    torch.testing.assert_close(whole_gradient(fsdp), torch.cat([p.grad.reshape(-1) for p in alone.parameters()]))
