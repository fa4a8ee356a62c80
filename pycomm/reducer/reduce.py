"""THE path of a gradient over the wire. No other file of the engines communicates gradients.

    flat (numel,) on each rank  ->  its mean over the ranks, in place            ``start_mean``
    flat (numel,) on each rank  ->  this rank's part of the mean                 ``start_scatter_mean``
    tensor on each rank         ->  its sum over the ranks, in place             ``start_sum``

And back: every rank's part of the parameters -> all of them, on all ranks       ``start_gather``
A rank that cannot make the step lets the others know                            ``refuse``

The division by the number of ranks happens here (op AVG) and nowhere else. Everything a rank must know to take part
follows from the sizes: none asks another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

import pycomm

from ..errors import CollectiveMismatchError

__all__ = [
    "Named",
    "Waitable",
    "Wire",
    "checked_compression",
    "make",
    "refuse",
    "start_gather",
    "start_mean",
    "start_scatter_mean",
    "start_sum",
]

_URGENT = 1  # parameters are waited for by the next layer, gradients by the optimizer


class Waitable(Protocol):
    """What is under way: ``pycomm.Work``, or several of them."""

    def wait(self) -> object:
        """Blocks until it is complete; raises its error."""


class Named(NamedTuple):
    """A part of a flat buffer, and the name by which compressors keep state for it."""

    name: str
    view: torch.Tensor


def checked_compression(compression: Any) -> Any:
    """Returns ``compression`` as calls take it, None for none. Raises ConfigError unless it is one."""
    return None if compression is None or compression == "none" else pycomm.compression.checked_spec(compression)


class Wire(NamedTuple):
    """How gradients travel: the ``group``, ``compression=`` of its calls, and whether they run while Python goes on.

    With a ``stream`` what is scattered and gathered runs there (``lane``), parameters before gradients.
    """

    group: pycomm.Group
    compression: Any = None
    is_async: bool = True
    stream: pycomm.CommStream | None = None

    @classmethod
    def of(cls, group: pycomm.Group, compression: Any = None, overlap: bool | None = None) -> Wire:
        """Returns the wire of ``group``; without ``overlap`` given, asynchronous where it leaves the host.

        Raises ConfigError unless ``compression`` is one.

        Inside a host to reduce is work for the cores and the memory that backward uses: there is nothing to hide it
        behind, and a second thread a rank would only take turns with the first.
        """
        is_async = group.transport.name not in ("shm", "local") if overlap is None else overlap
        return cls(group, checked_compression(compression), is_async and group.world_size > 1)

    @property
    def lane(self) -> pycomm.CommStream | None:
        """The stream if calls go there; compressed ones do not, as compressors have their state in a group."""
        return self.stream if self.compression is None else None

    def check_means(self, named: Iterable[tuple[str, torch.dtype]], is_scattered: bool = False) -> None:
        """Raises ConfigError if the gradient of a parameter of such a name and dtype cannot be compressed so;
        ``is_scattered``: it is on its way to a part for each rank.
        """
        if self.compression is not None:
            verb = "reduce_scatter_single" if is_scattered else "all_reduce"
            self.group.compression.check(verb, pycomm.ReduceOp.AVG, named, self.compression)

    def check_gathers(self, named: Iterable[tuple[str, torch.dtype]]) -> None:
        """Raises ConfigError if a parameter of such a name and dtype cannot be compressed so."""
        if self.compression is not None:
            self.group.compression.check("all_gather_single", None, named, self.compression)


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


def start_scatter_mean(
    wire: Wire, flat: torch.Tensor, shard: torch.Tensor, name: str, across: Wire | None = None
) -> Waitable | None:
    """Starts to fill ``shard (numel / world_size,)`` with this rank's part of the mean of ``flat (numel,)``.

    With ``across`` the mean is one over the ranks that hold the same part, too. ``shard`` may be this rank's part of
    ``flat``; both are in use until ``wait()``. None if it is done on return. Compressors keep their state by ``name``.
    """

    def scatter(group: pycomm.Group, **options: Any) -> pycomm.Work | None:
        return pycomm.reduce_scatter_single(shard, flat, pycomm.ReduceOp.AVG, group, **options)

    def go_across() -> Waitable | None:
        return None if across is None else start_mean(across, shard, [Named(f"{name}:across", shard)])

    scattered = _start(wire, scatter, name, 0, (flat, shard))
    if scattered is None:
        return go_across()
    return scattered if across is None else _Then(scattered, go_across)


def start_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor, name: str) -> Waitable | None:
    """Starts to fill ``full (world_size * numel,)`` with the ranks' ``shard (numel,)`` of parameters, in rank order.

    ``shard`` may be this rank's part of ``full``; both are in use until ``wait()``. None if it is done on return.
    """

    def gather(group: pycomm.Group, **options: Any) -> pycomm.Work | None:
        return pycomm.all_gather_single(full, shard, group, **options)

    return _start(wire, gather, name, _URGENT, (full, shard))


def refuse(wire: Wire) -> None:
    """Makes a call that fits none of the others', whose own then raises, where it would wait for this rank.

    For a rank that is about to raise. Returns once the others have come; if all of them refuse, at once.
    """
    with contextlib.suppress(CollectiveMismatchError):
        make(pycomm.barrier, wire)


def make(call: Callable[[pycomm.Group], object], wire: Wire) -> None:
    """Makes ``call(group)`` where those go that scatter and gather, in its turn."""
    if wire.lane is None:
        call(wire.group)
    else:
        wire.lane.submit(call).wait()


def _start(
    wire: Wire, call: Callable[..., pycomm.Work | None], name: str, priority: int, hold: tuple[torch.Tensor, ...]
) -> Waitable | None:
    """Starts the call on the wire's stream, or in its group."""
    if wire.lane is not None:
        return wire.lane.submit(call, priority=priority, hold=hold, nbytes=hold[0].nbytes)
    options = {} if wire.compression is None else {"compression": wire.compression, "name": name}
    return call(wire.group, async_op=wire.is_async, **options)


class _Then:
    """Something under way, and what is started once it is complete: when it is waited for, so in the caller's order."""

    def __init__(self, first: Waitable, start: Callable[[], Waitable | None]) -> None:
        self._first, self._start = first, start

    def wait(self) -> None:
        """Waits for both."""
        self._first.wait()
        second = self._start()
        if second is not None:
            second.wait()
