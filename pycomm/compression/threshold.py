"""Threshold: the elements of at least a given magnitude, but no more than a share of all.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, sends what exceeds a
threshold. Here the payload has room for ``ratio`` of the elements, so that sizes do not depend on the data: of more the
largest go, fewer leave room empty. Bytes: 8 a slot, times the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ._sparse import sparse_numel, split_payload
from .base import Codec, Combine, Context
from .topk import TopK

__all__ = ["Threshold", "make"]


@dataclass(frozen=True)
class Threshold(Codec):
    """Sends the elements with ``|x| >= threshold``, at most ``ratio`` of all."""

    threshold: float = 1e-3
    ratio: float = 0.01

    name = "threshold"
    combine = Combine.GATHER
    is_sparse = True

    def __post_init__(self) -> None:
        TopK(self.ratio)  # checks it
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)) or not self.threshold >= 0:
            raise ConfigError(f"threshold: expected a magnitude of 0 or more, got {self.threshold!r}")

    def payload_numel(self, numel: int, context: Context) -> int:
        return TopK(self.ratio).payload_numel(numel, context)

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        TopK(self.ratio).encode(payload, flat, context, residual)
        indices, values = split_payload(payload, sparse_numel(self.ratio, flat.numel()))
        is_small = values.abs() < self.threshold  # a NaN is not
        if residual is not None:
            residual.index_add_(0, indices.long(), torch.where(is_small, values, 0.0))
        values.masked_fill_(is_small, 0.0)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        TopK(self.ratio).decode(flat, payload, context, add)

    def decode_sum(self, flat: torch.Tensor, payloads: Sequence[torch.Tensor], context: Context) -> None:
        TopK(self.ratio).decode_sum(flat, payloads, context)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        at_least = torch.full_like(flat, self.threshold)
        return torch.minimum(flat.abs(), torch.maximum(TopK(self.ratio).bound(flat), at_least))


make = Threshold
