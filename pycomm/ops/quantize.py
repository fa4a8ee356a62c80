"""quantize, dequantize, dequantize_add: float32 <-> a payload of a few bits an element, scaled block by block.

- ``quantize_``, ``dequantize_``, ``dequantize_add_``: into memory that is there.
- ``torch.ops.pycomm.quantize_`` and its kin: the same as torch operators; inside torch.compile the functions above
  become these by themselves.
- ``quantize_reference``, ``dequantize_reference``: the same in plain torch; the tests hold the kernels to their bits.

The payload's bytes are told in ``_formats.py``, [Note: payload of a quantized tensor].

[Note: what a quantization computes]
All arithmetic is float32, each operation rounded to nearest. For a block with largest magnitude ``amax``:

- scale: ``amax / largest``; for the mx formats the smallest power of two p with ``amax <= p * largest`` (but
  ``p * largest`` stays finite: above that elements saturate); for sign the mean of the magnitudes, summed in 128 lanes
  (element i goes to lane i % 128), then lane l + lane l + 64, 32, ..., 1.
- code: of ``v = x * (1 / scale)``. Nearest rounds ties to even. Stochastic adds ``(random16 - 32767.5) / 65536`` of a
  step first, so that the expected code is v within 2**-16 of a step. A sign code is x's sign bit (-0.0 is negative).
- ``amax < 2**-100`` (a block of zeros, or of denormals): scale 0, codes 0; it decodes to zeros. Not so for sign.
- a NaN or an infinity in a block: scale NaN, codes 0; the whole block decodes to NaN: seen by everybody, not hidden.
  The same goes for sign if the sum of magnitudes overflows.
- residual: ``input - decoded``, where input is ``flat + residual``. For a block that is not finite the residual is 0,
  so that one bad step does not poison all later ones.

Every NaN that is written is the quiet, positive one. Flush-to-zero (torch.set_flush_denormal) is to be off.
"""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import ConfigError
from ._checks import check_dense, check_devices, current_stream, cuts, kernels
from ._formats import FORMATS, Format, code_bytes, find_format, num_blocks, payload_bytes, scales_bytes
from ._random import random16

__all__ = [
    "FORMATS",
    "Rounding",
    "dequantize_",
    "dequantize_add_",
    "dequantize_reference",
    "payload_bytes",
    "quantize_",
    "quantize_reference",
]

Rounding = Literal["nearest", "stochastic"]
_ROUNDINGS = ("nearest", "stochastic")


def quantize_(
    payload: torch.Tensor,
    flat: torch.Tensor,
    format: str,
    *,
    block_numel: int | None = None,
    rounding: Rounding = "nearest",
    seed: int = 0,
    offset: int = 0,
    residual: torch.Tensor | None = None,
) -> None:
    """Writes the encoding of ``flat (numel,)`` float32 to ``payload (payload_bytes(...),)`` uint8.

    With ``residual (numel,)``, what is encoded is ``flat + residual``, and ``residual`` becomes what was not sent.
    Stochastic rounding draws from (``seed``, ``offset`` + index of the element), both >= 0 and below 2**63: the same
    bits on every device. ``block_numel`` (a multiple of 32) defaults to the format's own. Tensors are flat, on one
    device, and do not overlap. Raises ConfigError, NativeUnavailableError.
    """
    if torch.compiler.is_compiling():
        known = find_format(format)
        block_numel = known.block_numel if block_numel is None else block_numel
        torch.ops.pycomm.quantize_(payload, flat, format, block_numel, rounding, seed, offset, residual)
        return
    plain = FORMATS.get(format)
    if plain is not None and rounding in _ROUNDINGS:
        length = plain.block_numel if block_numel is None else block_numel
        is_stochastic = rounding == "stochastic"
        if cuts().quantize(payload, flat, residual, plain.code, length, is_stochastic, seed, offset):
            return
    known, block_numel = _check(payload, flat, format, block_numel)
    check_devices("quantize", payload, residual=residual)
    if residual is not None:
        check_dense("quantize", "residual", residual, torch.float32, flat.numel())
    if rounding not in _ROUNDINGS:
        raise ConfigError(f"quantize: unknown rounding {rounding!r}: expected 'nearest' or 'stochastic'")
    if rounding == "stochastic" and known.family == "sign":
        raise ConfigError("quantize: sign codes are not rounded: expected rounding='nearest', got 'stochastic'")
    if not (0 <= seed < 1 << 63 and 0 <= offset < 1 << 62):
        raise ConfigError(f"quantize: expected 0 <= seed < 2**63 and 0 <= offset < 2**62, got {seed} and {offset}")
    left = 0 if residual is None else residual.data_ptr()
    with current_stream("quantize", flat.device) as stream:
        kernels().quantize(
            payload.data_ptr(),
            payload.numel(),
            flat.data_ptr(),
            flat.numel(),
            known.code,
            block_numel,
            rounding == "stochastic",
            seed,
            offset,
            left,
            stream,
        )


