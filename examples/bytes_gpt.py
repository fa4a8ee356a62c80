"""What the examples that train a GPT share: its layers, the bytes of Python's standard library, the loss curve."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

LENGTH, WIDTH, HEADS, LAYERS = 64, 96, 4, 6
HELD_OUT_FILES = 10  # every tenth


class Front(nn.Module):
    """Bytes and their positions to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens (batch, length)`` to ``(batch, length, width)``."""
        return self.embedding(tokens) + self.position[: tokens.shape[1]]


class Block(nn.Module):
    """Causal attention and a two-layer network, each after a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (batch, length, width)`` to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def make_layers() -> list[nn.Module]:
    """Returns the model as layers; the head's weight is the embedding's."""
    front, head = Front(), nn.Linear(WIDTH, 256, bias=False)
    head.weight = front.embedding.weight
    return [front, *(Block() for _ in range(LAYERS)), nn.Sequential(nn.LayerNorm(WIDTH), head)]


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of ``scores (batch, length, 256)``, in nats a byte."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def load_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of the library's modules, without its packages: those to learn from, and held-out files'."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in paths]
    held_out = b"".join(texts[::HELD_OUT_FILES])
    training = b"".join(text for index, text in enumerate(texts) if index % HELD_OUT_FILES)
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (training, held_out))


def draw(data: torch.Tensor, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``rows`` random pieces of ``data``: inputs and, one byte later, targets ``(rows, LENGTH)``."""
    starts = torch.randint(len(data) - LENGTH - 1, (rows,), generator=generator)
    pieces = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def save_picture(losses: list[float], path: str, title: str) -> None:
    """Saves the loss of each step as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="training loss, nats a byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def single_byte_loss(training: torch.Tensor, held_out: torch.Tensor) -> float:
    """Returns the loss of a model that knows the frequencies of the bytes and nothing else."""
    frequencies = torch.bincount(training, minlength=256).double().clamp(min=1) / len(training)
    return -(frequencies[held_out].log().mean().item())
