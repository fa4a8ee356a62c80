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

    ``is_unbiased`` multiplies what arrives by the width of its stretch (about 1 / ratio), so that its mean is the
    input; not for error feedback. An inf or NaN anywhere in the input makes all that is sent NaN.
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
        indices, _ = self._draw(flat, context)
        torch.index_select(work, 0, indices, out=payload)
        if work.numel():
            low, high = work.aminmax()
            payload.add_(low * 0 + high * 0)  # NaN if there is an inf or NaN: few are drawn, and all have to be seen
        if residual is not None:
            residual.index_fill_(0, indices, 0.0)
            keep_finite(residual)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        if not add:
            flat.zero_()
        indices, widths = self._draw(flat, context)
        flat.index_add_(0, indices, payload * widths if self.is_unbiased else payload)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        k = sparse_numel(self.ratio, flat.numel())
        return flat.abs() * (-(-flat.numel() // max(k, 1)) if self.is_unbiased else 1.0)

    def _draw(self, flat: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the k sorted, distinct indices of this call, the same on every rank, and the widths of the stretches
        that they were drawn from.
        """
        numel = flat.numel()
        k = sparse_numel(self.ratio, numel)
        generator = torch.Generator().manual_seed(context.seed * 2 + 1 + context.offset)
        starts = torch.arange(k + 1, dtype=torch.int64, device="cpu") * numel // max(k, 1)
        drawn = torch.rand(k, generator=generator, dtype=torch.float64, device="cpu")
        widths = starts[1:] - starts[:k]
        indices = starts[:k] + (drawn * widths).to(torch.int64)
        return indices.to(flat.device), widths.to(flat.device)


make = RandomK
