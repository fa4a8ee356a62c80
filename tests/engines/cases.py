"""Models, data and optimizers that the engines are compared on, and the single process that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pycomm

__all__ = [
    "BOUND",
    "LAYERED",
    "MODELS",
    "OPTIMIZERS",
    "STEPS",
    "Branches",
    "Doubles",
    "PlainAttention",
    "PlainMLP",
    "Twice",
    "batches",
    "loss_of",
    "make",
    "make_on_rank",
    "part_of",
    "relative_error",
    "train_alone",
    "train_on_rank",
]

STEPS = 10
ROWS = 12  # of a whole batch: 2, 3 and 4 ranks divide it
# Of relative_error. Sums in another order: a few units in the last place a step, which AdamW's division by sqrt(v)
# enlarges.
BOUND = {torch.float32: 2e-4, torch.bfloat16: 0.06}


class Doubles(nn.Module):
    """Works in place, as ``nn.ReLU(inplace=True)`` does, though not the same if it is done again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Twice(nn.Module):
    """Uses the weight of a linear layer beside the layer too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + functional.linear(x.sin(), self.linear.weight)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class PlainAttention(nn.Module):
    """What TensorParallelAttention is a part of."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class PlainMLP(nn.Module):
    """What TensorParallelMLP is a part of."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class TinyGPT(nn.Module):
    """Two layers; the input and output embeddings are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.blocks = nn.Sequential(Attention(16), Attention(16))
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens))).transpose(1, 2)


class Branches(nn.Module):
    """Uses ``left`` or ``right``, never ``idle``."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
        return self.left(x) if is_left else self.right(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))


def conv() -> nn.Module:
    """A convolution net with BatchNorm, whose statistics are those of a rank's own rows."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)
    )


class Scores(nn.Module):
    """The last layer of a GPT in layers; its weight is the embedding's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 17, bias=False)
        self.linear.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).transpose(1, 2)


def gpt_layers() -> nn.Module:
    embedding = nn.Embedding(17, 16)
    return nn.Sequential(embedding, *(Attention(16) for _ in range(6)), Scores(embedding))


def mlp_layers() -> nn.Module:
    inner = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
    return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), *inner, nn.Linear(16, 5))


def conv_layers() -> nn.Module:
    inner = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh()) for _ in range(6))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *inner, nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))


LAYERED: dict[str, Callable[[], nn.Module]] = {"mlp": mlp_layers, "conv": conv_layers, "gpt": gpt_layers}  # of 8 layers
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv, "gpt": TinyGPT}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}


def make(name: str, dtype: torch.dtype = torch.float32, models: dict[str, Any] | None = None) -> nn.Module:
    """Returns the model ``name`` with the same parameters each time."""
    torch.manual_seed(7)
    return (models or MODELS)[name]().to(dtype)


def make_on_rank(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns what ``make`` does, with other parameters on each rank but 0: an engine starts from rank 0's."""
    model = make(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(pycomm.rank())
    return model


def batches(name: str, dtype: torch.dtype = torch.float32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields inputs and targets of the whole world, for ``STEPS`` steps."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        if name == "gpt":
            tokens = torch.randint(17, (ROWS, 9), generator=draw)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            shape = (ROWS, 1, 4, 4) if name == "conv" else (ROWS, 8)
            yield torch.randn(shape, generator=draw).to(dtype), torch.randint(5, (ROWS,), generator=draw)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss, computed in float32."""
    return functional.cross_entropy(model(inputs).float(), targets)


def train_on_rank(
    engine: pycomm.DistributedDataParallel | pycomm.FullyShardedDataParallel,
    name: str,
    optimizer_name: str,
    dtype: torch.dtype = torch.float32,
    *,
    accumulate: int = 1,
    is_synced: bool = False,
    keeps_views: bool = False,
) -> None:
    """Trains ``engine``, around the model ``name``, on this rank's rows of each batch, ``accumulate`` parts a step.

    All parts but the last are left unreduced, unless ``is_synced``.
    """
    rank, world_size = pycomm.rank(), pycomm.world_size()
    optimizer = OPTIMIZERS[optimizer_name](engine.parameters())
    for whole in batches(name, dtype):
        optimizer.zero_grad(set_to_none=not keeps_views)
        inputs, targets = (rows.chunk(world_size)[rank].chunk(accumulate) for rows in whole)
        for part, (x, y) in enumerate(zip(inputs, targets), start=1):
            with nullcontext() if is_synced or part == accumulate else engine.no_sync():
                (loss_of(engine, x, y) / accumulate).backward()
        optimizer.step()


def train_alone(
    name: str,
    optimizer_name: str,
    dtype: torch.dtype = torch.float32,
    shares: int = 1,
    models: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the state after training in one process; the loss is the mean of those of ``shares`` equal parts.

    In parts a BatchNorm has the statistics that the ranks have; what is averaged of them is rank 0's.
    """
    model = make(name, dtype, models)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for inputs, targets in batches(name, dtype):
        optimizer.zero_grad()
        start = {key: value.clone() for key, value in model.named_buffers()}
        first: dict[str, torch.Tensor] = {}
        for x, y in zip(inputs.chunk(shares), targets.chunk(shares)):
            for key, buffer in model.named_buffers():
                buffer.copy_(start[key])
            (loss_of(model, x, y) / shares).backward()
            first = first or {key: value.clone() for key, value in model.named_buffers()}
        for key, buffer in model.named_buffers():
            buffer.copy_(first[key])
        optimizer.step()
    return model.state_dict()


def relative_error(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest |difference| of any tensor, relative to the tensor's largest element."""
    assert list(state) == list(expected)
    return max(
        (
            (state[key].double() - expected[key].double()).abs().max()
            / expected[key].double().abs().max().clamp(min=1e-3)
        ).item()
        for key in expected
    )


def part_of(kind: str, name: str, whole: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    """Returns this rank's part of the parameter ``name`` of a layer that is cut as ``kind`` of ``parallelize``; "": not
    at all."""
    n, r = group.world_size, group.rank
    if kind == "row":
        return whole.chunk(n, 1)[r] if name.endswith("weight") else whole
    if not kind:
        return whole
    return torch.cat([each.chunk(n)[r] for each in whole.chunk(3 if kind == "qkv" else 1)])
