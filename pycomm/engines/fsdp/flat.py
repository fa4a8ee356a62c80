"""The parameters of a unit in one buffer: gathered while they are needed, otherwise a shard of it.

[Note: three tensors]
    full    (numel,)            what modules compute with; numel is padded to a multiple of the parts
    shard   (numel / parts,)    this rank's part, which the optimizer updates
    grad    (numel,)            gradients as they arrive; reduced, this rank's part of the mean

Where parameters are not sharded, and nothing is cast or offloaded, ``shard`` is this rank's part of ``full`` itself.

[Note: full and piece]
Each parameter of the model has two objects: ``full``, a view of the full buffer in the parameter's shape, which stands
in the modules while they run; and ``piece``, what of it lies in this rank's shard (1-D, perhaps empty; where there is
but one part, the whole in its own shape), which stands there at all other times, so that ``module.parameters()`` gives
an optimizer what it is to update. Freeing resizes the buffer's storage to nothing: what autograd saved for the backward
pass are views of that storage, and find their values in it once it has been gathered again. So do torch's FSDPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...reducer.bucket import allocate
from ...reducer.reduce import Named, Waitable, Wire, start_gather, start_mean, start_scatter_mean
from .._marks import forget_holders, mark_left, mark_shard
from .ledger import Kind, Ledger
from .options import Precision, Ranks, Strategy, state_name
from .wrap import Place

__all__ = ["FlatParameter", "Layout", "Slot"]

_ALIGNMENT = 16  # elements: shards start on a cache line


class Slot(NamedTuple):
    """A parameter in the flat buffer: elements ``start`` to ``stop``, of which this rank's shard has ``own``.

    ``own`` counts from the parameter's first element; ``kept`` is the same part counted from the shard's first.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    own: slice
    kept: slice
    full: nn.Parameter
    piece: nn.Parameter
    places: list[Place]


