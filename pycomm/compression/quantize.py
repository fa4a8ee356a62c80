"""Block-wise quantization: each block of elements shares one scale, each element is a few bits.

Formats: int8, int4, fp8_e4m3, fp8_e5m2, mxfp8, mxfp4 (OCP Microscaling v1.0). The arithmetic, the payload and what
zeros, NaN and inf become is told in ``ops/quantize.py``. Stochastic rounding makes the mean right (unbiased), nearest
the error small. Bytes: 1.02 (int8, fp8), 0.53 (int4) an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..ops.quantize import Rounding
from ._blocks import BlockCodec
from .base import Combine

__all__ = ["FORMATS", "Quantize", "make"]

FORMATS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4")


@dataclass(frozen=True)
class Quantize(BlockCodec):
    """Encodes in ``format``; ``block_numel`` 0 means the format's own block; ``rounding`` nearest or stochastic."""

    format: str = "int8"
    block_numel: int = 0
    rounding: Rounding = "nearest"

    name = "quantize"
    combine = Combine.REQUANTIZE

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"quantize: unknown format {self.format!r}; known: {', '.join(sorted(FORMATS))}")
        self._check()


make = Quantize
