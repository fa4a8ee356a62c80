"""THE path of a gradient over the wire. No other file of the engines communicates gradients.

    flat (numel,) on each rank  ->  its mean over the ranks, in place            ``start_mean``
    tensor on each rank         ->  its sum over the ranks, in place             ``start_sum``

The division by the number of ranks happens here (op AVG) and nowhere else. Everything a rank must know to take part
follows from the sizes: none asks another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

import pycomm

__all__ = ["Named", "Waitable", "Wire", "start_mean", "start_sum"]


class Waitable(Protocol):
    """What is under way: ``pycomm.Work``, or several of them."""

    def wait(self) -> object:
        """Blocks until it is complete; raises its error."""


class Named(NamedTuple):
    """A part of a flat buffer, and the name by which compressors keep state for it."""

    name: str
    view: torch.Tensor


class Wire(NamedTuple):
    """How gradients travel: the ``group``, ``compression=`` of its calls, and whether they run while Python goes on."""

    group: pycomm.Group
    compression: Any = None
    is_async: bool = True

    @classmethod
    def of(cls, group: pycomm.Group, compression: Any = None, overlap: bool | None = None) -> Wire:
        """Returns the wire of ``group``; without ``overlap`` given, asynchronous where it leaves the host.

        Inside a host to reduce is work for the cores and the memory that backward uses: there is nothing to hide it
        behind, and a second thread a rank would only take turns with the first.
        """
        is_async = group.transport.name not in ("shm", "local") if overlap is None else overlap
        return cls(group, compression, is_async and group.world_size > 1)


def start_mean(wire: Wire, flat: torch.Tensor, parts: Sequence[Named]) -> Waitable | None:
    """Starts to replace ``flat (numel,)`` by its mean over the ranks; None if that is done on return.

    ``flat`` and its ``parts`` are in use until ``wait()``. Uncompressed, the buffer travels as it is; a compressor is
    told the parts, because it may go by their shapes and keeps its state by their names.
    """
    average = pycomm.ReduceOp.AVG
    if wire.compression is None:
        return pycomm.all_reduce(flat, average, wire.group, wire.is_async)
    with pycomm.coalescing(wire.group, async_op=wire.is_async) as calls:
        for part in parts:
            pycomm.all_reduce(part.view, average, wire.group, compression=wire.compression, name=part.name)
    return calls if wire.is_async else None


def start_sum(wire: Wire, tensor: torch.Tensor) -> Waitable | None:
    """Starts to replace ``tensor`` by its sum over the ranks: the parts of one gradient that arose on several ranks.

    None if that is done on return.
    """
    return pycomm.all_reduce(tensor, pycomm.ReduceOp.SUM, wire.group, wire.is_async)