def dequantize_(
    flat: torch.Tensor,
    payload: torch.Tensor,
    format: str,
    *,
    block_numel: int | None = None,
    factor: float = 1.0,
    is_part: bool = False,
) -> None:
    """Writes to ``flat (numel,)`` float32 what ``payload`` stands for, each scale first multiplied by ``factor``.

    Any bytes of the right length decode to something; a payload of another length raises ConfigError. ``is_part``:
    ``flat`` is a part of a result that no cache will hold, and on a CPU is written past the caches, as all of it would.
    """
    _dequantize(flat, payload, format, block_numel, factor, is_added=False, is_part=is_part)


def dequantize_add_(
    flat: torch.Tensor, payload: torch.Tensor, format: str, *, block_numel: int | None = None, factor: float = 1.0
) -> None:
    """Adds to ``flat (numel,)`` float32 what ``payload`` stands for; otherwise as ``dequantize_``."""
    _dequantize(flat, payload, format, block_numel, factor, is_added=True)


def _dequantize(
    flat: torch.Tensor,
    payload: torch.Tensor,
    format: str,
    block_numel: int | None,
    factor: float,
    *,
    is_added: bool,
    is_part: bool = False,
) -> None:
    if torch.compiler.is_compiling():
        block_numel = find_format(format).block_numel if block_numel is None else block_numel
        torch.ops.pycomm.dequantize_(flat, payload, format, block_numel, factor, is_added)
        return
    plain = FORMATS.get(format)
    if plain is not None:
        length = plain.block_numel if block_numel is None else block_numel
        if cuts().dequantize(flat, payload, plain.code, length, factor, is_added, is_part):
            return
    known, block_numel = _check(payload, flat, format, block_numel)
    with current_stream("dequantize", flat.device) as stream:
        kernels().dequantize(
            flat.data_ptr(),
            flat.numel(),
            payload.data_ptr(),
            payload.numel(),
            known.code,
            block_numel,
            factor,
            is_added,
            is_part,
            stream,
        )


def _check(payload: torch.Tensor, flat: torch.Tensor, format: str, block_numel: int | None) -> tuple[Format, int]:
    """Raises ConfigError if the tensors do not fit the format and each other; returns the format and its block."""
    known = find_format(format)
    block_numel = known.block_numel if block_numel is None else block_numel
    check_dense("quantize", "flat", flat, torch.float32)
    expected_bytes = payload_bytes(format, flat.numel(), block_numel)
    check_dense("quantize", f"the {format} payload", payload, torch.uint8, expected_bytes)
    check_devices("quantize", flat, payload=payload)
    return known, block_numel


# -- for torch.compile -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "pycomm::quantize_",
    mutates_args=("payload", "residual"),
    schema="(Tensor(a!) payload, Tensor flat, str format, int block_numel, str rounding, int seed, int offset, "
    "Tensor(b!)? residual) -> ()",
)
def _quantize_op(
    payload: torch.Tensor,
    flat: torch.Tensor,
    format: str,
    block_numel: int,
    rounding: Rounding,
    seed: int,
    offset: int,
    residual: torch.Tensor | None,
) -> None:
    quantize_(
        payload,
        flat,
        format,
        block_numel=block_numel,
        rounding=rounding,
        seed=seed,
        offset=offset,
        residual=residual,
    )


@torch.library.custom_op(
    "pycomm::dequantize_",
    mutates_args=("flat",),
    schema="(Tensor(a!) flat, Tensor payload, str format, int block_numel, float factor, bool is_added) -> ()",
)
def _dequantize_op(
    flat: torch.Tensor, payload: torch.Tensor, format: str, block_numel: int, factor: float, is_added: bool
) -> None:
    _dequantize(flat, payload, format, block_numel, factor, is_added=is_added)


