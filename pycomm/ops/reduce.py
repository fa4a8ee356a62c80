"""reduce: n tensors -> one, combined in order, so that every rank that reduces the same inputs gets the same bits.

- ``reduce_``: the native kernels, into memory that is there.
- ``torch_ops().reduce``: ``pycomm::reduce(Tensor[] inputs, int op, float[] factors) -> Tensor``; torch.compile sees it.
- ``reduce_reference``: the same in plain torch; the tests hold the other two to it bit for bit.

[Note: what a reduction computes]
Inputs combine in their order. float16, bfloat16 and float8 accumulate in float32 and round once, at the end. AVG
divides the sum by the number of inputs; PREMUL_SUM multiplies each input by its factor, and rounds, before adding.
Integers wrap. MIN and MAX keep the earlier of two equals and give NaN where any input is NaN. Every NaN in an output is
the quiet, positive one of its type, whatever NaNs went in. Where float8_e4m3fn overflows (it has no infinity) it
saturates at 448, as torch 2.13 casts. bool: SUM, MAX and BOR are "or"; PRODUCT, MIN and BAND are "and".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..errors import ConfigError, NativeUnavailableError
from ..types import DType, ReduceOp, dtype_of_name
from . import native
from ._torch_library import load_torch_library

__all__ = ["reduce_", "reduce_at", "reduce_reference", "reduce_supported", "torch_ops"]

_INTEGER_OPS = frozenset(ReduceOp) - {ReduceOp.AVG, ReduceOp.PREMUL_SUM}
_FLOAT_OPS = frozenset(ReduceOp) - {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
_SUPPORTED = {
    "int": _INTEGER_OPS,
    "uint": _INTEGER_OPS,
    "bool": _INTEGER_OPS,
    "float": _FLOAT_OPS,
    "float8": _FLOAT_OPS,
    "complex": _FLOAT_OPS - {ReduceOp.MIN, ReduceOp.MAX},
}


def reduce_supported(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Says whether ``op`` is defined on ``dtype``: bitwise ones on integers and bool, AVG and PREMUL_SUM on floats."""
    known = _dtype(dtype)
    return known is not None and op in _SUPPORTED[known.family]


def reduce_(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, factors: Sequence[float] | None = None
) -> None:
    """Writes the reduction of ``inputs``, each ``(numel,)``, to ``output (numel,)``; see the note on top of this file.

    All are contiguous, of one dtype and device (CPU, or CUDA: then on the current stream). ``output`` may be one of the
    inputs, or overlaps none. ``factors`` belong to PREMUL_SUM, one for each input. Raises ConfigError,
    NativeUnavailableError.
    """
    _check(output, inputs, op)
    reduce_at(output, [tensor.data_ptr() for tensor in inputs], op, factors)


def reduce_at(output: torch.Tensor, addresses: list[int], op: ReduceOp, factors: Sequence[float] | None = None) -> None:
    """As ``reduce_``, of inputs by their addresses alone, which nobody checks: half the time if it is small."""
    dtype = _dtype(output.dtype)
    assert dtype is not None
    given = None if factors is None else [float(factor) for factor in factors]
    try:
        if output.device.type == "cpu":
            native().reduce(output.data_ptr(), addresses, output.numel(), dtype.code, int(op), given)
        else:
            _reduce_cuda(output, addresses, dtype, op, given)
    except ValueError as error:
        raise ConfigError(f"{error} ({dtype.name}, {op.name}, {output.numel()} elements)") from error


