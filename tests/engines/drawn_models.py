"""Models drawn at random, for trainings.py: all take rows of ``WIDTH`` float64, and return as many."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["FEATURES", "WIDTH", "Branch", "Dense", "Narrow", "Residual", "build"]

WIDTH = 6
FEATURES = ("tied", "shared", "branches", "checkpoints", "statistics", "single")


class Dense(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Narrow(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Scale(nn.Module):
    """A parameter of its own, of any shape, and one without elements."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(0.1 * torch.randn(shape)), nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.scale) + self.none.sum()


class Frozen(nn.Module):
    def __init__(self, has_trained_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)
        self.linear.bias.requires_grad_(has_trained_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Tied(nn.Module):
    def __init__(self, other: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight = other.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


class Single(nn.Module):
    """Parameters of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float()).tanh().double() + 0.1 * (self.phase * x).abs()


class Branch(nn.Module):
    """Runs the children that ``way`` names; what the others have gets no gradient."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.way = a, b, "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((getattr(self, each)(x) for each in self.way), torch.zeros_like(x))


class InContainer(nn.Module):
    def __init__(self, inner: nn.Module, is_dict: bool) -> None:
        super().__init__()
        self.inner, self.is_dict = inner, is_dict

    def forward(self, x: torch.Tensor) -> Any:
        return {"result": self.inner(x), "rest": [x, None]} if self.is_dict else (self.inner(x), None, x)


class TakenOut(nn.Module):
    def __init__(self, inner: InContainer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        found: torch.Tensor = output["result"] if isinstance(output, dict) else output[0]
        return found


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) if torch.is_grad_enabled() else self.inner(x)


class Builder:
    """Draws one model; ``features`` is what it may have beyond the plain."""

    def __init__(self, seed: int, features: set[str]) -> None:
        self.dice, self.features = random.Random(seed), features
        self.made: list[Dense] = []

    def leaf(self) -> nn.Module:
        dice = self.dice
        kinds: dict[str, Callable[[], nn.Module]] = {
            "dense": self.dense,
            "narrow": lambda: Narrow(dice.choice([1, 3, 7, 40])),
            "scale": lambda: Scale(dice.choice([(), (WIDTH,), (1, WIDTH), (1,)])),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "frozen": lambda: Frozen(dice.random() < 0.5),
            "statistics": lambda: nn.BatchNorm1d(WIDTH),
            "single": Single,
            "tied": lambda: Tied(dice.choice(self.made)),
            "shared": lambda: dice.choice(self.made),
        }
        also = [each for each in ("statistics", "single") if each in self.features]
        also += [each for each in ("tied", "shared") if each in self.features and self.made]
        return kinds[dice.choice(["dense", "dense", "narrow", "scale", "norm", "frozen", *also])]()

    def dense(self) -> Dense:
        self.made.append(Dense(self.dice.random() < 0.7))
        return self.made[-1]

    def module(self, depth: int) -> nn.Module:
        if depth == 0:
            return self.leaf()
        also = [each for each in ("branches", "checkpoints") if each in self.features]
        kind = self.dice.choice(["chain", "chain", "chain", "residual", "container", "leaf", *also])
        if kind == "leaf":
            return self.leaf()
        if kind == "chain":
            return nn.Sequential(*(self.module(depth - 1) for _ in range(self.dice.randint(1, 4))))
        if kind == "branches":
            return Branch(self.module(depth - 1), self.module(depth - 1))
        inner = self.module(depth - 1)
        if kind == "container":
            return TakenOut(InContainer(inner, self.dice.random() < 0.5))
        return Residual(inner) if kind == "residual" else Checkpointed(inner)


def build(seed: int, features: set[str]) -> nn.Module:
    """Returns the model ``seed``, with the same parameters each time."""
    torch.manual_seed(seed)
    model = nn.Sequential(Dense(), Builder(seed, features).module(3), Dense())
    single = {module for each in model.modules() if isinstance(each, Single) for module in each.modules()}
    for module in model.modules():
        if module not in single:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.double()
    return model