# They write to what they are given and return nothing: so does the fake.
_quantize_op.register_fake(lambda *arguments: None)
_dequantize_op.register_fake(lambda *arguments: None)


# -- the reference -----------------------------------------------------------------------------------------------------

_TINY = 2.0**-100  # a block whose largest magnitude is smaller is sent as zeros


def quantize_reference(
    flat: torch.Tensor,
    format: str,
    *,
    block_numel: int | None = None,
    rounding: Rounding = "nearest",
    seed: int = 0,
    offset: int = 0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (payload, new residual) in plain torch; see the note on top of this file."""
    known = find_format(format)
    block_numel = known.block_numel if block_numel is None else block_numel
    numel = flat.numel()
    inputs = flat if residual is None else flat + residual
    blocks = _as_blocks(inputs, block_numel)  # (num_blocks, block_numel), zeros after the end
    lengths = _as_blocks(torch.ones_like(inputs), block_numel).sum(dim=1)
    scales, inverses, is_finite = _scales(blocks, lengths, known)
    random = _as_blocks(random16(seed, offset, numel, flat.device), block_numel) if rounding == "stochastic" else None
    if known.family == "sign":
        codes = (blocks.view(torch.int32) < 0).to(torch.int32)
    else:
        values = torch.where(is_finite[:, None], blocks, 0.0) * inverses[:, None]
        codes = (_round_int if known.family == "int" else _encode_float)(values, known, random)
    codes = torch.where(is_finite[:, None], codes, 0)
    decoded = _decode(codes, known) * _scale_values(scales, known)[:, None]
    left = torch.where(is_finite[:, None], blocks - decoded, 0.0)
    return _assemble(scales, codes.view(-1)[:numel], known), left.view(-1)[:numel].clone()


def dequantize_reference(
    payload: torch.Tensor, numel: int, format: str, *, block_numel: int | None = None, factor: float = 1.0
) -> torch.Tensor:
    """Returns the ``(numel,)`` float32 that ``payload`` stands for, in plain torch; see the note on top."""
    known = find_format(format)
    block_numel = known.block_numel if block_numel is None else block_numel
    blocks = num_blocks(numel, block_numel)
    raw = payload[: blocks * known.scale_bytes]
    scales = _scale_values(raw.clone().view(torch.float32) if known.scale_bytes == 4 else raw, known)
    scales = scales * torch.tensor(factor, dtype=torch.float32, device=payload.device)
    begin = scales_bytes(known, numel, block_numel)
    codes = _unpack(payload[begin : begin + code_bytes(known, numel)], known.bits, numel)
    values = _decode(_as_blocks(codes, block_numel), known) * scales[:, None]
    return _with_one_nan(values.view(-1)[:numel])


def _as_blocks(values: torch.Tensor, block_numel: int) -> torch.Tensor:
    padding = -values.numel() % block_numel
    return torch.cat([values, values.new_zeros(padding)]).view(-1, block_numel)


def _scales(
    blocks: torch.Tensor, lengths: torch.Tensor, known: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each block the scale as stored, the factor that encodes, and whether the block is finite."""
    nan = torch.tensor(float("nan"), dtype=torch.float32, device=blocks.device)
    if known.family == "sign":
        mean = _lane_sums(blocks.abs()) / lengths
        is_finite = mean.isfinite()
        return torch.where(is_finite, mean, nan), torch.zeros_like(mean), is_finite
    bits = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(dim=1)  # as integers NaN > infinity > all else
    amax = bits.view(torch.float32)
    is_finite, is_zero = amax.isfinite(), amax < _TINY
    amax = torch.where(is_finite & ~is_zero, amax, 1.0)
    if known.is_mx:
        largest_bits = int(torch.tensor(known.largest, dtype=torch.float32, device="cpu").view(torch.int32).item())
        bits = amax.view(torch.int32)
        exponent = (bits >> 23) - (largest_bits >> 23) + ((bits & 0x7FFFFF) > (largest_bits & 0x7FFFFF)).int()
        exponent = exponent.clamp(max=254 - (largest_bits >> 23))  # largest * scale is to be finite
        stored = torch.where(is_zero, 0, exponent + 127)
        inverse = ((127 - exponent) << 23).view(torch.float32)
        return torch.where(is_finite, stored, 255).to(torch.uint8), torch.where(is_zero, 0.0, inverse), is_finite
    largest = torch.tensor(known.largest, dtype=torch.float32, device=blocks.device)
    # Rounded down, so that largest * scale does not overflow where amax is the largest float32.
    bound = torch.tensor((2**24 - 1) * 2**104 / known.largest * (1 - 2**-24), dtype=torch.float32, device=blocks.device)
    scale = torch.minimum(amax / largest, bound)
    stored = torch.where(is_zero, 0.0, scale)
    return torch.where(is_finite, stored, nan), torch.where(is_zero, 0.0, 1.0 / scale), is_finite


def _lane_sums(magnitudes: torch.Tensor) -> torch.Tensor:
    """Sums each row, in the order that the kernels have."""
    rows = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % 128))
    lanes = rows.new_zeros(rows.shape[0], 128)
    for part in torch.split(rows, 128, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _round_int(values: torch.Tensor, known: Format, random: torch.Tensor | None) -> torch.Tensor:
    dithered = values if random is None else values + _dither(random)
    return dithered.round().clamp(-known.largest, known.largest).to(torch.int32)


def _dither(random: torch.Tensor) -> torch.Tensor:
    """16 random bits -> -0.5 .. 0.5, symmetric around 0, exact in float32."""
    return (2 * random - 65535).to(torch.float32) * 2.0**-17


def _encode_float(values: torch.Tensor, known: Format, random: torch.Tensor | None) -> torch.Tensor:
    """Encodes in the small float of the format; magnitudes are at most a rounding error above ``largest``."""
    bias, shift = 2 ** (known.exponent_bits - 1) - 1, 23 - known.mantissa_bits
    bits = values.view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 31) & 1
    if random is None:
        half = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
    else:
        half = (random << (shift - 16)) + (1 << (shift - 17))
    normal = (magnitude - ((127 - bias) << 23) + half) >> shift
    quanta = magnitude.view(torch.float32) * 2.0 ** (bias - 1 + known.mantissa_bits)
    subnormal = (quanta if random is None else quanta + _dither(random)).round().clamp(max=255).to(torch.int32)
    code = torch.where(magnitude < (128 - bias) << 23, subnormal, normal)
    bits_of_largest = int(torch.tensor(known.largest, dtype=torch.float32, device="cpu").view(torch.int32).item())
    largest_code = (bits_of_largest - ((127 - bias) << 23)) >> shift
    return code.clamp(max=largest_code) | sign << (known.exponent_bits + known.mantissa_bits)


