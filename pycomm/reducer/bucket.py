"""A bucket: parameters whose gradients are reduced together, and the flat buffer they lie in.

[Note: gradients are views]
After its bucket was gathered, a parameter's ``.grad`` is a view of the bucket's ``flat``: the reduced values are there
without a copy out, and a later backward pass that accumulates into it needs no copy in. On transports with memory that
the ranks share, ``flat`` lies in it, so that reducing does not stage it either: the copy of a fresh gradient into the
bucket is the copy into shared memory.

A view lies as its parameter does, such as with the channels last: torch's fused optimizers go through both by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import pycomm

from ..errors import ConfigError
from ..ops.pack import pack_

__all__ = ["Bucket", "Entry", "allocate", "memory_order"]

_PACKED = (torch.float32, torch.float16, torch.bfloat16)


class Entry(NamedTuple):
    """A parameter in a bucket: its ``number`` and ``name`` in the module, and its part of the flat buffer."""

    number: int
    name: str
    parameter: torch.nn.Parameter
    view: torch.Tensor


class Bucket:
    """The ``entries`` that are reduced together and their buffer ``flat (numel,)``; ``index`` counts the buckets."""

    def __init__(self, index: int, named: Sequence[tuple[int, str, torch.nn.Parameter]], group: pycomm.Group) -> None:
        """``named`` has number, name and parameter; all of one dtype, on one device."""
        self.index = index
        parameters = [parameter for _, _, parameter in named]
        numels = [parameter.numel() for parameter in parameters]
        self.flat = allocate(sum(numels), parameters[0].dtype, parameters[0].device, group)
        self._orders = [memory_order(parameter) for parameter in parameters]
        self._parts = [_laid_out_as(p, part) for p, part in zip(parameters, torch.split(self.flat, numels))]
        self._addresses = [part.data_ptr() for part in self._parts]
        self.entries = [Entry(*each, part.detach()) for each, part in zip(named, self._parts)]
        self.pending = len(self.entries)
        self._kind = _kind(self.flat)  # that of gradients which can lie in it
        self._is_packed = self.flat.is_cpu and self.flat.dtype in _PACKED

    def gather(self) -> None:
        """Brings every gradient into ``flat`` and makes it a view of it; a parameter without one counts as zeros.

        Raises ConfigError, naming the parameter, for a gradient that cannot be brought there.
        """
        self._bring_back_views()
        fresh = []
        for entry, order in zip(self.entries, self._orders):
            gradient = entry.parameter.grad
            if gradient is None:
                entry.view.zero_()
            elif gradient is not entry.view:
                if _kind(gradient) != self._kind:
                    raise self._misfit(entry.name, gradient)
                fresh.append((entry, gradient, order))
        if len(fresh) == len(self.entries) and self._is_packed and not any(each.is_neg() for _, each, _ in fresh):
            pack_(self.flat, [each if order == sorted(order) else each.permute(order) for _, each, order in fresh])
        else:
            for entry, gradient, _ in fresh:
                entry.view.copy_(gradient)
        for entry, _, _ in fresh:
            entry.parameter.grad = entry.view

    def _bring_back_views(self) -> None:
        """``module.to()`` gives gradients other memory, there and back again, and their objects stay."""
        for entry, part, address in zip(self.entries, self._parts, self._addresses):
            if entry.view.data_ptr() != address:
                part.copy_(entry.view)
                entry.view.data = part

    def _misfit(self, name: str, gradient: torch.Tensor) -> ConfigError:
        if gradient.layout is not torch.strided:
            found, advice = f"is {gradient.layout}", "make the layer dense, such as Embedding(sparse=False)"
        elif gradient.requires_grad:
            found = "has a graph of its own, by backward(create_graph=True)"
            advice = "differentiate twice with torch.autograd.grad(..., create_graph=True), and call backward() once"
        else:
            found, advice = f"is {gradient.dtype} on {gradient.device}", "cast and move a module before it is wrapped"
        return ConfigError(
            f"backward: the gradient of parameter {name!r} {found}, expected a dense one of {self.flat.dtype} on "
            f"{self.flat.device} with no graph: gradients are reduced in one buffer; {advice}"
        )

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that there are: ``flat`` where all are views of it, else each by itself."""
        gradients = [entry.parameter.grad for entry in self.entries]
        if all(gradient is entry.view for gradient, entry in zip(gradients, self.entries)):
            return [self.flat]
        return [gradient for gradient in gradients if gradient is not None]


def _kind(tensor: torch.Tensor) -> tuple[torch.layout, bool, torch.dtype, torch.device]:
    return tensor.layout, tensor.requires_grad, tensor.dtype, tensor.device


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions in the order in which elements lie in memory; if they lie with gaps, as they stand."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    lies_so = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
    return order if lies_so else list(range(tensor.dim()))


def _laid_out_as(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns ``part (numel,)`` in the shape of ``parameter``, and with its strides if it has no gaps."""
    if parameter.permute(memory_order(parameter)).is_contiguous():
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


def allocate(numel: int, dtype: torch.dtype, device: torch.device, group: pycomm.Group) -> torch.Tensor:
    """Returns an uninitialized buffer ``(numel,)``, in memory that the ranks share if they have some."""
    if device.type == "cpu" and hasattr(group.transport, "allocate"):
        return pycomm.empty(numel, dtype=dtype, shared=True, group=group)
    return torch.empty(numel, dtype=dtype, device=device)
