"""Inputs whose reductions are exact in every dtype, and what must come out."""

from __future__ import annotations

import threading
import zlib
from functools import lru_cache
from typing import Any

import torch

import pycomm
from pycomm import ReduceOp
from pycomm.collectives.tensors import dtype_name
from pycomm.types import DTYPES, dtype_of_name

ALL_DTYPES = [getattr(torch, dtype.name) for dtype in DTYPES]
GUARD = 16  # elements on either side of a buffer that nobody may write
# Large data repeat after so many elements, which saves computing them; a prime, so that whatever the library cuts data
# into, two of its pieces lie apart by no multiple of it.
PERIOD = 65_537


def family(dtype: torch.dtype) -> str:
    described = dtype_of_name(dtype_name(dtype))
    assert described is not None
    return described.family


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    """The operators that are defined on ``dtype``."""
    if family(dtype) == "complex":
        return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG, ReduceOp.PREMUL_SUM]
    is_whole = family(dtype) in ("int", "uint", "bool")
    undefined = (ReduceOp.AVG, ReduceOp.PREMUL_SUM) if is_whole else (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    return [op for op in ReduceOp if op not in undefined]


def argument_of(op: ReduceOp, rank: int) -> Any:
    """What a user passes as ``op`` on ``rank``."""
    return pycomm.premul_sum(factor_of(rank)) if op is ReduceOp.PREMUL_SUM else op


def factor_of(rank: int) -> float:
    return float(1 + rank % 2)


@lru_cache(256)  # every verb and algorithm asks for the same ones in turn; nobody writes into them
def contribution(
    rank: int, world_size: int, numel: int, dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM
) -> torch.Tensor:
    """The input of ``rank``: small integers, so few that sums and products of five are exact even in 8-bit floats."""
    if numel > PERIOD:
        return _repeated(contribution(rank, world_size, PERIOD, dtype, op), numel)
    counter = torch.arange(numel, dtype=torch.int64) * 5 + rank * 3
    counter = counter ^ (counter >> 3)
    if op is ReduceOp.AVG:
        values = (counter % 2) * world_size
    elif op is ReduceOp.PRODUCT:
        values = counter % 2 + 1
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        values = counter % 7 - (0 if family(dtype) in ("uint", "bool") else 3)
    elif op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        values = counter * 11 % 128
    else:
        values = counter % 2
    if family(dtype) == "bool":
        values = values % 2
    if family(dtype) == "complex":
        return torch.complex(values.double(), values.double()).to(dtype)  # no negative zeros
    return values.to(dtype)


def _repeated(period: torch.Tensor, numel: int) -> torch.Tensor:
    return period.repeat(-(-numel // period.numel()))[:numel]


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction of the ranks' inputs, computed by torch in a wide type."""
    dtype, kind = inputs[0].dtype, family(inputs[0].dtype)
    wide = torch.complex128 if kind == "complex" else torch.float64 if kind.startswith("float") else torch.int64
    stacked = torch.stack([each.to(wide) for each in inputs])
    if op is ReduceOp.PREMUL_SUM:
        factors = torch.tensor([factor_of(rank) for rank in range(len(inputs))]).to(wide)
        result = (stacked * factors.unsqueeze(1)).sum(0)
    elif op is ReduceOp.SUM:
        result = stacked.sum(0)
    elif op is ReduceOp.AVG:
        result = stacked.sum(0) / len(inputs)
    elif op is ReduceOp.PRODUCT:
        result = stacked.prod(0)
    elif op is ReduceOp.MIN:
        result = stacked.amin(0) if stacked.numel() else stacked[0]
    elif op is ReduceOp.MAX:
        result = stacked.amax(0) if stacked.numel() else stacked[0]
    else:
        fold = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}[op]
        result = stacked[0]
        for each in stacked[1:]:
            result = fold(result, each)
    return (result != 0).to(dtype) if kind == "bool" else result.to(dtype)


_computing = threading.Lock()  # ranks that are threads ask for the same one at the same time


def total(world_size: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    """The reduction of all ranks' ``contribution``, computed once for all that ask in turn; nobody writes into it."""
    with _computing:
        return _total(world_size, numel, dtype, op)


@lru_cache(64)
def _total(world_size: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    if numel > PERIOD:
        return _repeated(_total(world_size, PERIOD, dtype, op), numel)
    return reduced([contribution(rank, world_size, numel, dtype, op) for rank in range(world_size)], op)


class Guarded:
    """A flat buffer between two guards: ``flat (numel,)`` may be written, what lies around it may not."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._whole = torch.full(((numel + 2 * GUARD) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
        if dtype == torch.bool:
            self._whole.fill_(1)
        self.flat = self._whole.view(dtype)[GUARD : GUARD + numel]
        self._edge = GUARD * dtype.itemsize

    def is_intact(self) -> bool:
        ends = torch.cat([self._whole[: self._edge], self._whole[self._whole.numel() - self._edge :]])
        return bool((ends == ends[0]).all())


def guarded(values: torch.Tensor) -> Guarded:
    """A guarded copy of ``values``."""
    buffer = Guarded(values.numel(), values.dtype)
    buffer.flat.copy_(values)
    return buffer


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of the bytes, to compare ranks by."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())
