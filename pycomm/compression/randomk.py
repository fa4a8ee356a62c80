"""Random-k: the ranks draw the same indices, so the payload is values alone and may be added on the wire.

One index is drawn from each of k equal stretches of the buffer, so they are distinct and cost O(k) to draw.
Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (arXiv 1809.07599), Section 2. Bytes: 4 k a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._sparse import check_ratio, sparse_numel
from .base import Codec, Combine, Context, absorb, keep_finite

__all__ = ["RandomK", "make"]


@dataclass(frozen=True)
class RandomK(Codec):
    """Sends ``ratio`` of the elements, drawn anew in each call.

    ``is_unbiased`` multiplies what arrives by 1 / ratio, so that its mean is the input; not for error feedback.
    """

    ratio: float = 0.01
    is_unbiased: bool = False

    name = "randomk"
    combine = Combine.SUM
    wire_dtype = torch.float32
    is_sparse = True

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)

    @property
    def is_for_feedback(self) -> bool:  # type: ignore[override]
        return not self.is_unbiased

    def payload_numel(self, numel: int, context: Context) -> int:
        return sparse_numel(self.ratio, numel)

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        work = absorb(flat, residual)
        indices = self._indices(flat, context)
        torch.index_select(work, 0, indices, out=payload)
        if residual is not None:
            residual.index_fill_(0, indices, 0.0)
            keep_finite(residual)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        if not add:
            flat.zero_()
        values = payload * (flat.numel() / max(payload.numel(), 1)) if self.is_unbiased else payload
        flat.index_add_(0, self._indices(flat, context), values)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        k = sparse_numel(self.ratio, flat.numel())
        return flat.abs() * (flat.numel() / max(k, 1) if self.is_unbiased else 1.0)

    def _indices(self, flat: torch.Tensor, context: Context) -> torch.Tensor:
        """Returns the k sorted, distinct indices of this call; the same on every rank."""
        numel = flat.numel()
        k = sparse_numel(self.ratio, numel)
        generator = torch.Generator().manual_seed(context.seed * 2 + 1 + context.offset)
        starts = torch.arange(k + 1, dtype=torch.int64, device="cpu") * numel // max(k, 1)
        drawn = torch.rand(k, generator=generator, dtype=torch.float64, device="cpu")
        indices = starts[:k] + (drawn * (starts[1:] - starts[:k])).to(torch.int64)
        return indices.to(flat.device)


make = RandomK
