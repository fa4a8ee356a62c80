"""What users do beside a plain training loop: freeze and unfreeze, clip, differentiate twice, copy, end early."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

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
    ):
        torch.manual_seed(3 + rank)
        check(rank)


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


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    everyone = torch.empty(pycomm.world_size(), flat.numel())
    pycomm.all_gather_single(everyone, flat)
    return all(torch.equal(flat, each) for each in everyone)
