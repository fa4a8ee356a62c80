"""No compression: the identity, and the reference of the others. Bytes: 4 an element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Codec, Combine, Context, absorb

__all__ = ["NoCompression", "make"]


@dataclass(frozen=True)
class NoCompression(Codec):
    """Sends float32 as it is."""

    name = "none"
    combine = Combine.SUM
    wire_dtype = torch.float32
    is_elementwise = True

    def payload_numel(self, numel: int, context: Context) -> int:
        return numel

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        payload.copy_(absorb(flat, residual))
        if residual is not None:
            residual.zero_()

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        flat.add_(payload) if add else flat.copy_(payload)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        return torch.zeros_like(flat)


make = NoCompression
