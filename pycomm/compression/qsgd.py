"""QSGD: each block is sent as its 2-norm and, for each element, one of 2 s + 1 levels drawn so that the mean is right.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv 1610.02132), Section 3.1; with 8 (s to 127) or 4 bits (s to 7) an element instead of the Elias code, so that
sizes do not depend on the data. Bytes: numel (or numel / 2) + 4 a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError, TransportError
from ..sizes import whole_number
from .base import Codec, Combine, Context, absorb, keep_finite

__all__ = ["QSGD", "make"]


@dataclass(frozen=True)
class QSGD(Codec):
    """Stochastic quantization to ``levels`` (1 to 127) on either side of zero, in blocks of ``block_numel``.

    A block with an inf or NaN decodes to NaN.
    """

    levels: int = 127
    block_numel: int = 512

    name = "qsgd"
    combine = Combine.REQUANTIZE

    def __post_init__(self) -> None:
        if whole_number(self.levels, "qsgd: levels", 1) > 127:
            raise ConfigError(f"qsgd: expected levels in 1..127, got {self.levels!r}")
        if whole_number(self.block_numel, "qsgd: block_numel", 2) % 2:
            raise ConfigError(f"qsgd: expected an even block_numel of 2 or more, got {self.block_numel!r}")

    def payload_numel(self, numel: int, context: Context) -> int:
        return self._blocks(numel) * (4 + self._code_bytes)

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        work = absorb(flat, residual)
        blocks = self._padded(work)
        norms = _norms(blocks)
        share = torch.where(norms > 0, blocks / norms, 0.0).clamp_(-1.0, 1.0)
        generator = torch.Generator(device=flat.device).manual_seed(context.local_seed + context.offset)
        drawn = torch.rand(blocks.shape, generator=generator, dtype=torch.float32, device=flat.device)
        levels = torch.floor(share.abs() * self.levels + drawn).clamp_(max=self.levels)  # float32 may round the sum up
        codes = levels.copysign_(share).nan_to_num_(nan=0.0).to(torch.int8)
        self._pack(payload, norms, codes)
        if residual is not None:
            residual.sub_(self._values(norms, codes).view(-1)[: flat.numel()])
            keep_finite(residual)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        values = self._values(*self._unpack(payload, flat.numel())).view(-1)[: flat.numel()]
        flat.add_(values) if add else flat.copy_(values)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        norms = _norms(self._padded(flat))
        return (norms / self.levels * 1.001).expand(-1, self.block_numel).reshape(-1)[: flat.numel()] + 1e-38

    @property
    def _code_bytes(self) -> int:
        """Bytes of the codes of a block: two codes share a byte if their levels fit."""
        return self.block_numel if self.levels > 7 else self.block_numel // 2

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block_numel)

    def _padded(self, flat: torch.Tensor) -> torch.Tensor:
        blocks = flat.new_zeros(self._blocks(flat.numel()), self.block_numel)
        blocks.view(-1)[: flat.numel()].copy_(flat)
        return blocks

    def _values(self, norms: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32).mul_(norms / self.levels)

    def _pack(self, payload: torch.Tensor, norms: torch.Tensor, codes: torch.Tensor) -> None:
        count = norms.shape[0]
        payload[: 4 * count].copy_(norms.view(-1).view(torch.uint8))
        if self.levels <= 7:
            low, high = (codes + 8).view(torch.uint8).view(-1, 2).unbind(1)
            payload[4 * count :].copy_(low | (high << 4))
        else:
            payload[4 * count :].copy_(codes.view(-1).view(torch.uint8))

    def _unpack(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._blocks(numel)
        expected = count * (4 + self._code_bytes)
        if payload.numel() != expected:
            raise TransportError(
                f"qsgd: a payload of {payload.numel()} bytes cannot be decoded: expected {expected} for {numel} "
                f"elements; it was cut short, or the ranks compress differently"
            )
        norms = payload[: 4 * count].clone().view(torch.float32).view(-1, 1)
        packed = payload[4 * count :]
        if self.levels <= 7:
            codes = torch.stack([packed & 15, packed >> 4], 1).view(torch.int8) - 8
        else:
            codes = packed.view(torch.int8)
        return norms, codes.reshape(count, self.block_numel)


def _norms(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the 2-norms ``(blocks, 1)``, scaled so that squares neither overflow nor vanish; NaN where a block is not
    finite."""
    largest = blocks.abs().amax(1, keepdim=True) if blocks.numel() else blocks.new_zeros(blocks.shape[0], 1)
    shares = torch.where(largest > 0, blocks / largest, 0.0)
    norms = largest * shares.norm(dim=1, keepdim=True)
    # A norm past the range of float32 would make a finite block infinite: the largest float serves, as shares <= 1.
    norms = torch.where(norms.isinf() & largest.isfinite(), torch.finfo(torch.float32).max, norms)
    return torch.where(largest.isfinite(), norms, float("nan"))


make = QSGD
