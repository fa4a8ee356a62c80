"""The words that cross every layer: element types and reduction operators.

The integer codes are shared with ``csrc/types.h``; ``tests/unit/test_types.py`` holds the two together.
This module imports no torch, so that plans and the command line can use it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["DTYPES", "VERBS", "DType", "PremulSum", "ReduceOp", "dtype_of_code", "dtype_of_name", "premul_sum"]


# The collectives that a transport may carry and a plan may describe; the other verbs are made of these.
VERBS = (
    "all_reduce",
    "reduce",
    "reduce_scatter_single",
    "broadcast",
    "all_gather_single",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)


class ReduceOp(IntEnum):
    """How the contributions of the ranks combine. ``torch.distributed.ReduceOp`` members are accepted wherever
    these are.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    PREMUL_SUM = 8


@dataclass(frozen=True)
class PremulSum:
    """``sum(factor_r * x_r)``: each rank's contribution is scaled by its own ``factor`` before the sum."""

    factor: float


def premul_sum(factor: float) -> PremulSum:
    """Returns the reduction that multiplies this rank's contribution by ``factor`` and then sums."""
    return PremulSum(float(factor))


@dataclass(frozen=True)
class DType:
    """One element type: its native ``code``, torch's ``name`` for it, its size, and the family that decides its
    operators.
    """

    code: int
    name: str
    itemsize: int
    family: str  # "float", "int", "uint", "bool", "complex", "float8"


DTYPES: tuple[DType, ...] = (
    DType(0, "uint8", 1, "uint"),
    DType(1, "int8", 1, "int"),
    DType(2, "uint16", 2, "uint"),
    DType(3, "int16", 2, "int"),
    DType(4, "uint32", 4, "uint"),
    DType(5, "int32", 4, "int"),
    DType(6, "uint64", 8, "uint"),
    DType(7, "int64", 8, "int"),
    DType(8, "bool", 1, "bool"),
    DType(9, "float16", 2, "float"),
    DType(10, "bfloat16", 2, "float"),
    DType(11, "float32", 4, "float"),
    DType(12, "float64", 8, "float"),
    DType(13, "complex64", 8, "complex"),
    DType(14, "complex128", 16, "complex"),
    DType(15, "float8_e4m3fn", 1, "float8"),
    DType(16, "float8_e5m2", 1, "float8"),
    DType(17, "float8_e4m3fnuz", 1, "float8"),
    DType(18, "float8_e5m2fnuz", 1, "float8"),
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def dtype_of_name(name: str) -> DType | None:
    """Returns the element type that torch calls ``name`` (``"float32"``), or None if pycomm does not move it."""
    return _BY_NAME.get(name)


def dtype_of_code(code: int) -> DType:
    """Returns the element type of a native code."""
    return DTYPES[code]
