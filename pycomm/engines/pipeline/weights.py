"""The backward pass of a linear layer in two parts: the input's gradient now, the weight's later.

[Note: deferred weight gradients]
Autograd computes both at once. While a stage's backward pass runs with a ``Deferred`` open, its ``nn.Linear`` layers
compute the gradient of their input alone and leave what the weight's needs, so that W(m) can run later. Layers of
other kinds (norms, embeddings, convolutions) have their weights' gradients in I(m): they are correct and less is put
off. That is how the authors of Zero Bubble do it (sail-sg/zero-bubble-pipeline-parallelism, WeightGradStore).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Deferred", "defer_linears"]


class Deferred:
    """What the linear layers of one stage have put off, for each microbatch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[nn.Linear, torch.Tensor, torch.Tensor]]] = {}
        self._open: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] | None = None

    @contextmanager
    def put_off(self, microbatch: int) -> Iterator[None]:
        """Inside, backward passes leave the weights' gradients for ``finish(microbatch)``."""
        self._open = self._kept.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._open = None

    def finish(self, microbatch: int) -> None:
        """Adds the weights' gradients of ``microbatch`` to ``.grad``."""
        for layer, inputs, gradient in self._kept.pop(microbatch, ()):
            _add_weight_gradients(layer, inputs, gradient)

    def takes(self, layer: nn.Linear, inputs: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Keeps ``inputs (..., in)`` and ``gradient (..., out)`` if the weights' gradients are put off now."""
        if self._open is None:
            return False
        self._open.append((layer, inputs, gradient))
        return True


def defer_linears(module: nn.Module) -> Deferred:
    """Lets the linear layers of ``module`` put their weights' gradients off; returns what they put them off to."""
    deferred = Deferred()
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = _Forward(layer, deferred)  # type: ignore[method-assign, assignment]
    return deferred


class _Forward:
    """The forward function of a linear layer whose weight gradient can be put off."""

    def __init__(self, layer: nn.Linear, deferred: Deferred) -> None:
        self._layer, self._deferred = layer, deferred

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(inputs, self._layer.weight, self._layer.bias)
        # The weight is an argument so that the output requires a gradient also where the input does not.
        result: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            inputs, self._layer.weight, self._layer, self._deferred
        )
        return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: nn.Linear, deferred: Deferred) -> Any:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.deferred = layer, deferred
        return functional.linear(inputs, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        if not ctx.deferred.takes(ctx.layer, inputs, gradient):
            _add_weight_gradients(ctx.layer, inputs, gradient)
        return (gradient @ ctx.layer.weight if ctx.needs_input_grad[0] else None), None, None, None


def _add_weight_gradients(layer: nn.Linear, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds what ``inputs (..., in)`` and ``gradient (..., out)`` give for weight ``(out, in)`` and bias ``(out,)``."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    with torch.no_grad():
        if layer.weight.requires_grad:
            _add(layer.weight, rows.T @ inputs.reshape(-1, inputs.shape[-1]))
        if layer.bias is not None and layer.bias.requires_grad:
            _add(layer.bias, rows.sum(0))


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
