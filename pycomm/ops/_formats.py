"""The encodings of ``ops/quantize.py``, as data: one row a format. The codes are those of csrc/kernels/quantize.h.

[Note: payload of a quantized tensor]
A tensor of ``numel`` float32 is cut into blocks of ``block_numel`` (the last one may be shorter). The payload is bytes:

    scales   one for each block: float32, or for the mx formats one byte e, meaning 2**(e - 127) (E8M0; 255 is NaN)
    padding  zeros, up to a multiple of 64 bytes
    codes    ``bits`` for each element, in order; the first element in the lowest bits of a byte; the last byte is
             filled up with zeros

Its length depends on (format, numel, block_numel) alone, so no rank asks another for it.

An element decodes to code * scale: "int" codes are two's complement integers of -largest..largest, "float" ones small
floats (E4M3FN, E5M2, and E2M1 with values 0, .5, 1, 1.5, 2, 3, 4, 6), a "sign" code is 1 for minus the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError

__all__ = ["FORMATS", "Format", "code_bytes", "find_format", "num_blocks", "payload_bytes", "scales_bytes"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One encoding. ``largest`` is the largest value that a code stands for before scaling."""

    name: str
    code: int
    family: str  # "int", "float", "sign"
    bits: int
    largest: float
    scale_bytes: int  # 4: float32; 1: a power of two
    block_numel: int  # a good one; for the mx formats the only one
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two, one for 32 elements, as the OCP Microscaling specification has them."""
        return self.scale_bytes == 1


_ROWS = (
    Format(name="int8", code=0, family="int", bits=8, largest=127.0, scale_bytes=4, block_numel=256),
    Format(name="int4", code=1, family="int", bits=4, largest=7.0, scale_bytes=4, block_numel=128),
    Format(name="ternary", code=2, family="int", bits=2, largest=1.0, scale_bytes=4, block_numel=1024),
    Format(
        name="fp8_e4m3", code=3, family="float", bits=8, largest=448.0, scale_bytes=4, block_numel=256,
        exponent_bits=4, mantissa_bits=3,
    ),
    Format(
        name="fp8_e5m2", code=4, family="float", bits=8, largest=57344.0, scale_bytes=4, block_numel=256,
        exponent_bits=5, mantissa_bits=2,
    ),
    Format(
        name="mxfp8", code=5, family="float", bits=8, largest=448.0, scale_bytes=1, block_numel=32,
        exponent_bits=4, mantissa_bits=3,
    ),
    Format(
        name="mxfp4", code=6, family="float", bits=4, largest=6.0, scale_bytes=1, block_numel=32,
        exponent_bits=2, mantissa_bits=1,
    ),
    Format(name="sign", code=7, family="sign", bits=1, largest=1.0, scale_bytes=4, block_numel=1024),
)  # fmt: skip

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}


def find_format(name: str) -> Format:
    """Returns the format of this name; ConfigError lists the known ones."""
    known = FORMATS.get(name)
    if known is None:
        raise ConfigError(f"quantize: unknown format {name!r}: expected one of {', '.join(sorted(FORMATS))}")
    return known


def num_blocks(numel: int, block_numel: int) -> int:
    """Returns how many blocks, and so scales, ``numel`` elements have."""
    return -(-numel // block_numel)


def scales_bytes(format: Format, numel: int, block_numel: int) -> int:
    """Returns where the codes begin: the bytes of the scales, and of the padding after them."""
    return -(-num_blocks(numel, block_numel) * format.scale_bytes // 64) * 64


def code_bytes(format: Format, numel: int) -> int:
    """Returns the bytes of the codes of ``numel`` elements."""
    return -(-numel * format.bits // 8)


@lru_cache(maxsize=1024)
def payload_bytes(format: str, numel: int, block_numel: int | None = None) -> int:
    """Returns the length of the payload of ``numel`` elements, see [Note: payload of a quantized tensor].

    ``block_numel`` defaults to the format's own. Raises ConfigError for an unknown format or an impossible size.
    """
    known = find_format(format)
    block_numel = known.block_numel if block_numel is None else block_numel
    if numel < 0 or block_numel < 32 or block_numel % 32 != 0:
        raise ConfigError(
            f"quantize: expected numel >= 0 and block_numel a positive multiple of 32, got {numel} and {block_numel}"
        )
    if known.is_mx and block_numel != 32:
        raise ConfigError(f"quantize: {format} has a block_numel of 32 by definition, got {block_numel}")
    return scales_bytes(known, numel, block_numel) + code_bytes(known, numel)
