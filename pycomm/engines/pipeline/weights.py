"""The backward pass of a linear layer in two parts: the input's gradient now, the weight's later.

[Note: deferred weight gradients]
Autograd computes both at once. Where a schedule has I and W, a stage's ``nn.Linear`` layers compute the gradient of
their input alone and leave what the weight's needs to a ``Deferred``, so that W(m) can run later. Layers of other kinds
(norms, embeddings, convolutions) have their weights' gradients in I(m): they are correct and less is put off. That is
how the authors of Zero Bubble do it (sail-sg/zero-bubble-pipeline-parallelism, WeightGradStore).
The weight is not part of the graph then: W(m) gives autograd the weight's gradient as that of a graph of its own, whose
end adds it to ``.grad`` and runs the hooks on the weight. A run of ``autograd.grad``, such as for forces or a gradient
penalty inside a layer's forward function, leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...reducer.graph import accumulates

__all__ = ["Deferred", "defer_linears"]


class _Parameters(NamedTuple):
    """What a layer computed with. Once an engine has freed what it gathered, the layer itself has other tensors."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class _Kept(NamedTuple):
    """What the gradients of a layer are made of: ``inputs (..., in)`` and ``gradient (..., out)``, of one dtype.

    ``inputs`` are None if the weight is frozen.
    """

    parameters: _Parameters
    inputs: torch.Tensor | None
    gradient: torch.Tensor

    def add_gradients(self) -> None:
        """Adds the gradients of the weight ``(out, in)`` and the bias ``(out,)`` to ``.grad``, where one is trained."""
        rows = self.gradient.reshape(-1, self.gradient.shape[-1])
        (weight, bias), trained, gradients = self.parameters, [], []
        with torch.no_grad():
            if self.inputs is not None:
                trained.append(weight)
                gradients.append(rows.T @ self.inputs.reshape(-1, self.inputs.shape[-1]))
            if bias is not None and bias.requires_grad:
                trained.append(bias)
                gradients.append(rows.sum(0))
        torch.autograd.backward(trained, gradients)


class Deferred:
    """What the linear layers of one stage have put off, for each microbatch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[_Kept]] = {}
        self._open: list[_Kept] | None = None

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
        for kept in self._kept.pop(microbatch, ()):
            kept.add_gradients()

    def forget(self) -> None:
        """Drops what was put off and never finished."""
        self._kept.clear()

    def take(self, kept: _Kept) -> None:
        """Keeps ``kept`` for ``finish``; outside ``put_off``, where somebody else uses the layer, adds it at once."""
        if self._open is None:
            kept.add_gradients()
        else:
            self._open.append(kept)


def defer_linears(module: nn.Module, is_split: bool) -> Deferred:
    """Lets the linear layers of ``module`` put their weights' gradients off, to what is returned, if ``is_split``.

    Left to autograd are layers whose weight or bias is computed (pruned, or with a norm of its own) or a tensor of
    another kind, and those whose forward function somebody has replaced.
    """
    deferred = Deferred()
    for layer in module.modules():
        if isinstance(vars(layer).get("forward"), _Forward):
            del layer.forward  # an earlier pipeline's
        if is_split and type(layer) is nn.Linear and _is_plain(layer):
            layer.forward = _Forward(layer, deferred)  # type: ignore[method-assign, assignment]
    return deferred


def _is_plain(layer: nn.Linear) -> bool:
    tensors = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return "forward" not in vars(layer) and all(type(each) is nn.Parameter for each in tensors)


class _Forward:
    """The forward function of a linear layer whose weight gradient is put off."""

    def __init__(self, layer: nn.Linear, deferred: Deferred) -> None:
        self._layer, self._deferred = layer, deferred

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = used = _Parameters(self._layer.weight, self._layer.bias)
        is_trained = any(each is not None and each.requires_grad for each in used)
        if not (is_trained and torch.is_grad_enabled()):
            return functional.linear(inputs, weight, bias)
        # The output has to require a gradient also where the input does not.
        mark = torch.empty(0, dtype=weight.dtype, device=weight.device, requires_grad=True)
        result: torch.Tensor = _Linear.apply(inputs, mark, used, self._deferred)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, mark: torch.Tensor, used: _Parameters, deferred: Deferred) -> Any:
        device = inputs.device.type
        # Autocast's cache would give the weight's copy that is made here, without a graph, to others that use it.
        is_cast = torch.is_autocast_enabled(device)
        with torch.autocast(device, cache_enabled=False) if is_cast else nullcontext():
            output = functional.linear(inputs, *used)
        ctx.save_for_backward(inputs.to(output.dtype) if used.weight.requires_grad else None)
        ctx.used, ctx.deferred = used, deferred
        return output.detach()  # linear's own may be a view, as which the next layer could not change it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        if accumulates(ctx.next_functions[1:2]):  # into the mark, so into the weights
            ctx.deferred.take(_Kept(ctx.used, inputs, gradient))
        of_inputs = gradient @ ctx.used.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_inputs, None, None, None
