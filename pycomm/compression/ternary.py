"""2 bits an element: -1, 0 or 1 times the largest magnitude of its block, drawn so that the mean is right.

Wen et al., "TernGrad", NeurIPS 2017 (arXiv 1705.07878), Section 3, a block at a time instead of a layer. With
``rounding="nearest"`` elements above half the largest are sent and the others not (biased: for error feedback). Each
rank gathers all payloads. Bytes: numel / 4 + 4 a block, times the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.quantize import Rounding
from ._blocks import BlockCodec
from .base import Combine

__all__ = ["Ternary", "make"]


@dataclass(frozen=True)
class Ternary(BlockCodec):
    """Ternary codes, with one scale for ``block_numel`` elements (0: 1024); ``rounding`` stochastic or nearest."""

    block_numel: int = 0
    rounding: Rounding = "stochastic"

    name = "ternary"
    combine = Combine.GATHER
    format = "ternary"

    def __post_init__(self) -> None:
        self._check()


make = Ternary
