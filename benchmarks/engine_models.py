"""The models that the engines are measured with: a byte-level GPT and a convolution net with BatchNorm; Block is also
that of the smaller GPT that compressors are measured with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "Block", "ConvNet"]


class Block(nn.Module):
    """Causal attention and a two-layer network, each after a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (batch, length, width)`` to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over ``vocabulary`` bytes; input and output embedding are one parameter."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6, length: int = 64, vocabulary: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens (batch, length)`` to scores ``(batch, length, vocabulary)``."""
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position[: tokens.shape[1]])))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, twice as many channels where the picture halves, and a wide classifier."""

    def __init__(self, channels: int = 64, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for after in (channels, 2 * channels, 4 * channels, 8 * channels):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            before = after
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(8 * channels * 4, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images (batch, 3, 32, 32)`` to scores ``(batch, classes)``."""
        return self.classifier(self.features(images).flatten(1))
