"""Sharded data parallelism: each rank keeps a part of the model's states, and has the rest while it computes with it.

    strategy           in part on each rank                   a step moves (P: bytes of the parameters)
    no_shard           nothing: the identity                  all_reduce of P
    shard_optimizer    optimizer states            (ZeRO-1)   reduce_scatter and all_gather of P
    shard_grad_op      and gradients               (ZeRO-2)   reduce_scatter and all_gather of P
    full_shard         and parameters              (ZeRO-3)   reduce_scatter and two all_gathers of P
    hybrid_shard       as full_shard, inside groups           the same inside them, all_reduce of parts between them

One path serves all: ``flat.py`` holds a unit's parameters, shard and gradients, ``passes.py`` says what happens when.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import CollectiveMismatchError, ConfigError, PycommError
from ...reducer.reduce import Wire, checked_compression, refuse, start_sum
from ...reducer.reducer import has_hooks
from ...sizes import whole_number
from .._agreement import Roster, check_same_model
from .._buffers import broadcast_tensors, make_equal
from .._inside import mark_engine
from .._names import keep_names
from ..clip import clip_grad_norm_
from .flat import FlatParameter, Layout
from .ledger import Ledger, MemoryStats
from .options import OFFLOADS, Precision, ranks_of, strategy_of
from .passes import Passes
from .state import States
from .unit import Unit
from .wrap import Found, Policy, find_units, materialize

__all__ = ["FullyShardedDataParallel", "fully_shard"]


class FullyShardedDataParallel(nn.Module):
    """Trains ``module`` with its states divided over the ranks of ``group``; after ``backward()`` gradients are means.

    Made by every rank, which must have built the same model (CollectiveMismatchError names the first parameter that
    differs, and the ranks); it starts from rank 0's parameters. Afterwards ``module.parameters()`` are what of them
    lies on this rank, 1-D: make the optimizer then. ``state_dict`` has the module's own names, see ``state.py``.

    - ``strategy``: "no_shard", "shard_optimizer", "shard_grad_op", "full_shard" or "hybrid_shard", for which ``group``
      is a Mesh of two axes, the inner of which shards, or a pair (replicas, shards).
    - ``wrap``: which modules inside are units of their own, gathered and freed together: a class or several, names, the
      least number of elements, or f(name, module) -> bool. None: the whole module is one unit.
    - ``reshard_after_forward``: free a unit's parameters after its forward pass, and gather them again for backward.
    - ``param_dtype``, ``reduce_dtype``: of computation, and of gradients on the wire; the shards keep their dtype.
    - ``offload``: keep in the host's memory "optimizer" states (and the shards that they are for, of which the device
      has a copy), or "parameters" too, which then are copied to the device when they are gathered.
    - ``compression``, ``gather_compression``: of gradients and of gathered parameters, as of ``pycomm.all_reduce``. All
      ranks compute with the same rounded parameters; the shards are not rounded.
    - ``buffers``: as for DistributedDataParallel.  ``find_unused_parameters``: likewise.
    - ``prefetch``: so many units are gathered ahead of the one that computes, where calls run beside it.
    - ``overlap``: gather and reduce on a CommStream while Python computes; None: where the wire leaves the host.
    - ``initialize``: called with each module whose parameters are on the meta device, once they have memory, such as
      ``lambda module: module.reset_parameters()``; unit by unit, so that no rank ever holds the whole model.
    - ``measures_activations``: count what autograd saves, too, for ``memory_stats()``.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        strategy: str = "full_shard",
        wrap: Policy = None,
        reshard_after_forward: bool = True,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: Literal["optimizer", "parameters"] | None = None,
        compression: Any = None,
        gather_compression: Any = None,
        buffers: Literal["broadcast", "average"] | None = "broadcast",
        find_unused_parameters: bool = False,
        prefetch: int = 1,
        overlap: bool | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        measures_activations: bool = False,
    ) -> None:
        super().__init__()
        chosen = strategy_of(strategy)
        _check_choices(chosen.shards_parameters, offload, buffers, prefetch)
        precision = Precision(param_dtype, reduce_dtype)
        precision.of(torch.float32)
        found = find_units(module, wrap)
        self.module = module
        self.buffers_mode = buffers
        self._ranks = ranks_of(chosen, group, compression, overlap)
        self._ledger = Ledger()
        gathered = checked_compression(gather_compression)
        layout = Layout(chosen, self._ranks, precision, gathered, offload, self._ledger)
        self._gathers = layout.gathers
        self._check_same_model(layout, initialize is not None)
        self.units = self._shard(found, layout, initialize)
        self._passes = Passes(
            self.units,
            layout,
            reshards_after_forward=reshard_after_forward and chosen.shards_parameters,
            prefetch=prefetch,
            finds_unused=find_unused_parameters,
            around=self._around_forward,
        )
        self._roster = Roster(module.named_parameters)
        self._measures_activations = measures_activations
        self._is_offloaded = offload is not None
        _watch_optimizers()
        _engines.add(self)
        self._states = States(module, self.units, self._ranks)
        keep_names(self)
        mark_engine(module, self)
        module.register_state_dict_pre_hook(self._end_passes)  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(partial(self._to_pieces))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self._from_pieces)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ConfigError, as copying a module in it does."""
        return self._passes.__reduce_ex__(protocol)

    @property
    def wires(self) -> Sequence[Wire]:
        """How gradients travel, as the engines around this one ask."""
        return [wire for wire in self._ranks if wire is not None]

    def abandon(self) -> None:
        """Forgets a pass that was ended in the middle, of which all ranks know. For engines around this one."""
        self._passes.abandon()

    def close(self) -> None:
        """Ends the stream on which calls run beside the computation, if there is one, and its threads; the module can
        be saved and not called any more.

        Called by every rank. A stream that is not closed lives as long as its group, also if the engine is dropped.
        """
        self._passes.reset()
        for wire in self.wires:
            if wire.stream is not None:
                wire.stream.close()

    # -- construction -------------------------------------------------------------------------------------------------

    def _check_same_model(self, layout: Layout, may_be_meta: bool) -> None:
        """Raises on every rank if one has another model, or one that does not fit, also if it is in another group."""
        error: PycommError | None = None
        for group in self._ranks.groups:
            try:
                named = list(self.module.named_parameters())
                check_same_model(named, group, "FullyShardedDataParallel", may_be_meta=may_be_meta)
                _check_hooks(named)
                layout.check_compression(named)
            except PycommError as found:
                error = error or found
            told = torch.tensor([error is not None], dtype=torch.int32, device=group.control_device)
            start_sum(Wire(group, is_async=False), told)
            if told.any() and error is None:
                error = CollectiveMismatchError(
                    "FullyShardedDataParallel: other ranks have a model that does not fit; they say which"
                )
        if error is not None:
            raise error

    def _shard(self, found: list[Found], layout: Layout, initialize: Callable[[nn.Module], None] | None) -> list[Unit]:
        """Makes the units, the inner ones first, each from rank 0's values."""
        units = []
        real = (p.device for p in self.module.parameters() if not p.is_meta)
        default = torch.get_default_device()
        device = next(real, torch.device("cpu") if default.type == "meta" else default)
        for index, each in reversed(list(enumerate(found))):
            if initialize is not None:
                each = materialize(each, initialize, device)
            for group in layout.ranks.groups:
                broadcast_tensors([p for _, p, _ in each.parameters], group)
            kinds: dict[Any, list[Any]] = {}
            for parameter in each.parameters:
                kinds.setdefault((parameter[1].dtype, parameter[1].device, parameter[1].requires_grad), []).append(
                    parameter
                )
            flats = [FlatParameter(named, layout) for named in kinds.values()]
            units.append(Unit(index, each.name, each.module, flats))
            units[-1].show(False)
        if not any(unit.trained for unit in units):
            raise ConfigError(
                "there is no parameter that requires a gradient: nothing to reduce; use the module as it is"
            )
        for group in layout.ranks.groups:
            broadcast_tensors(self.module.buffers(), group)
        return units[::-1]

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, whose hooks do the rest."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def _around_forward(self) -> Iterator[None]:
        is_communicating = torch.is_grad_enabled() and self.module.training and self._passes.is_enabled
        self._check_unchanged(is_communicating)
        if is_communicating and self._makes_buffers_equal:
            for group in self._ranks.groups:
                make_equal(self.module.buffers(), self.buffers_mode, group)
        self._passes.is_awaited |= is_communicating
        if not self._measures_activations:
            yield
            return
        with self._ledger.watch_activations(
            lambda address: any(flat.is_at(address) for unit in self.units for flat in unit.flats)
        ):
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate, unsharded; the next backward pass outside reduces the sums.

        Around forward and backward of all micro-batches but the last. Passes outside of it add up, too, in the shards:
        that takes less memory and more communication.
        """
        was, self._passes.is_enabled = self._passes.is_enabled, False
        try:
            yield
        finally:
            self._passes.is_enabled = was

    def sync_gradients(self) -> None:
        """Reduces the gradients that passes in ``no_sync`` have left. Called by every rank, outside of ``backward()``.

        Raises ConfigError, on every rank, if a parameter has none on one, unless ``find_unused_parameters``.
        """
        self._passes.reduce_now()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those too that passes in ``no_sync()`` have left unreduced.

        So does an optimizer's ``zero_grad()``, but for ``set_to_none=False``, which leaves the latter.
        """
        self._passes.reset()
        for unit in self.units:
            for flat in unit.trained:
                flat.drop()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients down to a 2-norm of at most ``max_norm`` over the whole model; returns the norm it was.

        Called by every rank; all get the same number. Raises ConfigError for parameters that are in pieces along other
        axes too, which ``pycomm.clip_grad_norm_`` takes.
        """
        shards = self._ranks.shards
        return clip_grad_norm_(self.module.parameters(), max_norm, shards=None if shards is None else shards.group)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Inside, the module has its full parameters, to be read. Entered by every rank, outside of training passes."""
        self._passes.reset()
        try:
            for unit in self.units:
                self._passes.gather(unit)
                unit.show(True)
            yield
        finally:
            for unit in self.units:
                unit.show(False)
                unit.free()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _to_pieces(self, _module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
        if not self._states.is_listing:
            named = self._states.sharded().items()
            state.update({prefix + name: each for name, each in named if prefix + name in state})

    def _end_passes(self, *_rest: Any) -> None:
        """After a backward pass that raised modules may still have their full parameters."""
        self._passes.reset()

    def _from_pieces(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        self._passes.reset()
        self._states.localize(state, prefix)

    def full_state_dict(self, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the module's state in whole tensors, on every rank or on ``rank`` alone, where others get {}.

        Called by every rank. ``load_state_dict`` takes it, here and in a module that is not sharded. (``state_dict()``
        is this rank's part, for torch.distributed.checkpoint.)
        """
        self._passes.reset()
        return self._states.full(rank)

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, *, full: bool = False, rank: int | None = None
    ) -> dict[str, Any]:
        """Returns the optimizer's state by parameter name: this rank's part of it, or with ``full`` all of it.

        The optimizer is left as it is. One that has not stepped has no state: with ``full`` an empty one, else zeros
        that torch.distributed.checkpoint can load into, with an entry "has_state" that says so. With ``full`` called by
        every rank; ``rank`` as for ``full_state_dict``.
        """
        if full:
            return self._states.optimizer_full(optimizer, rank)
        return self._states.optimizer_sharded(optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Loads what ``optimizer_state_dict`` returned, of either kind; full ones of any world and strategy.

        The groups of parameters may come in another order: they are told by their parameters' names. What was saved
        before the first step leaves the optimizer without state. Raises CheckpointError, and changes nothing, if the
        groups have other parameters, or if the state of one is missing or of another shape.
        """
        self._states.load_optimizer(optimizer, state)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory_stats(self) -> MemoryStats:
        """Returns this rank's bytes by class, now and at the peak since construction or ``reset_peak_memory_stats``.

        The optimizer's are known once it has stepped.
        """
        self._ledger.put("buffers", sum(buffer.nbytes for buffer in self.module.buffers()))
        return self._ledger.stats()

    def reset_peak_memory_stats(self) -> None:
        """From here on peaks are those of what follows."""
        self._ledger.reset_peaks()

    def count_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes down the bytes of the optimizer's state for this model's parameters. Called when one has stepped."""
        if not any(p in self._roster for group in optimizer.param_groups for p in group["params"]):
            return
        states = (state for p, state in optimizer.state.items() if p in self._roster)
        tensors = (each for state in states for each in state.values() if isinstance(each, torch.Tensor))
        self._ledger.put("optimizer", sum(each.nbytes for each in tensors), is_host=self._is_offloaded)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError for one that goes by all parameters together. Called when one is about to step."""
        if isinstance(optimizer, torch.optim.LBFGS) and self._ranks.parts > 1:
            if any(p in self._roster for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    "LBFGS: expected whole parameters, got shards: each rank would search along a direction, and for a "
                    "number of passes, of its own. Use strategy='no_shard' or DistributedDataParallel"
                )

    def _check_unchanged(self, is_communicating: bool) -> None:
        strays = [name for unit in self.units for flat in unit.flats for name in flat.strays()]
        change = self._roster.change()
        hooked = [
            slot.name for unit in self.units for flat in unit.flats for slot in flat.slots if has_hooks(slot.piece)
        ]
        if not strays and not change and not hooked:
            return
        wire = self._gathers or self._ranks.replicas
        if is_communicating and wire is not None:
            refuse(wire._replace(stream=None) if self._makes_buffers_equal else wire)  # what the others call first
        if strays:
            raise ConfigError(
                f"forward: parameters were given other memory, by module.to() or .data: {', '.join(strays[:8])}; "
                f"expected them in their shards. Move and cast a module before it is sharded; change values by copy_"
            )
        if hooked:
            raise _hooks_error("forward", hooked)
        raise ConfigError(
            f"forward: the module's parameters are not those that were sharded: {change}. Change a module before it "
            f"is sharded"
        )

    @property
    def _makes_buffers_equal(self) -> bool:
        """Not before a second forward pass in a row: autograd may yet need what the first one had."""
        if self._passes.is_awaited or self.buffers_mode is None:
            return False
        return next(self.module.buffers(), None) is not None


def fully_shard(module: nn.Module, group: Any = None, **options: Any) -> FullyShardedDataParallel:
    """Shards ``module`` in place: it can be called as before, and trains sharded.

    Returns the engine, which has ``no_sync``, ``clip_grad_norm_`` and the rest; arguments and errors are those of
    FullyShardedDataParallel.
    """
    return FullyShardedDataParallel(module, group, **options)


_engines: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Once for all engines, and for good: an engine may be collected in the middle of a step, while torch goes through
    its hooks.
    """
    register_optimizer_step_post_hook(_count_optimizer)
    register_optimizer_step_pre_hook(_check_optimizer)


def _count_optimizer(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for engine in list(_engines):
        engine.count_optimizer(optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for engine in list(_engines):
        engine.check_optimizer(optimizer)


def _check_hooks(named: list[tuple[str, nn.Parameter]]) -> None:
    hooked = [name for name, p in named if has_hooks(p)]
    if hooked:
        raise _hooks_error("FullyShardedDataParallel", hooked)


def _hooks_error(where: str, hooked: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{where}: expected parameters without hooks, got some with hooks of the gradient: "
        f"{', '.join(hooked[:8])}; modules compute with other tensors once they are sharded, so the hooks would "
        f"not run. Remove them, and change p.grad after backward(), or outputs by hooks of modules"
    )


def _check_choices(shards_parameters: bool, offload: Any, buffers: Any, prefetch: int) -> None:
    if offload not in OFFLOADS:
        raise ConfigError(f"offload: expected one of {OFFLOADS}, got {offload!r}")
    if offload == "parameters" and not shards_parameters:
        raise ConfigError(
            "offload='parameters': expected a strategy that shards parameters, for which only those in use are on the "
            "device; take full_shard or hybrid_shard, or offload='optimizer'"
        )
    if buffers not in ("broadcast", "average", None):
        raise ConfigError(f"buffers: expected 'broadcast', 'average' or None, got {buffers!r}")
    whole_number(prefetch, "prefetch", 0)
