"""Cross entropy of scores that are cut along the vocabulary: three numbers a position cross the wire, not the scores.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pycomm

from .functions import find_own, sum_over_ranks

__all__ = ["ParallelCrossEntropy"]


class ParallelCrossEntropy(nn.Module):
    """The mean loss, as ``functional.cross_entropy`` gives it for the whole scores, in float32 or for float64 in that.

    Positions whose target is ``ignore_index`` do not count; if none is left the loss is NaN.
    """

    def __init__(self, group: Any = None, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.group = pycomm.get_group(group)
        self.ignore_index = ignore_index

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``scores (..., vocabulary / world_size)`` of this rank, ``targets (...)`` in the whole vocabulary.

        The targets are the same on all ranks. Raises ConfigError for one that is not in the vocabulary.
        """
        counts = targets != self.ignore_index
        index, is_here = find_own(targets.where(counts, 0), scores.shape[-1], self.group, "ParallelCrossEntropy")
        scores = scores if scores.dtype == torch.float64 else scores.float()
        largest = scores.detach().amax(-1)
        pycomm.all_reduce(largest, pycomm.ReduceOp.MAX, self.group)
        shifted = scores - largest.unsqueeze(-1)
        place = torch.arange(index.numel(), device=index.device)
        # An index, and not gather, which would keep all of its input for the backward pass.
        of_target = shifted.reshape(-1, shifted.shape[-1])[place, index.flatten()].view_as(index).where(is_here, 0)
        total, of_target = sum_over_ranks(torch.stack([shifted.exp().sum(-1), of_target]), self.group)
        loss: torch.Tensor = (total.log() - of_target).where(counts, 0).sum() / counts.sum()
        return loss
