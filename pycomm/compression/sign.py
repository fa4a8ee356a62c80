"""1 bit an element: its sign, times the mean magnitude of its block.

Bernstein et al., "signSGD", ICML 2018 (arXiv 1802.04434), with the scale of Karimireddy et al. (arXiv 1901.09847),
Section 4, a block at a time. Biased: use it with error feedback. A sum of signs is no sign, so each rank gathers all
payloads. Bytes: numel / 8 + 4 a block, times the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._blocks import BlockCodec
from .base import Combine

__all__ = ["Sign", "make"]


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Signs, with one scale for ``block_numel`` elements (0: 1024)."""

    block_numel: int = 0

    name = "sign"
    combine = Combine.GATHER
    format = "sign"

    def __post_init__(self) -> None:
        self._check()


make = Sign
