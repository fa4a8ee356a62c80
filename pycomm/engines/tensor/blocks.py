"""The two blocks of a transformer, each a pair of a column-parallel and a row-parallel layer: two exchanges a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pycomm

from ...errors import ConfigError
from .layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["TensorParallelAttention", "TensorParallelMLP"]


class TensorParallelAttention(nn.Module):
    """Self-attention of ``heads`` heads, of which each rank has some: ``(batch, length, width)`` to the same.

    ``qkv`` is drawn before ``out``, as by two ``nn.Linear``. Raises ConfigError if the ranks do not divide the heads.
    """

    def __init__(
        self, width: int, heads: int, group: Any = None, *, is_causal: bool = True, is_sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        found = pycomm.get_group(group)
        if heads % found.world_size or width % heads:
            raise ConfigError(
                f"TensorParallelAttention: expected heads that divide width {width} and are a multiple of the "
                f"{found.world_size} ranks, got {heads}"
            )
        self.heads, self.is_causal = heads // found.world_size, is_causal
        self.qkv = ColumnParallelLinear(
            width, 3 * width, group=found, blocks=3, is_sequence_parallel=is_sequence_parallel
        )
        self.out = RowParallelLinear(width, width, group=found, is_sequence_parallel=is_sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (batch, length, width)``, cut along the sequence if so made."""
        projected = self.qkv(x)
        batch, length, _ = projected.shape
        q, k, v = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class TensorParallelMLP(nn.Module):
    """Two linear layers and a GELU between them; each rank has a part of the hidden units."""

    def __init__(self, width: int, hidden: int, group: Any = None, *, is_sequence_parallel: bool = False) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, hidden, group=group, is_sequence_parallel=is_sequence_parallel)
        self.down = RowParallelLinear(hidden, width, group=group, is_sequence_parallel=is_sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (..., width)`` to the same shape."""
        output: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return output
