"""What compression owes a parameter arrives there and nowhere else, also in passes that do not use it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from harness import run_ranks
from pycomm.compression import Part
from pycomm.errors import ConfigError


class Either(nn.Module):
    """Uses ``b`` if it is told to; the gradient of ``a`` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
        return 0 * self.a(x) + (self.b(x) if uses_b else 0)


def ddp(module: nn.Module, compression: Any) -> nn.Module:
    return pycomm.DistributedDataParallel(module, compression=compression, find_unused_parameters=True)


def fsdp(module: nn.Module, compression: Any) -> nn.Module:
    options = {"wrap": nn.Linear, "find_unused_parameters": True}
    return pycomm.FullyShardedDataParallel(module, compression=compression, **options)


def fsdp_whole(module: nn.Module, compression: Any) -> nn.Module:
    return pycomm.FullyShardedDataParallel(module, compression=compression, strategy="no_shard")


def optimizer(module: nn.Module, compression: Any) -> nn.Module:
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    module.optimizer = pycomm.DistributedOptimizer(sgd, module.named_parameters(), compression=compression)
    return module


def engines_job(rank: int) -> None:
    for wrap in (ddp, fsdp_whole, optimizer):
        owes_nothing_to_its_namesake(wrap)
    keeps_its_key()
    rules_go_by_names_in_the_model()
    for wrap in (ddp, fsdp, optimizer):
        for compression in ("none+every:2", "topk:0.2+ef", "topk:0.2+ef+every:3"):
            arrives_though_unused(wrap, compression)
        leaves_alone_what_nothing_came_for(wrap)
    tells_what_cannot_be_compressed()


def test_what_is_owed_arrives_where_it_is_owed() -> None:
    run_ranks(2, engines_job)


def tells_what_cannot_be_compressed() -> None:
    """Where it is asked for, and not in the middle of the first pass; "none" and "auto" are for everything."""

    def gathers(module: nn.Module, compression: Any) -> nn.Module:
        return pycomm.FullyShardedDataParallel(module, gather_compression=compression)

    for wrap in (ddp, fsdp, fsdp_whole, optimizer, gathers):
        with pytest.raises(ConfigError, match="unknown compression 'bf17'"):
            wrap(nn.Sequential(nn.Linear(2, 2)), "bf17")
        double = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        with pytest.raises(ConfigError, match=r"of 1\.weight: expected float32, .*, got torch\.float64"):
            wrap(double, "int8")
        assert [p.numel() for p in double.parameters()] == [4, 2, 4, 2], "the model is as it was"
        wrap(copy.deepcopy(double), "none"), wrap(double, "auto")
    with pytest.raises(ConfigError, match="compresses sums"):
        gathers(nn.Linear(2, 2), "powersgd")
    for flat in ("powersgd", "int8+policy"):
        with pytest.raises(ConfigError, match="compresses what has two dimensions or more"):
            fsdp(nn.Sequential(nn.Linear(2, 2)), flat)
        fsdp_whole(nn.Linear(2, 2), flat)
    fsdp(nn.Sequential(nn.Linear(2, 2)), "int8+policy:min_dim=1")


def one_object_for_shards_and_replicas(rank: int) -> None:
    """It keeps what is owed to each of the two sums by a name of its own."""
    mesh, compressor = pycomm.Mesh(dp=2, fsdp=2), pycomm.compression.parse("topk:0.5+ef")
    engine = pycomm.FullyShardedDataParallel(Either(), mesh, strategy="hybrid_shard", compression=compressor)
    arrived = torch.zeros(3)
    for step in range(12):
        engine.zero_grad()
        engine(torch.ones(1, 3), True).sum().mul(step == 0).backward()
        arrived += own_gradient_of_b(engine)
    pycomm.all_reduce(arrived, group=mesh.group("fsdp"))
    assert arrived.tolist() == [1.0] * 3
    assert len(compressor.state_dict()["error_feedback"]["residuals"]) == 2


def test_one_object_compresses_shards_and_replicas() -> None:
    run_ranks(4, one_object_for_shards_and_replicas)


def owes_nothing_to_its_namesake(wrap: Callable[..., nn.Module]) -> None:
    """Critics and discriminators: the same names in one group, with the same shapes and with others."""
    torch.manual_seed(3)
    first, second, third = (wrap(nn.Linear(width, 2), "topk:0.2+ef") for width in (10, 10, 9))
    for _ in range(2):
        first(torch.randn(2, 10)).sum().backward()
        for other, width in ((second, 10), (third, 9)):
            (0 * other(torch.ones(2, width)).sum()).backward()
            assert all(p.grad.count_nonzero() == 0 for p in other.parameters())


def keeps_its_key() -> None:
    """One engine's state has the names of its parameters, also if they are wrapped again; the next one's has others."""
    compressor = pycomm.get_group(None).compression.compressor("none+ef")
    net = nn.Linear(4, 1, bias=False)
    for _ in range(2):
        ddp(nn.Sequential(net), "none+ef")(torch.ones(1, 4)).sum().backward()
    assert set(compressor.state_dict()["error_feedback"]["residuals"]) == {"0.weight"}
    ddp(nn.Sequential(nn.Linear(4, 1, bias=False)), "none+ef")(torch.ones(1, 4)).sum().backward()
    assert set(compressor.state_dict()["error_feedback"]["residuals"]) == {"0.weight", "2:0.weight"}


def rules_go_by_names_in_the_model() -> None:
    plain = pycomm.compression.parse("none")
    compressor = pycomm.compression.policy(pycomm.compression.parse("sign"), min_numel=1, rules={"weight": plain})
    for _ in range(2):
        engine = ddp(nn.Linear(4, 2, bias=False), compressor)
        engine(torch.arange(4.0)).sum().backward()
        assert torch.equal(engine.module.weight.grad, torch.arange(4.0).expand(2, 4))


def arrives_though_unused(wrap: Callable[..., nn.Module], compression: str) -> None:
    """Ones are put in at the first step and never again; fewer than 12 steps send all that is owed."""
    engine, arrived = wrap(Either(), compression), torch.zeros(3)
    for step in range(12):
        for parameter in engine.parameters():
            parameter.grad = None
        engine(torch.ones(1, 3), step == 0).sum().backward()
        if wrap is optimizer:
            engine.optimizer.step()
        arrived += own_gradient_of_b(engine)
    if wrap is fsdp:
        pycomm.all_reduce(arrived)
    assert arrived.tolist() == [1.0] * 3, (wrap.__name__, compression)


def own_gradient_of_b(engine: nn.Module) -> torch.Tensor:
    """Returns what of it lies on this rank, and zeros for the rest."""
    parameter = next(parameter for name, parameter in engine.named_parameters() if name.endswith("b.weight"))
    whole = torch.zeros(3)
    if parameter.grad is not None and parameter.numel():
        whole.copy_(parameter.grad.reshape(-1))
    return whole


def leaves_alone_what_nothing_came_for(wrap: Callable[..., nn.Module]) -> None:
    engine = wrap(Either(), "int8")
    engine(torch.ones(1, 3), False).sum().backward()
    if wrap is optimizer:
        engine.optimizer.step()
    gradients = [p.grad for name, p in engine.named_parameters() if name.endswith("b.weight")]
    assert gradients == [None], wrap.__name__


@pytest.mark.parametrize(
    "name, expected", [(None, None), ("a.b", "a.b"), ("2:a.b", "a.b"), ("12:2.weight", "2.weight")]
)
def test_a_part_knows_its_name_in_the_model(name: str | None, expected: str | None) -> None:
    assert Part(name, (1,)).model_name == expected
