"""16-bit floats on the wire: float16 (11 bits of precision, to 65504) or bfloat16 (8 bits, the range of float32).

Bytes: 2 an element. Sums are formed on the wire, so each hop of the exchange rounds once more; what the ranks add may
not overflow, so a finite element of a sum saturates at the largest value divided by the number of ranks (fp16: 65504).
What the hops round no rank knows, so under error feedback sums are formed in float32, between two roundings whose
errors are owed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .base import Codec, Combine, Context, absorb, keep_finite

__all__ = ["FORMATS", "Cast", "make"]

_PART_NUMEL = 1 << 16  # small enough to stay in a cache
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Rounds to the nearest value of ``format``: "bf16" or "fp16"."""

    format: str = "bf16"

    name = "cast"
    combine = Combine.SUM
    is_elementwise = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"cast: unknown format {self.format!r}; known: {', '.join(sorted(FORMATS))}")

    @property
    def wire_dtype(self) -> torch.dtype:  # type: ignore[override]
        return FORMATS[self.format]

    @property
    def for_feedback(self) -> Codec:
        return _CastForFeedback(self.format)

    def payload_numel(self, numel: int, context: Context) -> int:
        return numel

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        work = absorb(flat, residual)
        limit = self._limit(context.world_size)
        payload.copy_(work)
        if payload.is_cuda or _exceeds(payload, limit):
            payload.copy_(torch.where(work.isfinite(), work.clamp(-limit, limit), work))
        if residual is not None:
            _add(residual, payload, sign=-1)
            keep_finite(residual)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        if add:
            _add(flat, payload)
        else:
            flat.copy_(payload)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        info = torch.finfo(self.wire_dtype)
        excess = (flat.abs() - self._limit(world_size)).clamp_min(0.0)
        return flat.abs() * (info.eps / 2) + info.smallest_normal * info.eps + excess * 1.01

    def _limit(self, world_size: int) -> float:
        """The largest value of the format of which ``world_size`` may be added."""
        info = torch.finfo(self.wire_dtype)
        roundings = world_size if world_size > 1 else 0  # of this value, and of each sum on the way
        return info.max / world_size * (1 - info.eps / 2) ** roundings


class _CastForFeedback(Cast):
    """Nothing is added on the wire, so that all that is lost is lost to a residual."""

    combine = Combine.REQUANTIZE

    @property
    def for_feedback(self) -> Codec:
        return self

    def _limit(self, world_size: int) -> float:
        return super()._limit(1)


def _add(flat: torch.Tensor, payload: torch.Tensor, sign: int = 1) -> None:
    if payload.is_cuda:
        flat.add_(payload, alpha=sign)
        return
    # On a CPU torch adds tensors of two types one by one.
    for part, each in zip(torch.split(flat, _PART_NUMEL), torch.split(payload, _PART_NUMEL), strict=True):
        part.add_(each.to(torch.float32), alpha=sign)


def _exceeds(payload: torch.Tensor, limit: float) -> bool:
    """Whether an element is beyond ``limit``, inf or NaN. So rare that looking is cheaper than clamping always."""
    if payload.numel() == 0:
        return False
    low, high = payload.aminmax()
    return not (low.item() >= -limit and high.item() <= limit)


make = Cast
