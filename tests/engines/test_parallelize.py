"""An ordinary module made parallel keeps what it had: frozen, tied and shared layers; what would be lost is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pycomm
from harness import run_ranks
from pycomm.engines.tensor import ColumnParallelLinear, ParallelCrossEntropy, parallelize


class Scaled(nn.Linear):
    """Computes something else than its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(x)


def small(*, is_tied: bool = False) -> nn.Module:
    """An embedding, two linear layers of which the first has two names, and a head that may be tied."""
    torch.manual_seed(3)
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(8, 4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "head": nn.Linear(4, 8)}
    )
    model["again"] = nn.ModuleDict({"up": model["up"]})
    if is_tied:
        model["head"].weight = model["embedding"].weight
    return model


PLAN = {"embedding": "vocabulary", "up": "column", "down": "row", "head": "column"}


def parallelize_job(rank: int) -> None:
    frozen = small().requires_grad_(False).double().eval()
    parallelize(frozen, PLAN)
    assert {name for name, parameter in frozen.named_parameters() if parameter.requires_grad} == set()
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.float64}
    assert not any(layer.training for layer in frozen.modules())
    assert frozen["again"]["up"] is frozen["up"] and isinstance(frozen["up"], ColumnParallelLinear)

    alone, tied = small(is_tied=True), parallelize(small(is_tied=True), PLAN)
    assert tied["head"].weight is tied["embedding"].weight
    tokens = torch.tensor([3, 1, 7, 3])
    for model, loss in ((alone, nn.CrossEntropyLoss()), (tied, ParallelCrossEntropy())):
        loss(model["head"](model["down"](model["up"](model["embedding"](tokens)))), tokens).backward()
    expected = alone["head"].weight.grad.chunk(2)[rank]
    torch.testing.assert_close(tied["head"].weight.grad, expected, rtol=1e-5, atol=1e-6)

    def with_hook() -> nn.Module:
        model = small()
        model["up"].register_forward_hook(lambda *_: None)
        return model

    def with_layer(layer: nn.Module) -> nn.Module:
        model = small()
        model["up"] = layer
        return model

    for model, plan, words in (
        (small(is_tied=True), {**PLAN, "head": "row"}, r"embedding.weight \(dim 0.*head.weight \(dim 1"),
        (small(is_tied=True), {"embedding": "vocabulary"}, r"embedding.weight \(dim 0.*head.weight \(whole"),
        (small(), {"up": "column", "*.up": "row"}, "'again.up' is to be 'column' by 'up' and 'row' by"),
        (small()["up"], {"*": "column"}, "names no module inside of the one given; it has none"),
        (with_layer(Scaled(4, 8)), PLAN, "'up' as 'column'.* expected nn.Linear itself, got a Scaled"),
        (with_layer(weight_norm(nn.Linear(4, 8))), PLAN, "'up' as.* got a ParametrizedLinear"),
        (with_hook(), PLAN, "got one with _forward_hooks"),
        (with_layer(nn.Linear(4, 7)), PLAN, "'up' as 'column'.* cannot cut 7"),
    ):
        before = dict(model.named_modules())
        with pytest.raises(pycomm.ConfigError, match=words):
            parallelize(model, plan)
        assert dict(model.named_modules()) == before  # nothing was replaced


def test_parallelize_keeps_what_it_replaces() -> None:
    run_ranks(2, parallelize_job)
