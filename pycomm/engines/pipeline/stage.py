"""One stage on its rank: computes F, B, I and W of a microbatch, and keeps between them what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .weights import Deferred, defer_linears

__all__ = ["Stage"]

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Held(NamedTuple):
    """A microbatch between its forward and backward pass."""

    inputs: torch.Tensor
    output: torch.Tensor  # of the last stage: the loss


class Stage:
    """The part ``module`` of the model, number ``index``; the last one also computes the loss."""

    def __init__(self, index: int, module: nn.Module, loss: LossFunction | None, is_checkpointed: bool) -> None:
        self.index = index
        self.module = module
        self.deferred: Deferred = defer_linears(module)
        self.losses: list[torch.Tensor] = []
        self._loss = loss
        self._is_checkpointed = is_checkpointed
        self._held: dict[int, _Held] = {}

    @property
    def held(self) -> int:
        """The number of microbatches whose activations are held now."""
        return len(self._held)

    def forward(self, microbatch: int, inputs: torch.Tensor, target: torch.Tensor | None, share: float) -> torch.Tensor:
        """Runs F and returns the output, detached; the loss of a microbatch counts ``share``."""
        if self.index > 0:
            inputs = inputs.detach().requires_grad_(inputs.is_floating_point())
        if self._is_checkpointed and torch.is_grad_enabled():
            output = checkpoint(self.module, inputs, use_reentrant=False)
        else:
            output = self.module(inputs)
        result: torch.Tensor = output.detach()
        if self._loss is not None and target is not None:
            output = self._loss(output, target) * share
            self.losses.append(output.detach())
        if output.requires_grad:
            self._held[microbatch] = _Held(inputs, output)
        return result

    def backward(self, microbatch: int, gradient: torch.Tensor | None, is_split: bool) -> torch.Tensor | None:
        """Runs B, or I if ``is_split``, with the gradient of the output (None: of the loss).

        Returns the gradient of the input, None if that is not a floating-point tensor.
        """
        held = self._held.pop(microbatch)
        if is_split:
            with self.deferred.put_off(microbatch):
                torch.autograd.backward(held.output, gradient)
        else:
            torch.autograd.backward(held.output, gradient)
        return held.inputs.grad if self.index > 0 else None

    def weights(self, microbatch: int) -> None:
        """Runs W: what I has put off."""
        self.deferred.finish(microbatch)
