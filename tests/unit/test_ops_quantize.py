"""The quantizers against the plain-torch reference, bit for bit; their error, their bias, their bad days."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import INF, LARGEST, NAN, each_isa, hard_floats, same_bits

from pycomm.errors import ConfigError
from pycomm.ops._random import random16
from pycomm.ops.quantize import (
    FORMATS,
    Rounding,
    dequantize_,
    dequantize_add_,
    dequantize_reference,
    payload_bytes,
    quantize_,
    quantize_reference,
)

SIZES = [(0, None), (1, None), (31, None), (33, None), (1000, None), (6007, None), (3000, 96), (9001, 4096)]
ROUNDED = [(name, rounding) for name in FORMATS for rounding in ("nearest", "stochastic")]
ROUNDED = [case for case in ROUNDED if case != ("sign", "stochastic")]
# Of a block's largest magnitude: half a step, a whole one if stochastic; for floats relative to their 1/8, 1/4, 1/2.
HALF_STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7, "ternary": 0.5, "fp8_e4m3": 1 / 28, "fp8_e5m2": 1 / 14}
HALF_STEP |= {"mxfp8": 1 / 14, "mxfp4": 1 / 3, "sign": 1.0}


def encode(x: torch.Tensor, format: str, **options) -> torch.Tensor:
    payload = torch.empty(payload_bytes(format, x.numel(), options.get("block_numel")), dtype=torch.uint8)
    quantize_(payload, x, format, **options)
    return payload


def decode(payload: torch.Tensor, numel: int, format: str) -> torch.Tensor:
    flat = torch.empty(numel)
    dequantize_(flat, payload, format)
    return flat


@pytest.mark.parametrize(("numel", "block_numel"), SIZES)
@pytest.mark.parametrize(("format", "rounding"), ROUNDED)
def test_kernels_are_the_reference(format: str, rounding: Rounding, numel: int, block_numel: int | None) -> None:
    block_numel = None if FORMATS[format].is_mx else block_numel
    x, before = hard_floats(6007)[:numel] if numel <= 6007 else hard_floats(numel), hard_floats(9001, 1)[:numel]
    options = {"block_numel": block_numel, "rounding": rounding, "seed": 2**40 + 3, "offset": 2**34 + 5}
    for residual in (None, before):
        expected, left = quantize_reference(x, format, residual=residual, **options)
        decoded = dequantize_reference(expected, numel, format, block_numel=block_numel, factor=0.7)
        added = x + dequantize_reference(expected, numel, format, block_numel=block_numel)
        added = torch.where(added.isnan(), NAN, added)
        for isa in each_isa():
            got, kept = torch.full_like(expected, 77), None if residual is None else residual.clone()
            quantize_(got, x, format, residual=kept, **options)
            assert torch.equal(got, expected), isa
            assert kept is None or same_bits(kept, left), isa
            flat = torch.empty(numel)
            dequantize_(flat, got, format, block_numel=block_numel, factor=0.7)
            assert same_bits(flat, decoded), isa
            flat = x.clone()
            dequantize_add_(flat, got, format, block_numel=block_numel)
            assert same_bits(flat, added), isa


class OtherTensor(torch.Tensor):
    pass


@pytest.mark.parametrize("format", FORMATS)
def test_what_no_short_cut_takes_has_the_same_bits(format: str) -> None:
    x, before, factor = hard_floats(3001), hard_floats(3001, 1), 0.7
    payload, kept = torch.empty(payload_bytes(format, 3001), dtype=torch.uint8), before.clone()
    there, left = torch.empty_like(payload), before.clone()
    quantize_(payload, x, format, residual=kept)
    quantize_(there, x.as_subclass(OtherTensor), format, residual=left)
    assert torch.equal(there, payload) and same_bits(left, kept)
    flat, other = before.clone(), before.clone()
    dequantize_add_(flat, payload, format)
    dequantize_add_(other.as_subclass(OtherTensor), payload, format)
    assert same_bits(other, flat)
    dequantize_(flat, payload, format, factor=factor)
    dequantize_(other.as_subclass(OtherTensor), payload, format, factor=factor)
    assert same_bits(other, flat)


@pytest.mark.parametrize("format", FORMATS)
def test_any_bytes_decode_as_the_reference_does(format: str) -> None:
    numel = 3001
    for seed in range(20):
        payload = torch.randint(0, 256, (payload_bytes(format, numel),), generator=torch.Generator().manual_seed(seed))
        payload = payload.to(torch.uint8)
        expected = dequantize_reference(payload, numel, format)
        for isa in each_isa():
            assert same_bits(decode(payload, numel, format), expected), isa


@pytest.mark.parametrize("format", FORMATS)
def test_a_payload_that_was_cut_or_grew_raises(format: str) -> None:
    numel = 100
    payload, flat = encode(torch.ones(numel), format), torch.full((numel,), 7.0)
    for length in {*range(payload.numel()), payload.numel() + 1}:
        damaged = torch.zeros(length, dtype=torch.uint8)
        for decode_ in (dequantize_, dequantize_add_):
            with pytest.raises(ConfigError, match=f"expected {payload.numel()} elements, got {length}"):
                decode_(flat, damaged, format)
    assert (flat == 7).all()


@pytest.mark.parametrize("format", FORMATS)
def test_misaligned_memory_and_nothing_outside_is_written(format: str) -> None:
    numel = 1537
    x = hard_floats(6007)[:numel]
    expected, left = quantize_reference(x, format, residual=x)
    for isa in each_isa():
        for shift in (1, 3, 17):
            room = torch.full((expected.numel() + 80,), 99, dtype=torch.uint8)
            floats, kept = torch.full((3, numel + 40), 5.0), torch.full((numel + 40,), 5.0)
            floats[0, shift : shift + numel] = x
            kept[shift : shift + numel] = x
            payload = room[shift : shift + expected.numel()]
            quantize_(payload, floats[0, shift : shift + numel], format, residual=kept[shift : shift + numel])
            assert torch.equal(payload, expected), isa
            assert same_bits(kept[shift : shift + numel], left), isa
            dequantize_(floats[1, shift : shift + numel], payload, format)
            dequantize_add_(floats[2, shift : shift + numel], payload, format)
            assert (room[:shift] == 99).all() and (room[shift + expected.numel() :] == 99).all()
            for row in (*floats, kept):
                assert (row[:shift] == 5.0).all() and (row[shift + numel :] == 5.0).all()


def test_large_calls_stream_and_run_on_torchs_threads() -> None:
    numel, before = 3_000_001, torch.get_num_threads()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    try:
        for format in ("int8", "int4", "sign"):
            payloads, decoded = [], []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                payloads.append(encode(x, format))
                decoded.append(decode(payloads[-1], numel, format))
            assert torch.equal(payloads[0], payloads[1]) and torch.equal(*decoded)
            part = slice(0, 1024 * 1000)
            assert torch.equal(decoded[0][part], decode(encode(x[part], format), part.stop, format))
            streamed = torch.empty(part.stop)
            dequantize_(streamed, encode(x[part], format), format, is_part=True)
            assert torch.equal(decoded[0][part], streamed)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("format", "rounding"), ROUNDED)
def test_error_is_within_the_bound(format: str, rounding: Rounding) -> None:
    block = FORMATS[format].block_numel
    bound = HALF_STEP[format] * (1 if rounding == "nearest" else 2)
    for seed, size in enumerate((1.0, 1e-25, 1e33 if format == "sign" else 1e37)):
        x = torch.randn(block * 7, generator=torch.Generator().manual_seed(seed)) * size
        error = (decode(encode(x, format, rounding=rounding, seed=seed), x.numel(), format) - x).abs()
        largest = x.view(-1, block).abs().amax(dim=1)
        assert (error.view(-1, block).amax(dim=1) <= bound * largest * 1.000001).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e-30, 1e-40, LARGEST, INF, -INF, NAN])
def test_constant_blocks(format: str, value: float) -> None:
    for numel in (1, 40):
        x, residual = torch.full((numel,), value), torch.zeros(numel)
        got = decode(encode(x, format, residual=residual), numel, format)
        if math.isfinite(value) and not (format == "sign" and value == LARGEST and numel > 1):
            assert torch.equal(got + residual, x)
            assert residual.abs().max() <= 0.26 * abs(value) + 1e-30
        else:
            assert got.isnan().all() and (residual == 0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_spoils_its_block_alone(format: str) -> None:
    block = FORMATS[format].block_numel
    x = torch.randn(3 * block, generator=torch.Generator().manual_seed(2))
    x[block + 3] = NAN
    got = decode(encode(x, format), 3 * block, format).view(3, block)
    assert got[1].isnan().all() and got[0].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "sign"])
def test_stochastic_rounding_is_unbiased(format: str) -> None:
    """The mean over n draws is within 5 standard deviations of the value: for a step of s a draw deviates by s / 2 at
    most, and the bias that 16 random bits leave is under s / 65536.
    """
    draws, values = 4096, torch.linspace(-1, 1, FORMATS[format].block_numel)
    total = torch.zeros(values.numel(), dtype=torch.float64)
    for draw in range(draws):
        payload = encode(values, format, rounding="stochastic", seed=draw)
        total += decode(payload, values.numel(), format).double()
    step = 2 * HALF_STEP[format]
    error = (total / draws - values).abs()
    assert error.max() <= step * (5 * 0.5 / math.sqrt(draws) + 2**-16)
    assert (total / draws - values).mean().abs() <= step * (5 * 0.5 / math.sqrt(draws * values.numel()) + 2**-16)


def test_random_numbers_are_philox_and_depend_on_the_index_alone() -> None:
    # Random123's known answer for counter and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    assert [f"{v:04x}" for v in random16(0, 0, 8).tolist()] == "e8d5 6627 c58d e169 ac4c bc57 dbd8 9b00".split()
    whole = random16(9, 0, 1000)
    assert torch.equal(random16(9, 13, 500), whole[13:513])
    assert abs(whole.double().mean() - 32767.5) < 5 * 65536 / math.sqrt(12 * 1000)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(4))
    one = decode(encode(x, "int8", rounding="stochastic", seed=1), 4096, "int8")
    parts = [
        decode(encode(part, "int8", rounding="stochastic", seed=1, offset=1024 * index), 1024, "int8")
        for index, part in enumerate(x.view(4, 1024))
    ]
    assert torch.equal(one, torch.cat(parts))


def test_mistakes_raise_before_a_byte_moves() -> None:
    x, payload = torch.ones(100), torch.full((payload_bytes("int8", 100),), 7, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="unknown format 'int9': expected one of fp8_e4m3, fp8_e5m2, int4"):
        quantize_(payload, x, "int9")
    with pytest.raises(ConfigError, match="expected torch.float32, got torch.int64"):
        quantize_(payload, x.long(), "int8")
    with pytest.raises(ConfigError, match="the int8 payload has the wrong length: expected 164 elements, got 163"):
        quantize_(payload[1:], x, "int8")
    with pytest.raises(ConfigError, match="wrong length"):
        dequantize_(x, payload[1:], "int8")
    with pytest.raises(ConfigError, match="multiple of 32"):
        quantize_(payload, x, "int8", block_numel=48)
    with pytest.raises(ConfigError, match="by definition"):
        quantize_(payload, x, "mxfp8", block_numel=64)
    with pytest.raises(ConfigError, match="not flat"):
        quantize_(payload, torch.ones(200)[::2], "int8")
    with pytest.raises(ConfigError, match="residual has the wrong length"):
        quantize_(payload, x, "int8", residual=torch.zeros(99))
    with pytest.raises(ConfigError, match="not rounded"):
        quantize_(torch.empty(payload_bytes("sign", 100), dtype=torch.uint8), x, "sign", rounding="stochastic")
    with pytest.raises(ConfigError, match="seed"):
        quantize_(payload, x, "int8", rounding="stochastic", seed=-1)
    assert (payload == 7).all() and (x == 1).all()


# -- what torch.compile sees ------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    x, payload = torch.randn(100), torch.zeros(payload_bytes("int4", 100), dtype=torch.uint8)
    torch.library.opcheck(torch.ops.pycomm.quantize_, (payload, x, "int4", 128, "stochastic", 3, 0, torch.zeros(100)))
    torch.library.opcheck(torch.ops.pycomm.quantize_, (payload, x, "int4", 128, "nearest", 0, 0, None))
    torch.library.opcheck(torch.ops.pycomm.dequantize_, (x, payload, "int4", 128, 1.0, True))


def test_torch_compile_keeps_the_operators_in_the_graph() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        payload = torch.empty(payload_bytes("int8", 300), dtype=torch.uint8)
        quantize_(payload, x * 2, "int8")
        y = torch.ones(300)
        dequantize_add_(y, payload, "int8")
        return y + 1

    x = torch.randn(300)
    assert torch.equal(there_and_back(x), decode(encode(x * 2, "int8"), 300, "int8") + 1 + 1)
