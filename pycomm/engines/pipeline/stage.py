"""One stage on its rank: computes F, B, I and W of a microbatch, and keeps between them what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from .._inside import Averaging, engines_in
from .weights import Deferred, defer_linears

__all__ = ["Stage"]

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Held(NamedTuple):
    """A microbatch between its forward and backward pass."""

    inputs: torch.Tensor
    output: torch.Tensor | None  # of the last stage: the loss; None if it requires no gradient


class _Entry(torch.autograd.Function):
    """A stage's input as its layers see it: no leaf, so that the first of them may work in place as in one process.

    ``detach`` shares the count of changes: autograd still raises if they touch what the stage before has saved.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Stage:
    """The part ``module`` of the model, number ``index``; the last one also computes the loss."""

    def __init__(
        self, index: int, module: nn.Module, loss: LossFunction | None, *, is_split: bool, is_checkpointed: bool
    ) -> None:
        """``is_split``: the schedule has I and W for some microbatch of this stage."""
        self.index = index
        self.module = module
        self.deferred: Deferred = defer_linears(module, is_split)
        self._engines: list[Averaging] = engines_in(module) if is_split else []
        self.losses: list[torch.Tensor] = []
        self._loss = loss
        self._is_checkpointed = is_checkpointed
        self._held: dict[int, _Held] = {}
        self._device = next((each.device.type for each in module.parameters()), "cpu")

    def begin(self) -> None:
        """Called before a step: forgets what is left of one that raised."""
        self._held.clear()
        self.losses.clear()
        self.deferred.forget()

    @property
    def held(self) -> int:
        """The number of microbatches whose activations are held now."""
        return len(self._held)

    def forward(self, microbatch: int, inputs: torch.Tensor, target: torch.Tensor | None, share: float) -> torch.Tensor:
        """Runs F and returns the output, detached; the loss of a microbatch counts ``share``.

        Raises ConfigError for a loss that cannot be differentiated, unless gradients are off.
        """
        if self.index > 0:
            inputs = inputs.detach().requires_grad_(inputs.is_floating_point())
        if self._is_checkpointed and torch.is_grad_enabled():
            # Of a copy: what a layer changes in place would be changed already when it is computed again.
            output = checkpoint(lambda kept: self.module(kept.clone()), inputs, use_reentrant=False)
        else:
            output = self.module(_Entry.apply(inputs) if self.index > 0 else inputs)  # type: ignore[no-untyped-call]
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"Pipeline: the last layer of stage {self.index} returned a {type(output).__name__}, expected one "
                f"tensor, which the next stage or the loss is given; put a layer around it that returns one"
            )
        result: torch.Tensor = output.detach()
        if self._loss is not None and target is not None:
            loss = self._loss(output, target)
            if not isinstance(loss, torch.Tensor):
                raise ConfigError(f"Pipeline: loss: expected a function that returns a scalar tensor, got {loss!r}")
            output = loss * share
            if torch.is_grad_enabled() and not output.requires_grad:
                raise ConfigError(
                    f"Pipeline: the loss of stage {self.index} depends on nothing that requires a gradient, expected "
                    f"one that can be differentiated; is everything frozen, or a tensor detached on the way to it?"
                )
            self.losses.append(output.detach())
        if torch.is_grad_enabled():
            self._held[microbatch] = _Held(inputs, output if output.requires_grad else None)
        return result

    def backward(self, microbatch: int, gradient: torch.Tensor | None, is_split: bool) -> torch.Tensor | None:
        """Runs B, or I if ``is_split``, with the gradient of the output (None: of the loss).

        Returns the gradient of the input, zeros if the output does not depend on that; None from the first stage.
        """
        held = self._held.pop(microbatch)
        if held.output is not None:
            with self._outside_autocast(), self._unaveraged(), self.deferred.put_off(microbatch):
                torch.autograd.backward(held.output, gradient)
            if not is_split:
                self.weights(microbatch)
        if self.index == 0:
            return None
        return torch.zeros_like(held.inputs) if held.inputs.grad is None else held.inputs.grad

    def weights(self, microbatch: int) -> None:
        """Runs W: what I has put off."""
        with self._outside_autocast(), self._unaveraged():
            self.deferred.finish(microbatch)

    def sync_gradients(self) -> None:
        """Called at the end of a step: engines in the stage average what its backward passes, in parts, have left."""
        for engine in self._engines:
            engine.sync_gradients()

    @contextmanager
    def _unaveraged(self) -> Iterator[None]:
        """After I the weights' gradients are still to come, and W may be run after I of further microbatches."""
        with ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.no_sync())
            yield

    def _outside_autocast(self) -> torch.autocast:
        """Backward operators have the types of the forward ones, which autocast would change, around a whole step."""
        return torch.autocast(self._device, enabled=False)
