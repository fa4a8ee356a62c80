"""What happens when: hooks around the units' forward passes, and what follows from gradients as they arrive.

    before forward     its parameters are gathered; those of the units that come next are on their way
    after forward      they are freed, where parameters are sharded; not the outermost unit's, needed again at once
    before backward    the units behind it are freed; its parameters are gathered again, when a gradient reaches one of
                       its outputs; the unit before it is on its way. Its modules have them then, as checkpoints
                       inside it compute again
    gradients arrive   the last one of a unit starts the reduction
    end of backward    what is missing counts as zeros; all reductions are waited for; the ranks compare notes

[Note: when a unit's backward pass is over]
Its last gradient does not tell: a frozen or detached weight may yet be needed for the gradient of an input. But
autograd runs what ran last first, so when a gradient reaches an output of a unit, units that ran after it are through.
A pass with create_graph=True is followed by one that differentiates what it computed, at nodes that no output of a unit
leads to. So nothing is freed from the one to the end of the other. A run of autograd.grad in the middle of a forward
pass (forces, penalties) reduces nothing, and leaves their parameters to the units that it is inside of.

[Note: one order on every rank]
Reductions are started in the reverse of the order in which rank 0 ran the units forward, whatever order they finish in;
and the order of all gathers and reductions is hashed. At the end of a backward pass the ranks compare the hashes with
one small all_reduce, which also says whether a rank had parameters without a gradient. So ranks that run different
units get an error before an optimizer steps, also if all shapes fit.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map_only

import pycomm

from ...errors import CollectiveMismatchError, ConfigError
from ...reducer.graph import Edges, accumulates
from ...reducer.reduce import make
from ...reducer.reducer import lacks_gradients
from .flat import FlatParameter, Layout, Slot
from .unit import Unit

__all__ = ["Passes"]

_NAMED = 8  # of the parameters that an error names


class Passes:
    """Runs the ``units`` of a model; ``around()`` gives the context of a forward pass of the whole."""

    def __init__(
        self,
        units: Sequence[Unit],
        layout: Layout,
        *,
        reshards_after_forward: bool,
        prefetch: int,
        finds_unused: bool,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.units = units
        self.is_enabled = True  # False: gradients only accumulate
        self._layout = layout
        shards = layout.ranks.shards
        self._gathers = layout.gathers
        self._reshards = reshards_after_forward
        self._prefetch = prefetch if shards is not None and shards.stream is not None else 0
        self._most_under_way = 1 + self._prefetch if layout.strategy.shards_gradients else len(units)
        self._finds_unused = finds_unused
        self._around = around
        self._context: AbstractContextManager[Any] = nullcontext()
        self._order = list(range(len(units)))  # in which the units run forward: this rank's
        self._agreed_order = self._order  # and that of rank 0 in the first pass: reductions go by its reverse
        self._has_agreed = False
        self._running: list[int] = []  # the units of this forward pass
        self._entered: list[int] = []  # those that it is inside of
        self._clock = 0  # counts starts and ends of units
        self._had_gradients = True  # the last pass
        self.is_awaited = False  # a backward pass that reduces, since a forward pass
        self._is_backward = False
        self._end: Callable[[], Any] = lambda: None  # what ends the backward pass, a weak reference
        self._accumulates = False  # this pass, as backward() does; False for autograd.grad
        self._has_graph = False  # this pass, or one of autograd.grad before it, which backward() then differentiates
        self._keeps = False  # what is gathered, until the end of this pass
        self._next = 0  # of the reversed order: the unit to reduce next
        self._reducing: list[Unit] = []
        self._missing: dict[str, bool] = {}  # of the reduced parameters: whether this rank had no gradient
        self._hash = 0
        for unit in units:
            unit.module.register_forward_pre_hook(
                partial(self._before_forward, unit.index), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(
                partial(self._after_forward, unit.index), always_call=True, with_kwargs=True
            )
            for f, flat in enumerate(unit.trained):
                for s, slot in enumerate(flat.slots):
                    # By numbers: the collector of cycles does not see what a hook of a tensor holds.
                    arrived = partial(_tell_arrived, weakref.ref(self), unit.index, f, s)
                    slot.full.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """The modules' hooks hold this, so it is asked when one of them is copied or pickled."""
        raise ConfigError(
            "copy.deepcopy and pickle: expected a module that is not sharded; this one's ranks have it in parts, by "
            "groups that cannot be copied. Copy it before it is sharded, or load its full_state_dict() into another one"
        )

    # -- forward ----------------------------------------------------------------------------------------------------

    def _before_forward(self, index: int, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the inputs in the dtype that is computed with, or None to leave them."""
        unit = self.units[index]
        is_first_time = not _is_inside_backward()  # else it is computed again for a checkpoint
        if index == 0 and is_first_time:
            self._running, self._entered = [], []
            self.reset()
            self._expire_after_other_passes()
            self._context = self._around()
            self._context.__enter__()
        self._start_gather(unit)
        if is_first_time:
            if index not in self._running:
                unit.start = self._tick()
            self._running.append(index)
            self._entered.append(index)
            self._look_ahead(self._order, index)
        unit.wait_gathered()
        unit.show(True)
        if self._layout.precision.param_dtype is None:
            return None
        return tree_map_only(torch.Tensor, self._cast, (args, kwargs))

    def _expire_after_other_passes(self) -> None:
        """Between training and evaluation values may change by ``p.data``, which no version tells: gathers afresh."""
        if torch.is_grad_enabled() != self._had_gradients:
            self._had_gradients = torch.is_grad_enabled()
            for flat in (flat for unit in self.units for flat in unit.flats):
                flat.expire()

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._layout.precision.param_dtype) if tensor.is_floating_point() else tensor

    def _after_forward(self, index: int, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Called also if the forward pass raised."""
        unit = self.units[index]
        if not (unit.has_begun and _is_inside_backward()):
            unit.show(False)
        if torch.is_grad_enabled():
            for tensor in _awaited(output, (args, kwargs)):
                assert tensor.grad_fn is not None, "it arose here"
                hook = partial(self._before_backward, index, tensor.grad_fn.next_functions)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if _is_inside_backward():
            return
        if index in self._entered:
            self._entered.remove(index)
        unit.end = self._tick()
        if not torch.is_grad_enabled() or (self._reshards and index != 0):
            unit.free()
        if index == 0:
            context, self._context = self._context, nullcontext()
            context.__exit__(None, None, None)
            run = list(dict.fromkeys(self._running))
            self._order = run + [each for each in range(len(self.units)) if each not in run]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def gather(self, unit: Unit) -> None:
        """Gathers the parameters of a unit. Called by every rank."""
        self._start_gather(unit)
        unit.wait_gathered()

    def _start_gather(self, unit: Unit) -> None:
        for place, flat in enumerate(unit.flats):
            if flat.is_due:
                self._note(unit.index, place, 0)
                work = flat.gather(self._gathers)
                if work is not None:
                    unit.gathers.append(work)

    def _look_ahead(self, order: Sequence[int], index: int) -> None:
        """Lets the parameters of the next units come while this one computes."""
        at = order.index(index) + 1
        for ahead in order[at : at + self._prefetch]:
            self._start_gather(self.units[ahead])

    # -- backward ---------------------------------------------------------------------------------------------------

    def _before_backward(self, index: int, edges: Edges, _gradient: torch.Tensor) -> None:
        """Called when a gradient has reached an output of the unit, from which ``edges`` lead on."""
        unit = self.units[index]
        self._begin_backward(partial(accumulates, edges))
        if unit.expected and unit.is_complete:  # of an earlier use of its output; nothing of it is to be computed
            return
        self._free_past(unit)
        unit.has_begun = True
        self._start_gather(unit)
        ahead = [each for each in reversed(self._order) if each == index or not self.units[each].is_complete]
        self._look_ahead(ahead, index)
        unit.wait_gathered()
        unit.show(True)

    def _free_past(self, reached: Unit) -> None:
        """Frees the units that are through, now that ``reached`` is; see the note on top of this file."""
        if self._keeps:
            return
        for unit in self.units:
            if unit.has_begun and unit.is_complete and unit.start > reached.end and unit.index not in self._entered:
                unit.has_begun = False
                unit.show(False)
                unit.free()

    def _begin_backward(self, accumulates: Callable[[], bool]) -> None:
        """Without effect in a pass that has begun."""
        if self._is_backward and self._end() is None:  # one that raised, of which autograd let go
            self.reset()
        if not self._is_backward:
            self._begin(accumulates())
            end = self._end_of_backward
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)

    def _begin(self, accumulates: bool = True) -> None:
        self._is_backward, self._accumulates = True, accumulates
        self.is_awaited &= not accumulates
        had, has = self._has_graph, _is_inside_backward() and torch.is_grad_enabled()
        self._keeps, self._has_graph = had or has, has or (had and not accumulates)
        self._next = 0
        self._missing = {}
        for unit in self.units:
            unit.arrived.clear()
            unit.has_begun = False
            for flat in unit.trained:
                flat.forget_dropped()

    def _arrived(self, unit: Unit, flat: FlatParameter, slot: Slot, _parameter: torch.Tensor) -> None:
        """Autograd has finished the gradient at ``slot``."""
        self._begin_backward(lambda: True)
        if slot.name in unit.arrived:
            raise ConfigError(
                f"backward: parameter {slot.name!r} got more than one gradient in a pass, and the first may be on its "
                f"way already. Reentrant checkpointing of a module that is used twice does that: use "
                f"checkpoint(use_reentrant=False)"
            )
        flat.take(slot)
        unit.arrived.add(slot.name)
        if unit.is_complete and self.is_enabled:
            order = self._agreed_order
            while self._next < len(order) and self.units[order[-1 - self._next]].is_complete:
                self._start_reduce(self.units[order[-1 - self._next]])

    def _start_reduce(self, unit: Unit) -> None:
        self._next += 1
        if not unit.trained:
            return
        for place, flat in enumerate(unit.trained):
            self._missing.update((slot.name, not flat.has(slot)) for slot in flat.slots)
            self._note(unit.index, place, 1)
            work = flat.start_reduce()
            if work is not None:
                unit.reductions.append(work)
        self._reducing.append(unit)
        self._finish_reduce(leaving=self._most_under_way if unit.reductions else 0)

    def _finish_reduce(self, leaving: int) -> None:
        """Finishes reductions, the oldest first, until so many are under way."""
        while len(self._reducing) > leaving:
            self._reducing.pop(0).finish_reduce()

    def _end_of_backward(self) -> None:
        self._is_backward = False
        try:
            if not self.is_enabled:
                for flat in (flat for unit in self.units for flat in unit.trained):
                    flat.show_sums()
            elif self._accumulates and (self._finds_unused or any(unit.arrived for unit in self.units)):
                self._reduce_rest()
            else:
                self._agree_on_nothing()
        finally:
            for unit in self.units:
                self._leave(unit, frees=not self._has_graph)

    def _leave(self, unit: Unit, frees: bool = True) -> None:
        """Ends what a backward pass did in the unit; if a forward pass is inside of it, that goes on."""
        unit.has_begun = False
        is_entered = unit.index in self._entered
        unit.show(is_entered)
        if frees and not is_entered:
            unit.free()

    def reduce_now(self) -> None:
        """Reduces what has accumulated, outside of a backward pass. Called by every rank."""
        self.reset()
        self._begin()
        self._is_backward = False
        self._reduce_rest()

    def _reduce_rest(self) -> None:
        """Reduces what has not been reduced in this pass and waits for all; see the note on top of this file."""
        for index in list(reversed(self._agreed_order))[self._next :]:
            self._start_reduce(self.units[index])
        self._finish_reduce(leaving=0)
        self._next = 0
        self._check()
        is_used = self._used_somewhere() if self._finds_unused else None
        for unit in self.units:
            for flat in unit.trained:
                flat.hand_out(None if is_used is None else [is_used[slot.name] for slot in flat.slots])
                flat.expire()
        if not self._has_agreed:
            self._agree_on_order()

    def abandon(self) -> None:
        """Forgets a pass that was ended in the middle, on all ranks, wherever each of them was."""
        for unit in self.units:
            unit.abandon()
        self.reset()
        self._hash = 0

    def reset(self) -> None:
        """Puts an end to a backward pass that raised in the middle; its gradients are dropped."""
        if not self._is_backward:
            return
        self._is_backward = False
        for unit in self.units:
            for work in unit.reductions:
                work.wait()
            unit.reductions = []
            self._leave(unit, frees=self._accumulates or not self._has_graph)
            for flat in unit.trained:
                flat.drop()
        self._reducing = []

    # -- what the ranks tell each other ------------------------------------------------------------------------------

    def _note(self, *event: int) -> None:
        if self._layout.ranks.shards is not None:
            self._hash = zlib.crc32(bytes(str(event), "ascii"), self._hash)

    def _check(self) -> None:
        """Raises on every rank if they ran different units, or if a parameter had no gradient on one."""
        lacking = [] if self._finds_unused else [name for name, is_missing in self._missing.items() if is_missing]
        mine = [len(lacking), self._hash, -self._hash]
        told = torch.tensor(mine, dtype=torch.int64, device=self._layout.ranks.control_device)
        self._hash = 0
        for group in self._layout.ranks.groups:
            pycomm.all_reduce(told, pycomm.ReduceOp.MAX, group)
        most, high, low = told.tolist()
        if high != -low:
            raise CollectiveMismatchError(
                "backward: the ranks gathered and reduced different units, or in another order; what was gathered is "
                f"wrong. This rank ran {[self.units[each].name or '(outermost)' for each in self._order]}. Run the "
                "same modules on every rank in every step"
            )
        if most == 0:
            return
        names: list[str] = []
        for group in self._layout.ranks.groups:
            everyone: list[Any] = [None] * group.world_size
            pycomm.all_gather_object(everyone, names or _named(group, lacking), group)
            names = [each for part in everyone for each in part]
        raise lacks_gradients(most, names)

    def _agree_on_nothing(self) -> None:
        """Ends a pass that was for no parameter: torch.autograd.grad with respect to an input, for example.

        The calls go where reductions would: if other ranks have some to make, that is an error on all.
        """
        for wire in self._layout.ranks:
            if wire is not None:
                make(pycomm.barrier, wire)

    def _used_somewhere(self) -> dict[str, bool]:
        """Says which parameters get their gradients: also those to which a compressor owed some from earlier passes."""
        came = {slot.name for unit in self.units for flat in unit.trained for slot in flat.slots if flat.came_for(slot)}
        has = [not self._missing[name] or name in came for name in self._missing]
        used = torch.tensor(has, dtype=torch.uint8, device=self._layout.ranks.control_device)
        for group in self._layout.ranks.groups:
            pycomm.all_reduce(used, pycomm.ReduceOp.MAX, group)
        return dict(zip(self._missing, used.bool().tolist()))

    def _agree_on_order(self) -> None:
        order = torch.tensor(self._order, dtype=torch.int64, device=self._layout.ranks.control_device)
        for group in self._layout.ranks.groups:
            pycomm.broadcast(order, group=group, group_src=0)
        self._agreed_order, self._has_agreed = order.tolist(), True


