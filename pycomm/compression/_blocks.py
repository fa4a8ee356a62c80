"""What the codecs on top of ``ops/quantize.py`` have in common: blocks of elements that share one scale."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..errors import ConfigError, TransportError
from ..ops.quantize import FORMATS, Rounding, dequantize_, dequantize_add_, payload_bytes, quantize_
from .base import Codec, Context

__all__ = ["BlockCodec"]


class BlockCodec(Codec):
    """Encodes in ``format``, with one scale for ``block_numel`` elements (0: the format's own number)."""

    format: str
    block_numel: int = 0
    rounding: Rounding = "nearest"

    # |decode(encode(x)) - x| over the largest magnitude of the block, rounding to nearest; stochastic: twice that.
    _STEP: ClassVar[dict[str, float]] = {
        "int8": 0.5 / 127,
        "int4": 0.5 / 7,
        "ternary": 0.5,
        "fp8_e4m3": 2**-4,
        "fp8_e5m2": 2**-3,
        "mxfp8": 2**-4,
        "mxfp4": 2**-2,
        "sign": 1.0,
    }

    def _check(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"{self.name}: unknown rounding {self.rounding!r}; known: nearest, stochastic (unbiased)")
        if isinstance(self.block_numel, bool) or not isinstance(self.block_numel, int):
            raise ConfigError(f"{self.name}: expected block_numel, a multiple of 32, got {self.block_numel!r}")
        payload_bytes(self.format, 0, self._block)  # raises for what the format cannot do

    @property
    def _block(self) -> int | None:
        return self.block_numel or None

    def payload_numel(self, numel: int, context: Context) -> int:
        return payload_bytes(self.format, numel, self._block)

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        quantize_(
            payload,
            flat,
            self.format,
            block_numel=self._block,
            rounding=self.rounding,
            seed=context.local_seed,
            offset=context.offset,
            residual=residual,
        )

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        expected = payload_bytes(self.format, flat.numel(), self._block)
        if payload.numel() != expected:
            raise TransportError(
                f"{self.name}: a payload of {payload.numel()} bytes cannot be decoded: expected {expected} for "
                f"{flat.numel()} elements of {self.format}; it was cut short, or the ranks compress differently"
            )
        if add:
            dequantize_add_(flat, payload, self.format, block_numel=self._block)
        else:
            dequantize_(flat, payload, self.format, block_numel=self._block, is_part=context.is_part)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        block = self.block_numel or FORMATS[self.format].block_numel
        numel = flat.numel()
        blocks = torch.nn.functional.pad(flat, (0, -numel % block)).view(-1, block)
        largest = blocks.abs().amax(1, keepdim=True) if numel else blocks.new_zeros(0, 1)
        if self.format == "sign":  # the scale is a mean, and its sum may overflow: then the block is NaN
            largest = torch.where(blocks.abs().sum(1, keepdim=True).isfinite(), largest, float("inf"))
        step = self._STEP[self.format] * (2 if self.rounding == "stochastic" else 1)
        return (largest * step * 1.001).expand(-1, block).reshape(-1)[:numel] + 2.0**-100
