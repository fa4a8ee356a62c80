"""Cross entropy of scores that are cut along the vocabulary: three numbers a position cross the wire, not the scores.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pycomm

__all__ = ["ParallelCrossEntropy"]


class ParallelCrossEntropy(nn.Module):
    """The mean loss, as ``functional.cross_entropy`` gives it for the whole scores."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = pycomm.get_group(group)

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``scores (..., vocabulary / world_size)`` of this rank, ``targets (...)`` in the whole vocabulary."""
        loss: torch.Tensor = _CrossEntropy.apply(scores.float(), targets, self.group)  # type: ignore[no-untyped-call]
        return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, targets: torch.Tensor, group: pycomm.Group) -> Any:
        largest = scores.amax(-1)
        pycomm.all_reduce(largest, pycomm.ReduceOp.MAX, group)
        shifted = scores - largest.unsqueeze(-1)
        local = targets - group.rank * scores.shape[-1]
        is_here = (local >= 0) & (local < scores.shape[-1])
        index = local.where(is_here, 0).unsqueeze(-1)
        weights = shifted.exp()
        both = torch.stack([weights.sum(-1), shifted.gather(-1, index).squeeze(-1) * is_here])
        pycomm.all_reduce(both, group=group)
        total, of_target = both
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), index, is_here)
        return (total.log() - of_target).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, index, is_here = ctx.saved_tensors
        result = probabilities.scatter_add(-1, index, -is_here.to(probabilities.dtype).unsqueeze(-1))
        return result * (gradient / is_here.numel()), None, None