def _check(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Raises ConfigError if the native kernels would misread the tensors."""
    for index, tensor in enumerate(inputs):
        if tensor.dtype != output.dtype or tensor.numel() != output.numel() or tensor.device != output.device:
            raise ConfigError(
                f"reduce: input {index} does not fit the output: expected {output.numel()} elements of {output.dtype} "
                f"on {output.device}, got {tensor.numel()} of {tensor.dtype} on {tensor.device}; convert it first"
            )
    for tensor in (output, *inputs):
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
            raise ConfigError(
                "reduce: expected contiguous tensors without conjugate or negation bits, got one of shape "
                f"{tuple(tensor.shape)} that is not; pass its .contiguous().resolve_conj().resolve_neg()"
            )
    dtype = _dtype(output.dtype)
    if dtype is None or op not in _SUPPORTED[dtype.family]:
        raise ConfigError(
            f"reduce: {ReduceOp(op).name} is not defined on {output.dtype}; choose another operator or dtype"
        )


def _reduce_cuda(
    output: torch.Tensor, addresses: list[int], dtype: DType, op: ReduceOp, factors: list[float] | None
) -> None:
    """Queues the reduction on the current stream of the output's device."""
    if output.device.type != "cuda" or native().cuda_archs is None:
        raise NativeUnavailableError(
            f"reduce: this build of pycomm has no kernels for {output.device.type} tensors. Build them with "
            "`PYCOMM_CUDA=1 pip install -e . --no-build-isolation`, with CUDA_HOME set to a CUDA toolkit."
        )
    with torch.cuda.device(output.device):
        stream = torch.cuda.current_stream(output.device).cuda_stream
        native().reduce_cuda(output.data_ptr(), addresses, output.numel(), dtype.code, int(op), factors, stream)


@cache
def _dtype(dtype: torch.dtype) -> DType | None:
    return dtype_of_name(str(dtype).removeprefix("torch."))


# -- for torch.compile -------------------------------------------------------------------------------------------------


@cache
def torch_ops() -> Any:
    """Returns ``torch.ops.pycomm``, after loading (on first use: perhaps building) its library.

    Its operators live on CPU, and on CUDA where the core was built with it. Raises NativeUnavailableError.
    """
    load_torch_library()
    torch.library.register_fake("pycomm::reduce", _reduce_fake)
    torch.library.impl("pycomm::reduce", "CUDA", _reduce_new)
    return torch.ops.pycomm


def _reduce_fake(inputs: Sequence[torch.Tensor], op: int, factors: Sequence[float]) -> torch.Tensor:
    return inputs[0].new_empty(inputs[0].shape)


def _reduce_new(inputs: Sequence[torch.Tensor], op: int, factors: Sequence[float]) -> torch.Tensor:
    output = inputs[0].new_empty(inputs[0].shape)
    reduce_(output, [tensor.contiguous() for tensor in inputs], ReduceOp(op), factors or None)
    return output


# -- the reference -----------------------------------------------------------------------------------------------------


def reduce_reference(
    inputs: Sequence[torch.Tensor], op: ReduceOp, factors: Sequence[float] | None = None
) -> torch.Tensor:
    """Returns the reduction of ``inputs``, each of the same shape, in plain torch; see the note on top of this file."""
    dtype = inputs[0].dtype
    if not reduce_supported(dtype, op):
        raise ConfigError(f"reduce: {op.name} is not defined on {dtype}; choose another operator or dtype")
    if dtype == torch.bool:
        return _fold([tensor.view(torch.uint8) for tensor in inputs], _BOOL_AS.get(op, op)).view(torch.bool)
    if not dtype.is_floating_point and not dtype.is_complex:
        return _reduce_integers(inputs, op)
    if dtype.is_complex and op is ReduceOp.PRODUCT:
        return _complex_product(inputs)
    if dtype.is_complex:
        parts = [torch.view_as_real(tensor) for tensor in inputs]
        return torch.view_as_complex(reduce_reference(parts, op, factors))
    wide = [tensor.to(torch.float32) if dtype.itemsize < 4 else tensor for tensor in inputs]
    if op is ReduceOp.PREMUL_SUM:
        assert factors is not None, "PREMUL_SUM needs a factor for each input"
        scales = [torch.tensor(factor, dtype=wide[0].dtype, device="cpu") for factor in factors]
        wide = [tensor * scale for tensor, scale in zip(wide, scales, strict=True)]
    total = _fold(wide, ReduceOp.SUM if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else op)
    if op is ReduceOp.AVG:
        total = total / torch.tensor(len(inputs), dtype=total.dtype, device="cpu")
    if dtype == torch.float8_e4m3fn:
        total = total.clamp(-448.0, 448.0)  # leaves NaN
    return _with_one_nan(total.to(dtype), total.isnan())


_BOOL_AS = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}


def _fold(inputs: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = inputs[0].clone()
    for tensor in inputs[1:]:
        if op is ReduceOp.SUM:
            total = total + tensor
        elif op is ReduceOp.PRODUCT:
            total = total * tensor
        elif op is ReduceOp.MIN:
            total = torch.where((tensor < total) | (tensor != tensor), tensor, total)
        elif op is ReduceOp.MAX:
            total = torch.where((tensor > total) | (tensor != tensor), tensor, total)
        elif op is ReduceOp.BAND:
            total = total & tensor
        elif op is ReduceOp.BOR:
            total = total | tensor
        else:
            total = total ^ tensor
    return total


def _reduce_integers(inputs: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """As signed integers, on which torch has every operator; unsigned ones get their order by flipping the top bit."""
    dtype = inputs[0].dtype
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    flip = torch.iinfo(signed).min if op in (ReduceOp.MIN, ReduceOp.MAX) and not dtype.is_signed else 0
    return (_fold([tensor.view(signed) ^ flip for tensor in inputs], op) ^ flip).view(dtype)


def _complex_product(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    real, imaginary = inputs[0].real, inputs[0].imag
    for tensor in inputs[1:]:
        real, imaginary = (
            real * tensor.real - imaginary * tensor.imag,
            real * tensor.imag + imaginary * tensor.real,
        )
    return torch.complex(_with_one_nan(real), _with_one_nan(imaginary))


def _with_one_nan(values: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
    """Replaces the NaNs, all of them or those ``where`` says, by the quiet, positive one."""
    where = values.isnan() if where is None else where
    nan = torch.tensor(float("nan"), dtype=values.dtype, device=values.device)
    if values.dtype.itemsize == 1:  # float8: torch selects among bytes only
        return torch.where(where, nan.view(torch.uint8), values.view(torch.uint8)).view(values.dtype)
    return torch.where(where, nan, values)
