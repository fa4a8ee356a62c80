"""pack, unpack: many tensors <-> one flat bucket, cast and scaled in the same pass.

- ``pack_``, ``unpack_``: into memory that is there.
- ``torch.ops.pycomm.pack_`` and ``unpack_``: the same as torch operators; inside torch.compile the functions above
  become these by themselves.
- ``pack_reference``, ``unpack_reference``: the same in plain torch; the tests hold the kernels to them bit for bit.

The elements of a tensor follow each other in the order of its shape, whatever its strides, and the tensors in the order
of the list, without gaps. Tensors and bucket are float32, float16 or bfloat16 in any mixture. An element is widened to
float32, multiplied by ``scale`` if that is not 1, and rounded once, ties to even, as torch casts; a NaN becomes the
quiet, positive one where it is scaled or cast, and keeps its bits where it is only copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..errors import ConfigError
from ._checks import current_stream, kernels

__all__ = ["pack_", "pack_reference", "unpack_", "unpack_reference"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pack_(bucket: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Writes ``tensors``, of any shapes and strides, one after the other to ``bucket (sum of their numel,)``.

    The bucket overlaps none of them. All are on one device. Raises ConfigError, NativeUnavailableError.
    """
    if torch.compiler.is_compiling():
        torch.ops.pycomm.pack_(bucket, list(tensors), scale)
        return
    if _run("pack", _packer().pack, bucket, tensors, scale) != -1:
        raise _mistake("pack", bucket, tensors)


def unpack_(tensors: Sequence[torch.Tensor], bucket: torch.Tensor, scale: float = 1.0) -> None:
    """Writes ``bucket`` back to ``tensors``, of any shapes and strides; no two elements of them share memory."""
    if torch.compiler.is_compiling():
        torch.ops.pycomm.unpack_(list(tensors), bucket, scale)
        return
    if _run("unpack", _packer().unpack, bucket, tensors, scale) != -1:
        raise _mistake("unpack", bucket, tensors)


@cache
def _packer() -> Any:
    return kernels().Packer(torch.Tensor, torch.nn.Parameter)


def _run(op: str, move: Any, bucket: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float) -> int:
    """Returns what the core says: -1, or what is wrong."""
    if bucket.is_cpu:
        return int(move(bucket, tensors, scale, None))
    with current_stream(op, bucket.device) as stream:
        return int(move(bucket, tensors, scale, stream))


def _mistake(op: str, bucket: torch.Tensor, tensors: Sequence[torch.Tensor]) -> ConfigError:
    """Says what the kernels could not take; nothing was moved."""
    if bucket.dtype not in _DTYPES:
        return ConfigError(f"{op}: expected a bucket of float32, float16 or bfloat16, got {bucket.dtype}")
    for index, tensor in enumerate(tensors):
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.dtype not in _DTYPES or tensor.device != bucket.device or tensor.is_neg():
            return ConfigError(
                f"{op}: tensor {index} cannot be packed: expected a dense float32, float16 or bfloat16 tensor on "
                f"{bucket.device}, got {type(tensor).__name__}, {tensor.dtype} on {tensor.device}; convert it first"
            )
    total = sum(tensor.numel() for tensor in tensors)
    if bucket.dim() != 1 or not bucket.is_contiguous() or bucket.numel() != total:
        return ConfigError(
            f"{op}: the bucket does not fit: expected a flat tensor of {total} elements, those of the {len(tensors)} "
            f"tensors together, got shape {tuple(bucket.shape)}"
        )
    return ConfigError(f"{op}: a tensor lies in the bucket's own memory; there is nothing to {op}: leave it out")


# -- for torch.compile -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "pycomm::pack_", mutates_args=("bucket",), schema="(Tensor(a!) bucket, Tensor[] tensors, float scale) -> ()"
)
def _pack_op(bucket: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float) -> None:
    pack_(bucket, tensors, scale)


@torch.library.custom_op(
    "pycomm::unpack_", mutates_args=("tensors",), schema="(Tensor(a!)[] tensors, Tensor bucket, float scale) -> ()"
)
def _unpack_op(tensors: Sequence[torch.Tensor], bucket: torch.Tensor, scale: float) -> None:
    unpack_(tensors, bucket, scale)


# They write to what they are given and return nothing: so does the fake.
_pack_op.register_fake(lambda *arguments: None)
_unpack_op.register_fake(lambda *arguments: None)


# -- the references ----------------------------------------------------------------------------------------------------


def pack_reference(dtype: torch.dtype, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """Returns a new bucket of ``dtype``, in plain torch; see the text on top of this file."""
    parts = [_convert(tensor.reshape(-1), dtype, scale) for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=dtype, device=tensors[0].device if tensors else "cpu"), *parts])


def unpack_reference(tensors: Sequence[torch.Tensor], bucket: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """Returns what ``unpack_`` writes to each of ``tensors``, in plain torch."""
    parts = torch.split(bucket, [tensor.numel() for tensor in tensors])
    return [_convert(part, tensor.dtype, scale).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _convert(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if values.dtype == dtype and scale == 1.0:
        return values
    wide = values.to(torch.float32)
    if scale != 1.0:
        wide = wide * torch.tensor(scale, dtype=torch.float32, device=values.device)
    nan = torch.tensor(float("nan"), dtype=dtype, device=values.device)
    return torch.where(wide.isnan(), nan, wide.to(dtype))
