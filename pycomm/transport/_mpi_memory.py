"""Tensors as MPI takes them: address, count and type, without a copy.

Data is moved as bytes; reductions name their MPI type from the table below and never by Python's buffer protocol, by
which Open MPI adds bfloat16 as bytes (1 + 1 = 4.25e37).

[Note: what MPI does not reduce for us]
MPI has no 16- and 8-bit floats and no portable bool. Its MIN and MAX may lose a NaN. It cannot scale while it adds
(PREMUL_SUM), and its average is a sum that is divided by the caller. For what is left it must give all ranks the same
bits: "MPI requires that all processes participating in these operations receive identical results" (MPI 1.1 to 5.0,
All-Reduce). tests/dist holds the MPI in use to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..types import ReduceOp
from ._mpi_library import import_mpi

__all__ = ["LARGEST_COUNT", "apart", "as_bytes", "as_parts", "cut", "is_reducible", "operator", "pieces", "typed"]

_FLOATS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_INTS = {
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_TYPE_NAMES = _FLOATS | _INTS
_OP_NAMES = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
    ReduceOp.AVG: "SUM",
}
_FLOAT_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG})
_INT_OPS = frozenset(_OP_NAMES) - {ReduceOp.AVG}

# Counts in MPI before version 4 are C ints. What is larger goes as one element of a made-up type, or in pieces.
LARGEST_COUNT = 2**31 - 1


def is_reducible(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Says whether MPI reduces ``dtype`` by ``op``, the same on all ranks; AVG as a sum."""
    return (dtype in _FLOATS and op in _FLOAT_OPS) or (dtype in _INTS and op in _INT_OPS)


def operator(op: ReduceOp) -> Any:
    """Returns MPI's operator for ``op``."""
    return getattr(import_mpi(), _OP_NAMES[op])


def typed(flat: torch.Tensor, parts: int = 1) -> list[Any]:
    """Returns the memory of ``flat`` for a reduction; MPI counts one of the ``parts``."""
    return [_address(flat), flat.numel() // parts, getattr(import_mpi(), _TYPE_NAMES[flat.dtype])]


def as_bytes(flat: torch.Tensor, parts: int = 1) -> list[Any]:
    """Returns the memory of ``flat`` as bytes; MPI counts one of the ``parts``."""
    part_bytes = flat.nbytes // parts
    if part_bytes <= LARGEST_COUNT:
        return [_address(flat), part_bytes, import_mpi().BYTE]
    return [_address(flat), 1, _block_type(part_bytes)]


def as_parts(flat: torch.Tensor, splits: Sequence[int]) -> list[Any]:
    """Returns the memory of ``flat`` as bytes, a part of ``splits`` elements for each rank."""
    return [_address(flat), ([flat.itemsize * split for split in splits], None), import_mpi().BYTE]


def pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns ``flat`` in pieces of as many elements as a count can say; none if it is empty."""
    return [flat[start : start + LARGEST_COUNT] for start in range(0, flat.numel(), LARGEST_COUNT)]


def cut(flat: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    """Returns ``flat`` in parts of ``splits`` elements."""
    stops = list(itertools.accumulate(splits))
    return [flat[stop - split : stop] for stop, split in zip(stops, splits, strict=True)]


def apart(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns ``input``, or a copy if it shares memory with ``output``, which MPI forbids."""
    first, second = input.data_ptr(), output.data_ptr()
    return input if first + input.nbytes <= second or second + output.nbytes <= first else input.clone()


def _address(flat: torch.Tensor) -> Any:
    """Returns the memory of ``flat`` as mpi4py's buffer, which keeps nothing alive.

    MPI knows no streams: what the current one still does to ``flat`` has to end first.
    """
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()
    return import_mpi().buffer.fromaddress(flat.data_ptr(), flat.nbytes)


@cache
def _block_type(nbytes: int) -> Any:
    """Returns an MPI type of ``nbytes`` bytes, more than a count can say: whole pieces and the rest."""
    byte, piece_bytes = import_mpi().BYTE, 1 << 20
    pieces = byte.Create_contiguous(piece_bytes).Create_contiguous(nbytes // piece_bytes)
    rest_bytes = nbytes % piece_bytes
    displacements = [0, nbytes - rest_bytes]
    return byte.Create_struct([1, rest_bytes], displacements, [pieces, byte]).Commit()
