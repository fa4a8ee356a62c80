"""The reduction kernels against the plain-torch reference, bit for bit: every dtype, operator and instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest
import torch

from pycomm.errors import ConfigError
from pycomm.ops import native
from pycomm.ops.reduce import reduce_, reduce_reference, reduce_supported, torch_ops
from pycomm.types import DTYPES, ReduceOp, dtype_of_name

NUMELS = (0, 1, 7, 257, 4099)
NUM_INPUTS = (1, 2, 3, 5)
FACTORS = (0.3, -1.7, 1e-3, 2.0, 0.1)
ALL_DTYPES = [getattr(torch, dtype.name) for dtype in DTYPES]
CASES = [(dtype, op) for dtype in ALL_DTYPES for op in ReduceOp if reduce_supported(dtype, op)]
SMALL_FLOATS = [dtype for dtype in ALL_DTYPES if dtype.is_floating_point and dtype.itemsize <= 2]
FLOAT8 = [dtype for dtype in SMALL_FLOATS if dtype.itemsize == 1]
PARTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN, INF = float("nan"), float("inf")
SPECIALS = (0.0, -0.0, NAN, INF, -INF, 1e-45, -1e-40, 1e-7, 6e-8, 65504.0, 65520.0, 3e38, -448.0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, so that NaNs and zeros of either sign compare."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(PARTS[real.dtype.itemsize])


def isa_names() -> list[str]:
    names = [name for name in ("avx512", "avx2", "generic") if native()._reduce_isa(name)]
    native()._reduce_isa(None)
    return names


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    assert native()._reduce_isa(None)


@functools.cache
def make_input(dtype: torch.dtype, index: int, numel: int = max(NUMELS)) -> torch.Tensor:
    """Ordinary numbers, every kind of special one (met by every kind in the next input), and random bits."""
    generator = torch.Generator().manual_seed(1000 * index + ALL_DTYPES.index(dtype))
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    length = numel * dtype.itemsize // real_dtype.itemsize
    num_bytes = length * real_dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(real_dtype)
    if not real_dtype.is_floating_point:
        return raw
    values = torch.randn(length, generator=generator, dtype=torch.float64).to(real_dtype)
    special = torch.tensor(SPECIALS, dtype=torch.float64).to(real_dtype)
    order = torch.arange(length) // len(SPECIALS) ** (index % 2) % len(SPECIALS)
    mixed = [bits(values), bits(special)[order], bits(raw)]
    kind = (torch.arange(length) // len(SPECIALS) ** 2) % 3
    result = torch.where(kind == 0, mixed[1], torch.where(kind == 1, mixed[0], mixed[2])).view(real_dtype)
    return torch.view_as_complex(result.view(-1, 2)) if dtype.is_complex else result


def inputs_of(dtype: torch.dtype, num_inputs: int, numel: int) -> list[torch.Tensor]:
    return [make_input(dtype, index)[:numel] for index in range(num_inputs)]


def factors_of(op: ReduceOp, num_inputs: int) -> list[float] | None:
    return list(FACTORS[:num_inputs]) if op is ReduceOp.PREMUL_SUM else None


def run_native(
    inputs: Sequence[torch.Tensor], op: ReduceOp, output: torch.Tensor | None = None, *, stream: bool = False
) -> torch.Tensor:
    output = torch.empty_like(inputs[0]) if output is None else output
    dtype = dtype_of_name(str(inputs[0].dtype).removeprefix("torch."))
    assert dtype is not None
    addresses = [tensor.data_ptr() for tensor in inputs]
    factors = factors_of(op, len(inputs))
    native().reduce(output.data_ptr(), addresses, output.numel(), dtype.code, int(op), factors, stream)
    return output


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_native_is_the_reference(dtype: torch.dtype, op: ReduceOp) -> None:
    for num_inputs in NUM_INPUTS:
        for numel in NUMELS:
            inputs = inputs_of(dtype, num_inputs, numel)
            expected = reduce_reference(inputs, op, factors_of(op, num_inputs))
            for isa in isa_names():
                assert native()._reduce_isa(isa) and native().cpu_isa() == isa
                for stream in (False, True):
                    got = run_native(inputs, op, stream=stream)
                    assert same_bits(got, expected), (isa, num_inputs, numel, stream)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_any_alignment_and_nothing_outside_is_written(dtype: torch.dtype, op: ReduceOp) -> None:
    numel = 157
    inputs = [make_input(dtype, index)[index + 1 :][:numel] for index in range(3)]
    expected = reduce_reference(inputs, op, factors_of(op, 3))
    for isa in isa_names():
        assert native()._reduce_isa(isa)
        for start in (1, 2, 3, 5, 9, 17, 33):
            for stream in (False, True):
                around = make_input(dtype, 4)[: numel + 80].clone()
                before = around.clone()
                run_native(inputs, op, around[start : start + numel], stream=stream)
                assert same_bits(around[start : start + numel], expected)
                assert same_bits(around[:start], before[:start])
                assert same_bits(around[start + numel :], before[start + numel :])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_inputs", [1, 2, 3])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_output_may_be_an_input(dtype: torch.dtype, num_inputs: int, stream: bool) -> None:
    originals = inputs_of(dtype, num_inputs, 4099)
    expected = reduce_reference(originals, ReduceOp.SUM)
    for place in range(num_inputs):
        inputs = [tensor.clone() for tensor in originals]
        run_native(inputs, ReduceOp.SUM, inputs[place], stream=stream)
        assert same_bits(inputs[place], expected)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_pair_of_float8(dtype: torch.dtype, op: ReduceOp) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    inputs = [codes.repeat(256).view(dtype), codes.repeat_interleave(256).view(dtype)]
    expected = reduce_reference(inputs, op)
    for isa in isa_names():
        assert native()._reduce_isa(isa)
        assert same_bits(run_native(inputs, op), expected)


@pytest.mark.parametrize("factor", [1.0, 2.0**-9, 2.0**-12, 1 / 3, 1e-3, 7.7, 2.0**17])
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_every_code_is_rounded_as_torch_casts(dtype: torch.dtype, factor: float) -> None:
    code_dtype = PARTS[dtype.itemsize]
    codes = torch.arange(256**dtype.itemsize).to(code_dtype).view(dtype)
    expected = reduce_reference([codes], ReduceOp.PREMUL_SUM, [factor])
    scaled = codes.to(torch.float32) * factor
    finite = scaled.isfinite()
    if dtype == torch.float8_e4m3fn:  # what is too large for it, torch 2.11 casts to NaN and 2.13 to the largest
        scaled = scaled.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    assert same_bits(expected[finite], scaled.to(dtype)[finite])
    for isa in isa_names():
        assert native()._reduce_isa(isa)
        output = torch.empty_like(codes)
        reduce_(output, [codes], ReduceOp.PREMUL_SUM, [factor])
        assert same_bits(output, expected)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_wins_whoever_has_it(dtype: torch.dtype, op: ReduceOp) -> None:
    for place in range(3):
        inputs = [torch.full((67,), float(index), dtype=dtype) for index in range(3)]
        inputs[place].fill_(float("nan"))
        output = torch.empty(67, dtype=dtype)
        reduce_(output, inputs, op)
        assert output.isnan().all()


def test_small_floats_round_once() -> None:
    ones = [torch.ones(33, dtype=torch.bfloat16)] + [torch.full((33,), 2.0**-9, dtype=torch.bfloat16)] * 4
    output = torch.empty(33, dtype=torch.bfloat16)
    reduce_(output, ones, ReduceOp.SUM)
    assert torch.equal(output, torch.full((33,), 1 + 2.0**-7, dtype=torch.bfloat16))  # rounded each time, it stays 1


def test_bool_bytes_other_than_one_are_true() -> None:
    two, four = (torch.full((70,), value, dtype=torch.uint8).view(torch.bool) for value in (2, 4))
    output = torch.empty(70, dtype=torch.bool)
    reduce_(output, [two, four], ReduceOp.BAND)
    assert torch.equal(output.view(torch.uint8), torch.ones(70, dtype=torch.uint8))


def test_what_is_supported_is_one_table() -> None:
    for dtype in DTYPES:
        for op in ReduceOp:
            assert native().reduce_supported(dtype.code, int(op)) == reduce_supported(getattr(torch, dtype.name), op)
    assert not native().reduce_supported(99, 0)
    assert not reduce_supported(torch.int32, ReduceOp.AVG)


def test_mistakes_raise_before_a_byte_moves() -> None:
    x, y = torch.ones(8), torch.ones(8)
    with pytest.raises(ConfigError, match="expected 8 elements of torch.float32"):
        reduce_(x, [y, torch.ones(7)], ReduceOp.SUM)
    with pytest.raises(ConfigError, match="expected 8 elements of torch.float32"):
        reduce_(x, [y.double()], ReduceOp.SUM)
    with pytest.raises(ConfigError, match="BAND is not defined on torch.float32"):
        reduce_(x, [y], ReduceOp.BAND)
    with pytest.raises(ConfigError, match="contiguous"):
        reduce_(torch.ones(16)[::2], [y], ReduceOp.SUM)
    with pytest.raises(ConfigError, match="at least one input"):
        reduce_(x, [], ReduceOp.SUM)
    with pytest.raises(ConfigError, match="a factor for each of the 2 inputs, got none"):
        reduce_(x, [y, y], ReduceOp.PREMUL_SUM)
    with pytest.raises(ConfigError, match="a factor for each of the 2 inputs, got 1"):
        reduce_(x, [y, y], ReduceOp.PREMUL_SUM, [1.0])
    both = torch.ones(12)
    with pytest.raises(ConfigError, match="overlaps"):
        reduce_(both[:8], [both[4:]], ReduceOp.SUM)
    assert torch.equal(x, torch.ones(8)) and torch.equal(both, torch.ones(12))


# -- what torch.compile sees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_torch_operator_is_the_reference(dtype: torch.dtype, op: ReduceOp) -> None:
    inputs = inputs_of(dtype, 3, 257)
    factors = factors_of(op, 3)
    got = torch_ops().reduce(inputs, int(op), factors or [])
    assert same_bits(got, reduce_reference(inputs, op, factors))


def test_torch_operator_takes_any_shape_and_strides() -> None:
    inputs = [torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2), torch.ones(4, 3, 2)]
    got = torch_ops().reduce(inputs, int(ReduceOp.SUM), [])
    assert got.is_contiguous() and torch.equal(got, inputs[0] + inputs[1])


def test_torch_operator_refuses_mistakes() -> None:
    reduce = torch_ops().reduce
    with pytest.raises(RuntimeError, match="differ in shape or dtype"):
        reduce([torch.ones(3), torch.ones(4)], 0, [])
    with pytest.raises(RuntimeError, match="is not defined"):
        reduce([torch.ones(3)], int(ReduceOp.BOR), [])
    with pytest.raises(RuntimeError, match="expected 2 factors, got 1"):
        reduce([torch.ones(3), torch.ones(3)], int(ReduceOp.PREMUL_SUM), [1.0])
    with pytest.raises(RuntimeError, match="no tensor arguments"):
        reduce([], 0, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_opcheck(dtype: torch.dtype) -> None:
    inputs = [torch.arange(10).to(dtype).view(2, 5), torch.ones(2, 5, dtype=dtype)]
    torch.library.opcheck(torch_ops().reduce.default, (inputs, int(ReduceOp.SUM), []))


def test_torch_compile_keeps_the_operator_in_the_graph() -> None:
    reduce = torch_ops().reduce

    @torch.compile(backend="aot_eager", fullgraph=True)
    def mean_of_squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reduce([a * a, b * b], int(ReduceOp.AVG), []) + 1

    a, b = torch.randn(37), torch.randn(37)
    assert torch.equal(mean_of_squares(a, b), (a * a + b * b) / 2 + 1)
