"""Tensors in the memory that a transport shares between the ranks: collectives on them save the copy in."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..errors import ConfigError
from .context import resolve

__all__ = ["empty", "zeros"]


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, shared: bool = False, group: Any = None
) -> torch.Tensor:
    """Returns an uninitialized CPU tensor of shape ``size``; with ``shared=True`` in the transport's shared memory.

    Each rank gets a tensor of its own. The memory is given back when the last tensor over it is gone. Raises
    ConfigError if the transport of ``group`` has no shared memory.
    """
    shape = _shape(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not shared:
        return torch.empty(shape, dtype=dtype, device="cpu")
    g = resolve(group)
    allocate = getattr(g.transport, "allocate", None)
    if allocate is None:
        raise ConfigError(
            f"shared=True: transport {g.transport.name!r} of group {g.name!r} has no memory to share; "
            f"use transport='shm', or shared=False"
        )
    numel = prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffer = allocate(numel * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=numel * dtype.itemsize).view(dtype).view(shape)


def zeros(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, shared: bool = False, group: Any = None
) -> torch.Tensor:
    """Returns ``empty`` with the same arguments, filled with zeros."""
    return empty(*size, dtype=dtype, shared=shared, group=group).zero_()


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    shape: tuple[Any, ...] = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if any(not isinstance(length, int) or length < 0 for length in shape):
        raise ConfigError(f"size: expected lengths >= 0, got {shape}")
    return shape
