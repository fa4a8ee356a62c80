"""Tensors that are not parameters' gradients, made equal on all ranks: parameters at first, buffers in each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import pycomm

__all__ = ["average_tensors", "broadcast_tensors", "make_equal"]


def make_equal(buffers: Iterable[torch.Tensor], mode: str | None, group: pycomm.Group, group_src: int = 0) -> None:
    """What an engine's ``buffers=`` says: "broadcast" those of rank ``group_src``, "average" them, or None: neither."""
    if mode == "broadcast":
        broadcast_tensors(buffers, group, group_src)
    elif mode == "average":
        average_tensors(buffers, group)


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: pycomm.Group, group_src: int = 0) -> None:
    """Copies the tensors of rank ``group_src`` to all ranks, with one message for each dtype and device."""
    for alike in _alike(tensors):
        flat = _joined(alike)
        pycomm.broadcast(flat, group=group, group_src=group_src)
        _copy_back(alike, flat)


def average_tensors(tensors: Iterable[torch.Tensor], group: pycomm.Group) -> None:
    """Replaces floating-point tensors by their mean over the ranks; the others by rank 0's."""
    tensors = list(tensors)
    broadcast_tensors([each for each in tensors if not each.is_floating_point()], group)
    for alike in _alike(each for each in tensors if each.is_floating_point()):
        flat = _joined(alike)
        pycomm.all_reduce(flat, pycomm.ReduceOp.AVG, group)
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
