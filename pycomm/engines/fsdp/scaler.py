"""Loss scaling where each rank sees a part of the gradients: ranks must skip a step together."""

from __future__ import annotations

from typing import Any

import torch

import pycomm

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks skip a step, and change the scale, together.

    An inf or NaN lies in the gradients of one rank: of its shard, its part of a tensor-parallel layer, its pipeline
    stage. The scaler of torch would skip there alone. This one takes the maximum of ``found_inf`` over ``group`` (None:
    the world), by one all_reduce of one float32 for each optimizer and step. So every rank of it calls ``unscale_`` or
    ``step``, for its optimizers in one order. Other arguments are those of GradScaler.
    """

    def __init__(self, device: str = "cuda", *, group: Any = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._group = group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """``unscale_`` and, for fused optimizers, ``step`` come through here. Returns what was found by device."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        told = found_inf.new_zeros(1)
        for each in found.values():
            torch.maximum(told, each.to(told.device), out=told)
        pycomm.all_reduce(told, pycomm.ReduceOp.MAX, self._group)
        return {device: told.reshape(()).to(device) for device in found or [told.device]}