def _decode(codes: torch.Tensor, known: Format) -> torch.Tensor:
    """Codes (int32, of ``bits`` bits, or signed for "int") -> the float32 that they stand for before scaling."""
    if known.family == "int":
        shift = 32 - known.bits
        return ((codes << shift) >> shift).to(torch.float32)
    if known.family == "sign":
        return 1.0 - 2.0 * codes.to(torch.float32)
    bias = 2 ** (known.exponent_bits - 1) - 1
    width = known.exponent_bits + known.mantissa_bits
    magnitude, sign = codes & ((1 << width) - 1), (codes >> width) & 1
    normal = ((magnitude << (23 - known.mantissa_bits)) + ((127 - bias) << 23)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * 2.0 ** (1 - bias - known.mantissa_bits)
    values = torch.where(magnitude < 1 << known.mantissa_bits, subnormal, normal)
    if known.bits == 8:  # E4M3FN has one NaN; E5M2 infinities and NaNs. Only damaged payloads hold them.
        float8 = torch.float8_e5m2 if known.mantissa_bits == 2 else torch.float8_e4m3fn
        return codes.to(torch.uint8).view(float8).to(torch.float32)
    return torch.where(sign == 1, -values, values)


def _scale_values(scales: torch.Tensor, known: Format) -> torch.Tensor:
    """Scales as stored -> float32."""
    if not known.is_mx:
        return scales
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def _assemble(scales: torch.Tensor, codes: torch.Tensor, known: Format) -> torch.Tensor:
    """Scales and codes -> payload."""
    raw = scales.view(torch.uint8)
    packed = _pack(codes & ((1 << known.bits) - 1), known.bits)
    return torch.cat([raw, raw.new_zeros(-raw.numel() % 64), packed])


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    per_byte = 8 // bits
    rows = _as_blocks(codes, per_byte)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.int32) * bits
    return (rows << shifts).sum(dim=1).to(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=packed.device, dtype=torch.int32) * bits
    return ((packed.to(torch.int32)[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)[:numel]


def _with_one_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), torch.tensor(float("nan"), dtype=values.dtype, device=values.device), values)
