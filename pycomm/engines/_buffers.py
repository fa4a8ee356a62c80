"""Tensors that are not parameters' gradients, made equal on all ranks: parameters at first, buffers in each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import pycomm

from ..errors import ConfigError

__all__ = ["average_tensors", "broadcast_tensors", "check_writable", "make_equal"]


def check_writable(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigError for tensors that cannot be received into: sparse ones, and those expanded from fewer."""
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r}: expected a dense tensor, got {tensor.layout}: it is made equal on all ranks; keep "
                f"what it is made from as a buffer, or keep it as a plain attribute"
            )
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape)):
            raise ConfigError(
                f"buffer {name!r}: expected a tensor whose elements have a place each, got one that was expanded to "
                f"{tuple(tensor.shape)}: it is made equal on all ranks; register its .clone()"
            )


def make_equal(
    buffers: Iterable[torch.Tensor], mode: str | None, group: pycomm.Group, group_src: int = 0, share: float = 1.0
) -> None:
    """What an engine's ``buffers=`` says: "broadcast" those of rank ``group_src``, "average" them, or None: neither.

    ``share``: how much those of this rank count in the average, 0 for one that has no data; the ranks' mean is 1.
    """
    if mode == "broadcast":
        broadcast_tensors(buffers, group, group_src)
    elif mode == "average":
        average_tensors(buffers, group, group_src, share)


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: pycomm.Group, group_src: int = 0) -> None:
    """Copies the tensors of rank ``group_src`` to all ranks, with one message for each dtype and device."""
    for alike in _alike(tensors):
        flat = _joined(alike)
        pycomm.broadcast(flat, group=group, group_src=group_src)
        _copy_back(alike, flat)


def average_tensors(
    tensors: Iterable[torch.Tensor], group: pycomm.Group, group_src: int = 0, share: float = 1.0
) -> None:
    """Replaces floating-point and complex tensors by their mean over the ranks; the others by rank ``group_src``'s.

    ``share`` is that of ``make_equal``.
    """
    tensors = list(tensors)
    has_mean = [each.is_floating_point() or each.is_complex() for each in tensors]
    broadcast_tensors([each for each, has in zip(tensors, has_mean) if not has], group, group_src)
    for alike in _alike(each for each, has in zip(tensors, has_mean) if has):
        flat = _joined(alike)
        if share != 1.0:
            flat = flat.mul_(share) if share else flat.zero_()  # NaN too
        pycomm.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, pycomm.ReduceOp.AVG, group)
        _copy_back(alike, flat)


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return list(kinds.values())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _copy_back(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view(tensor.shape))