class Layout(NamedTuple):
    """How an engine lays its parameters out."""

    strategy: Strategy
    ranks: Ranks
    precision: Precision
    gather_compression: object
    offload: str | None
    ledger: Ledger

    @property
    def is_compressed(self) -> bool:
        """Whether something is on the wire, so that names matter."""
        return any(each is not None for each in (*(w.compression for w in self.ranks if w), self.gather_compression))

    @property
    def gathers(self) -> Wire | None:
        """How parameters travel; None where each rank has all."""
        shards = self.ranks.shards
        return None if shards is None else shards._replace(compression=self.gather_compression)

    def check_compression(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raises ConfigError if one of them, or the gradient of one, cannot be compressed as it is to be."""
        dtypes = [(name, each.requires_grad, self.precision.of(each.dtype)) for name, each in named]
        trained = [(name, on_the_wire) for name, is_trained, (_, on_the_wire) in dtypes if is_trained]
        for wire in self.ranks:
            if wire is not None:
                wire.check_means(trained, is_scattered=wire is self.ranks.shards)
        if self.gathers is not None:
            self.gathers.check_gathers((name, computed) for name, _, (computed, _) in dtypes)


class FlatParameter:
    """The ``named`` parameters of one unit: of one dtype, on one device, all trained or all frozen."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter, list[Place]]], layout: Layout) -> None:
        first = named[0][1]
        self.layout = layout
        self.dtype, self.device, self.is_trained = first.dtype, first.device, first.requires_grad
        self.full_dtype, self.reduce_dtype = layout.precision.of(first.dtype)
        self.is_offloaded = layout.offload is not None
        self.home = torch.device("cpu") if self.is_offloaded else first.device  # of what the optimizer sees
        total, parts = sum(p.numel() for _, p, _ in named), layout.ranks.parts
        self.name = (
            state_name([each for each, _, _ in named], total, layout.ranks.groups) if layout.is_compressed else ""
        )
        self.numel = -(-total // (parts * _ALIGNMENT)) * parts * _ALIGNMENT
        length = self.numel // parts
        self.own = slice(layout.ranks.own * length, (layout.ranks.own + 1) * length)
        self._is_aliased = (
            not layout.strategy.shards_parameters
            and self.full_dtype == self.dtype
            and not self.is_offloaded
            and layout.gather_compression is None
        )
        self._full = torch.zeros(self.numel, dtype=self.full_dtype, device=self.device)
        self._shard = self._full[self.own] if self._is_aliased else self._zeros(self.dtype, self.home)
        self._resident: torch.Tensor | None = None  # the shard on the device, if its home is elsewhere
        if layout.offload == "optimizer" and layout.strategy.shards_parameters:
            self._resident = self._zeros(self.full_dtype, self.device)
        self._is_cast = self.reduce_dtype != self.dtype  # between reduction and shard
        self._is_out_apart = layout.strategy.shards_gradients and (self._is_cast or self.is_offloaded)
        self.is_full = False  # whether the full buffer has the shards' values, but for later changes of these
        self._seen_version = -1  # of the shard, when it was gathered
        self._grad: torch.Tensor | None = None
        self._shard_grad: torch.Tensor | None = None
        self._out: torch.Tensor | None = None  # of a reduction, if it cannot be the shard's gradient itself
        self._result: torch.Tensor | None = None
        self._arrived: set[str] = set()  # parameters that have a gradient since the last reduction
        self._written = 0  # the version of the buffer of gradients when one arrived last
        self._kept: torch.Tensor | None = None  # what the gradients were before this reduction
        self.slots = list(self._lay_out(named))
        self._count_parameters()

    # -- layout -----------------------------------------------------------------------------------------------------

    def _lay_out(self, named: Sequence[tuple[str, nn.Parameter, list[Place]]]) -> Iterator[Slot]:
        start, is_whole = 0, self.layout.ranks.parts == 1
        for name, parameter, places in named:
            stop = start + parameter.numel()
            low, high = max(start, self.own.start), min(stop, self.own.stop)
            high = max(low, high)
            own = slice(low - start, high - start) if low < high else slice(0, 0)
            kept = slice(low - self.own.start, high - self.own.start) if low < high else slice(0, 0)
            part = self._shard.detach()[kept]  # shares the version that ``gather`` goes by
            part.copy_(parameter.detach().reshape(-1)[own])
            piece = nn.Parameter(part.view(parameter.shape) if is_whole else part, parameter.requires_grad)
            full = nn.Parameter(self._full.data[start:stop].view(parameter.shape), parameter.requires_grad)
            for each in (piece, full):
                each.__dict__.update(parameter.__dict__)
            forget_holders((piece, full))
            mark_shard(piece, self.layout.ranks.sharding, parameter.numel())
            mark_left(parameter)
            yield Slot(name, parameter.shape, start, stop, own, kept, full, piece, places)
            start = stop

    def show(self, is_full: bool) -> None:
        """Puts the full parameters into the modules, or the pieces."""
        for slot in self.slots:
            for place in slot.places:
                place.module._parameters[place.name] = slot.full if is_full else slot.piece

    def strays(self) -> Iterator[str]:
        """Yields the parameters whose pieces no longer lie in the shard, where gathering would not find them."""
        address = self._shard.untyped_storage().data_ptr()  # also of empty pieces: all ranks find out
        for slot in self.slots:
            if slot.piece.untyped_storage().data_ptr() != address:
                yield slot.name

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the full parameters have to be gathered before they are used. Alike on all ranks."""
        return not self.is_full or self._shard._version != self._seen_version

    def gather(self, wire: Wire | None) -> Waitable | None:
        """Starts to fill the full buffer; None if that is done on return."""
        version = self._shard._version
        if self._full.untyped_storage().nbytes() == 0:
            self._full.untyped_storage().resize_(self._full.nbytes)
            self._count("parameters", self._full.nbytes)
        source = self._source(version != self._seen_version, wire is not None)
        work = None if wire is None else start_gather(wire, self._full.data, source, self._gather_name)
        self.is_full, self._seen_version = True, version
        return work

    @property
    def _gather_name(self) -> str:
        """What is owed of a shard fits no other number of shards, nor what is owed of gradients."""
        return f"{self.name}:gather/{self.layout.ranks.parts}"

    def _source(self, is_stale: bool, is_gathered: bool) -> torch.Tensor:
        """Returns this rank's part as it is to be gathered: the shard if it can be, else a copy in its place."""
        shard, own = self._shard.data, self._full.data[self.own]
        if self._resident is not None:
            if is_stale:
                self._resident.copy_(shard)
            shard = self._resident
        is_here = not self.is_offloaded or self._resident is not None
        if is_here and is_gathered and shard.dtype == own.dtype:
            return shard
        if not self._is_aliased:
            own.copy_(shard)
        return own

    def is_at(self, address: int) -> bool:
        """Whether the full parameters are in the storage at ``address``."""
        return self._full.untyped_storage().data_ptr() == address

    def expire(self) -> None:
        """What was gathered is no longer what the shards are, though no version of a tensor may say so."""
        self._seen_version = -1

    def free(self) -> None:
        """Gives the full buffer's memory back, where parameters are sharded."""
        if self.layout.strategy.shards_parameters and self._full.untyped_storage().nbytes():
            self._full.untyped_storage().resize_(0)
            self._count("parameters", -self._full.nbytes)
            self.is_full = False

    # -- gradients --------------------------------------------------------------------------------------------------

    def has(self, slot: Slot) -> bool:
        """Whether a gradient of the parameter has arrived since the last reduction."""
        return slot.name in self._arrived

    def take(self, slot: Slot) -> None:
        """Adds the gradient that autograd left at ``slot`` to the buffer."""
        gradient = slot.full.grad
        assert gradient is not None, "called after it was accumulated"
        self._count("gradients", gradient.nbytes)
        if not self._arrived:
            self._keep_pieces()
        view = self._buffer()[slot.start : slot.stop].view(slot.shape)
        if self.has(slot):
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._arrived.add(slot.name)
        self._written = self._buffer()._version
        slot.full.grad = None
        self._count("gradients", -gradient.nbytes)

    def show_sums(self) -> None:
        """Called when gradients were left unreduced: their pieces get one, so that it shows if it is set to None."""
        for slot in self.slots:
            if self.has(slot) and slot.piece.grad is None:
                shown = (self._own_gradient() if self._is_apart else self._buffer()[self.own])[slot.kept]
                slot.piece.grad = (shown.zero_() if self._is_apart else shown).view_as(slot.piece)

    @property
    def _is_apart(self) -> bool:
        """Whether the pieces' gradients lie elsewhere than what has not been reduced."""
        return self._is_cast or self.is_offloaded or self.layout.strategy.shards_gradients

    def forget_dropped(self) -> None:
        """Forgets what an optimizer's zero_grad() has dropped since: unreduced sums whose pieces' gradients are None,
        or were set to zero where they lie; and gradients that were set aside.
        """
        for slot in self.slots:
            if not self.has(slot):
                continue
            is_zero = slot.piece.grad is not None and not slot.piece.grad.any()
            is_gone = slot.piece.grad is None or (
                is_zero and not self._is_apart and self._written != self._buffer()._version
            )
            if is_gone:
                self._arrived.discard(slot.name)
            if self._kept is not None and (is_gone or (is_zero and self._is_apart)):
                self._kept[slot.kept].zero_()
        if not self._arrived:
            self._let_go()

    def start_reduce(self) -> Waitable | None:
        """Starts to reduce what has arrived, zeros for what has not; None if that is done on return."""
        if not self._arrived:
            self._keep_pieces()
        buffer, ranks = self._buffer(), self.layout.ranks
        for slot in self.slots:
            if not self.has(slot):
                buffer[slot.start : slot.stop].zero_()
        if ranks.shards is None:
            self._out = buffer
            assert ranks.replicas is not None, "ranks are of one kind at least"
            keys = (ranks.replicas.group.compression.key_of(slot.name, slot.full) for slot in self.slots)
            views = (buffer[slot.start : slot.stop].view(slot.shape) for slot in self.slots)
            return start_mean(ranks.replicas, buffer, [Named(*each) for each in zip(keys, views)])
        if not self.layout.strategy.shards_gradients:
            self._out = buffer[self.own]
        elif self._is_out_apart:
            self._out = self._zeros(self.reduce_dtype, self.device)
            self._count("gradients", self._out.nbytes)
        else:
            self._out = self._own_gradient()
        return start_scatter_mean(ranks.shards, buffer, self._out, self.name, ranks.replicas)

    def finish_reduce(self) -> None:
        """Called once the reduction is complete: brings its result to where it belongs, and frees the buffer."""
        assert self._out is not None, "a reduction was started"
        if self._is_cast or self.is_offloaded:
            self._result = self._own_gradient()
            self._result.copy_(self._out)
        else:
            self._result = self._out
        if self._kept is not None:
            self._result.add_(self._kept)
        self._let_go()

    def came_for(self, slot: Slot) -> bool:
        """Whether the reduction left anything for this rank's part of a parameter: a gradient, or what was owed."""
        assert self._result is not None, "a reduction was finished"
        return bool(self._result[slot.kept].any())

    def hand_out(self, is_used: Sequence[bool] | None = None) -> None:
        """Gives the pieces their gradients; not those outside ``is_used`` that had none."""
        assert self._result is not None, "a reduction was finished"
        for index, slot in enumerate(self.slots):
            if is_used is None or is_used[index] or slot.piece.grad is not None:
                slot.piece.grad = self._result[slot.kept].view_as(slot.piece)
        self._result = None

    def drop(self) -> None:
        """Forgets what has arrived; the pieces have the gradients that they had before."""
        for slot in self.slots:
            if self._kept is not None and slot.piece.grad is not None:
                slot.piece.grad.copy_(self._kept[slot.kept].view_as(slot.piece))
        self._let_go()
        for slot in self.slots:
            slot.full.grad = None

    def _let_go(self) -> None:
        """Frees what a reduction needed, and the buffer of gradients where these are sharded."""
        if self._out is not None and self._is_out_apart:
            self._count("gradients", -self._out.nbytes)
        if self._kept is not None:
            self._count("gradients", -self._kept.nbytes, is_host=self.is_offloaded)
        if self.layout.strategy.shards_gradients and self._grad is not None:
            self._count("gradients", -self._grad.nbytes)
            self._grad = None
        self._out = self._kept = None
        self._arrived.clear()

    def _buffer(self) -> torch.Tensor:
        """Returns the buffer of unreduced gradients. What is padding stays zero."""
        if self._grad is None:
            wire = self.layout.ranks.shards or self.layout.ranks.replicas
            assert wire is not None, "ranks are of one kind at least"
            self._grad = allocate(self.numel, self.reduce_dtype, self.device, wire.group)
            self._grad[self.slots[-1].stop :].zero_()
            self._count("gradients", self._grad.nbytes)
        return self._grad

    def _own_gradient(self) -> torch.Tensor:
        if self._shard_grad is None:
            self._shard_grad = self._zeros(self.dtype, self.home)
            self._count("gradients", self._shard_grad.nbytes, is_host=self.is_offloaded)
        return self._shard_grad

    def _keep_pieces(self) -> None:
        """Sets aside gradients that are to grow: the reduction writes where they lie."""
        if all(slot.piece.grad is None for slot in self.slots):
            return
        self._kept = self._zeros(self.dtype, self.home)
        self._count("gradients", self._kept.nbytes, is_host=self.is_offloaded)
        for slot in self.slots:
            if slot.piece.grad is not None:
                self._kept[slot.kept].copy_(slot.piece.grad.reshape(-1))

    # -- books ------------------------------------------------------------------------------------------------------

    def _zeros(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer of a shard's length."""
        return torch.zeros(self.own.stop - self.own.start, dtype=dtype, device=device)

    def _count_parameters(self) -> None:
        """What stays: full parameters that are not sharded, the shards, and their copies on the device."""
        if self.layout.strategy.shards_parameters:
            self._full.untyped_storage().resize_(0)
        else:
            self._count("parameters", self._full.nbytes)
        if not self._is_aliased:
            self._count("parameters", self._shard.nbytes, is_host=self.is_offloaded)
        if self._resident is not None:
            self._count("parameters", self._resident.nbytes)

    def _count(self, kind: Kind, nbytes: int, *, is_host: bool = False) -> None:
        self.layout.ledger.add(kind, nbytes, is_host=is_host)