def _tell_arrived(own: weakref.ref[Passes], unit: int, flat: int, slot: int, parameter: torch.Tensor) -> None:
    passes = own()
    if passes is not None:
        its_unit = passes.units[unit]
        its_flat = its_unit.trained[flat]
        passes._arrived(its_unit, its_flat, its_flat.slots[slot], parameter)


def _named(group: pycomm.Group, lacking: Sequence[str]) -> list[str]:
    return [f"rank {group.rank} of group {group.name}: {', '.join(lacking[:_NAMED])}"] if lacking else []


def _awaited(output: Any, inputs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors whose gradients say that the backward pass has come to a module with this ``output``.

    Of a view also what it is a view of, if that arose in the module: once the view has been changed in place, as by
    ``nn.ReLU(inplace=True)`` behind a linear layer, autograd comes by no other way.
    """
    # Not a leaf, which tells of itself, and on which a hook would stay for good.
    found = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
    yield from found
    bases = {id(tensor._base): tensor._base for tensor in found if tensor._base is not None}
    if bases:
        given = {id(each if each._base is None else each._base) for each in _tensors(inputs)}
        # A leaf's view autograd lets nobody change.
        yield from (base for number, base in bases.items() if number not in given and base.grad_fn is not None)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output: those in containers that torch's pytree knows, and in dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from (tensor for field in fields(leaf) for tensor in _tensors(getattr(leaf, field.name)))


def _is_inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
