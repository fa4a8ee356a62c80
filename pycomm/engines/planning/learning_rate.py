"""The learning rate of a batch that is k times as large, and a scheduler that gets there gently.

linear   lr k          one step on k batches, for k steps on one: Goyal et al. 2017, Accurate, Large Minibatch SGD,
                       section 2.1; good for SGD until k is some hundred
sqrt     lr sqrt(k)    keeps the noise of a step: Krizhevsky 2014, One weird trick, section 5; Malladi et al. 2022,
                       On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, for Adam and RMSprop
warm-up  from lr to the scaled one in equal steps, while the linear rule does not hold yet: Goyal et al., section 2.2
LARS     a factor of each tensor, trust |w| / (|g| + weight_decay |w|): You et al. 2017, Large Batch Training of
         Convolutional Networks, section 4
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ConfigError

__all__ = ["LargeBatchLR", "Rule", "lars_ratio", "scale_gradients_by_layer_", "scaled_learning_rate"]

Rule = Literal["linear", "sqrt", "none"]


def scaled_learning_rate(learning_rate: float, base_batch: int, batch: int, rule: Rule = "linear") -> float:
    """Returns the rate for ``batch`` samples a step (over all ranks), of one that suits ``base_batch``.

    Raises ConfigError.
    """
    if base_batch < 1 or batch < 1:
        raise ConfigError(f"scaled_learning_rate: expected batches of 1 or more samples, got {base_batch} and {batch}")
    if rule not in ("linear", "sqrt", "none"):
        raise ConfigError(f"scaled_learning_rate: rule: expected 'linear', 'sqrt' or 'none', got {rule!r}")
    factor = batch / base_batch
    return learning_rate * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[rule]


class LargeBatchLR(LRScheduler):
    """Takes an optimizer whose rates suit ``base_batch`` to those of ``batch``: warm-up, then constant or a cosine.

    Step it after each optimizer step. For ``warm_up_steps`` the rate goes from the optimizer's own to the scaled one in
    equal parts (a rule that makes it smaller needs none); with ``total_steps`` half a cosine then takes it to
    ``final_share`` of the scaled one. Every parameter group is scaled by the same factor. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_batch: int,
        batch: int,
        rule: Rule = "linear",
        *,
        warm_up_steps: int = 0,
        total_steps: int | None = None,
        final_share: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.factor = scaled_learning_rate(1.0, base_batch, batch, rule)
        if warm_up_steps < 0 or (total_steps is not None and total_steps <= warm_up_steps):
            raise ConfigError(
                f"LargeBatchLR: expected 0 <= warm_up_steps < total_steps, got {warm_up_steps} and {total_steps}"
            )
        if not 0.0 <= final_share <= 1.0:
            raise ConfigError(f"LargeBatchLR: final_share: expected 0 to 1, got {final_share}")
        self.warm_up_steps, self.total_steps, self.final_share = warm_up_steps, total_steps, final_share
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the rates of the groups for the step that comes."""
        share = self._share(self.last_epoch)
        return [rate * share for rate in self.base_lrs]

    def _share(self, step: int) -> float:
        if step < self.warm_up_steps:
            return 1.0 + (self.factor - 1.0) * step / self.warm_up_steps
        if self.total_steps is None:
            return self.factor
        progress = min(1.0, (step - self.warm_up_steps) / (self.total_steps - self.warm_up_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.factor * (self.final_share + (1.0 - self.final_share) * cosine)


def lars_ratio(weight_norm: float, gradient_norm: float, weight_decay: float = 0.0, trust: float = 1e-3) -> float:
    """Returns the factor of a tensor's rate by its 2-norms; 1 where one of them is 0, as at the start of a bias."""
    if weight_norm == 0.0 or gradient_norm == 0.0:
        return 1.0
    return trust * weight_norm / (gradient_norm + weight_decay * weight_norm)


@torch.no_grad()
def scale_gradients_by_layer_(
    parameters: Iterable[nn.Parameter], weight_decay: float = 0.0, trust: float = 1e-3
) -> None:
    """Multiplies each gradient by its tensor's LARS ratio; called between ``backward()`` and SGD's ``step()``.

    Vectors (biases, norms) keep theirs, as in the paper's own code. ``weight_decay`` is the optimizer's, which has to
    be scaled too: it is added to the gradient here, so give the optimizer 0. After data-parallel averaging the ratios
    are the same on every rank.
    """
    for parameter in parameters:
        if parameter.grad is None or parameter.dim() < 2:
            continue
        norms = torch.linalg.vector_norm(parameter).item(), torch.linalg.vector_norm(parameter.grad).item()
        parameter.grad.add_(parameter, alpha=weight_decay).mul_(lars_ratio(*norms, weight_decay, trust))
