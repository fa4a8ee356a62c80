"""State dicts of a sharded model and its optimizer: what lies on this rank, or all of it.

    sharded    each value a ``Piece``; torch.distributed.checkpoint saves it, and loads it into other worlds
    full       each value an ordinary tensor in its own shape; gathered one unit at a time

Names are the module's own. Optimizer state is keyed by parameter name, so it fits any order of the parameters. Loading
takes either kind.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError
from ...reducer.reduce import Wire, start_gather, start_sum
from .flat import FlatParameter, Slot
from .options import Ranks
from .pieces import Piece
from .unit import Unit

__all__ = ["States"]

_NAMED = 8  # of the parameters that an error names


class States:
    """The state dicts of ``module``, whose parameters are in ``units``, over ``ranks``."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], ranks: Ranks) -> None:
        self._module = module
        self.is_listing = False  # the module's own state dict is asked for
        shards = ranks.shards
        self._ranks = [group.rank for group in ranks.groups]
        self._flats = [flat for unit in units for flat in unit.flats]
        self._shards = None if shards is None else Wire(shards.group, is_async=False)
        self._slots: dict[int, tuple[FlatParameter, Slot]] = {
            id(slot.piece): (flat, slot) for flat in self._flats for slot in flat.slots
        }
        self._name_of = {place: slot.name for place, (_, slot) in self._slots.items()}

    # -- the module ---------------------------------------------------------------------------------------------------

    def sharded(self) -> dict[str, torch.Tensor]:
        """Returns the module's state; parameters as pieces over the shards' own memory, buffers as they are."""
        return {name: self._piece(each, each) for name, each in self._named()}

    def full(self, rank: int | None) -> dict[str, torch.Tensor]:
        """Returns the module's state in full, on every rank or on ``rank`` alone, where others get {}. Collective."""
        whole: dict[int, torch.Tensor] = {}
        for flat in self._flats:
            whole.update(self._whole(flat, {id(slot.piece): slot.piece for slot in flat.slots}, rank))
        if not self._is_for(rank):
            return {}
        state = OrderedDict(
            (name, whole[id(each)] if id(each) in whole else each.detach().clone()) for name, each in self._named()
        )
        state._metadata = self._listed_state()._metadata  # type: ignore[attr-defined]  # the modules' versions
        return state

    def localize(self, state: dict[str, Any], prefix: str) -> None:
        """Replaces the parameters of ``state`` by what of them belongs on this rank. Raises CheckpointError."""
        for name, each in self._named():
            if prefix + name in state:
                state[prefix + name] = self._local(each, state[prefix + name], name)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Returns parameters and buffers by the names that the module's state dict gives them.

        Modules may change names there, as those do that stand around others to checkpoint them.
        """
        return [(name, each) for name, each in self._listed_state().items() if isinstance(each, torch.Tensor)]

    def _listed_state(self) -> Any:
        self.is_listing = True
        try:
            return self._module.state_dict(keep_vars=True)
        finally:
            self.is_listing = False

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_sharded(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns ``{"state": {name: {key: value}}, "param_groups": [...], "has_state": bool}``.

        Values are pieces where they are like a parameter. An optimizer without state gives zeros in place of what it
        would have, for torch.distributed.checkpoint to load into; "has_state" then is False, and they are not loaded.
        """
        self._check_is_ours(optimizer)
        has_state = any(optimizer.state.values())
        states = optimizer.state if has_state else _state_of_zeros(optimizer)
        state = self._optimizer_state(
            optimizer,
            lambda parameter: {key: self._piece(parameter, x) for key, x in states.get(parameter, {}).items()},
        )
        return {**state, "has_state": has_state}

    def optimizer_full(self, optimizer: torch.optim.Optimizer, rank: int | None) -> dict[str, Any]:
        """Returns state and groups with whole tensors, on every rank or on ``rank`` alone, where others get {}.

        Collective.
        """
        self._check_is_ours(optimizer)
        whole: dict[int, dict[str, torch.Tensor]] = {}
        for flat in self._flats:
            slots = [slot for slot in flat.slots if optimizer.state.get(slot.piece)]
            keys = dict.fromkeys(key for slot in slots for key in optimizer.state[slot.piece])
            values = {(key, id(slot.piece)): optimizer.state[slot.piece].get(key) for key in keys for slot in slots}
            is_shaped = self._everywhere([self._is_shaped(place, value) for (_, place), value in values.items()])
            shaped = {each: values[each] for each, has_parts in zip(values, is_shaped) if has_parts}
            for key in keys:
                parts = {place: value for (its_key, place), value in shaped.items() if its_key == key}
                for place, value in self._whole(flat, parts, rank).items():
                    whole.setdefault(place, {})[key] = value
        if not self._is_for(rank):
            return {}
        return deepcopy(
            self._optimizer_state(
                optimizer, lambda parameter: {**optimizer.state.get(parameter, {}), **whole.get(id(parameter), {})}
            )
        )

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, convert: Any) -> dict[str, Any]:
        state = {self._name_of[id(p)]: convert(p) for group in optimizer.param_groups for p in group["params"]}
        groups = [{**group, "params": self._names(group)} for group in optimizer.param_groups]
        return {"state": state, "param_groups": groups}

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Loads what ``optimizer_sharded`` or ``optimizer_full`` returned, in any world. Raises CheckpointError.

        Groups are told by the parameters that they have. What was saved before the first step leaves no state.
        """
        self._check_is_ours(optimizer)
        groups = [self._saved_group(group, state["param_groups"]) for group in optimizer.param_groups]
        shapes: dict[torch.Tensor, Any] = {}
        loaded = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = self._name_of[id(parameter)]
            if name not in state["state"]:
                raise CheckpointError(
                    f"the optimizer state has nothing for {name!r}; it has {len(state['state'])} parameters. Load what "
                    f"was saved for this model"
                )
            values = state["state"][name] if state.get("has_state", True) else {}
            here = optimizer.state.get(parameter, {})
            if not here and any(self._is_ambiguous(parameter, value) for value in values.values()):
                shapes = shapes or _state_of_zeros(optimizer)
                here = shapes[parameter]
            local = {
                key: self._local(parameter, value, name).clone()
                if self._is_whole(parameter, value, here.get(key))
                else deepcopy(value)
                for key, value in values.items()
            }
            loaded[parameter] = {key: _fitted(parameter, name, groups, key, each) for key, each in local.items()}
        for group, saved in zip(optimizer.param_groups, groups):
            group.update(deepcopy({key: value for key, value in saved.items() if key != "params"}))
        for parameter, values in loaded.items():
            optimizer.state.pop(parameter, None)
            if values:
                optimizer.state[parameter] = values

    def _saved_group(self, group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the one of the ``saved`` groups that has the parameters of ``group``, in any order."""
        names = self._names(group)
        for each in saved:
            if set(each["params"]) == set(names):
                return each
        raise CheckpointError(
            f"the optimizer has a group of parameters {_listed(names)}, and the state has none of just these; its "
            f"groups are {'; '.join(_listed(each['params']) for each in saved)}. Make the optimizer with the groups "
            f"that it was saved with, in any order"
        )

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._name_of[id(p)] for p in group["params"]]

    def _check_is_ours(self, optimizer: torch.optim.Optimizer) -> None:
        strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._slots]
        if strange:
            raise ConfigError(
                f"the optimizer has {len(strange)} parameters that are not this model's, of shapes "
                f"{[tuple(p.shape) for p in strange[:4]]}; make it from module.parameters() after sharding"
            )

    # -- one tensor ---------------------------------------------------------------------------------------------------

    def _piece(self, parameter: torch.Tensor, value: Any) -> Any:
        if not self._is_shaped(id(parameter), value):
            return value
        _, slot = self._slots[id(parameter)]
        return Piece(slot.shape, slot.own.start, value.detach().reshape(-1))

    def _whole(self, flat: FlatParameter, values: Mapping[int, Any], rank: int | None) -> dict[int, torch.Tensor]:
        """Returns in full what has parts in ``values``, by the pieces that they are for; {} off ``rank``."""
        if not values:
            return {}
        slots = [slot for slot in flat.slots if id(slot.piece) in values]
        dtype, device = next((each.dtype, each.device) for each in values.values())
        own = torch.zeros(flat.own.stop - flat.own.start, dtype=dtype, device=device)
        for slot in slots:
            own[slot.kept].copy_(values[id(slot.piece)].detach().reshape(-1))
        everything = own
        if self._shards is not None:
            everything = torch.empty(flat.numel, dtype=dtype, device=device)
            start_gather(self._shards, everything, own, flat.name)
        if not self._is_for(rank):
            return {}
        return {id(slot.piece): everything[slot.start : slot.stop].view(slot.shape).clone() for slot in slots}

    def _is_shaped(self, place: int, value: Any) -> bool:
        """Whether a value on this rank is one element for each of the parameter's."""
        found = self._slots.get(place)
        return found is not None and isinstance(value, torch.Tensor) and value.shape == found[1].piece.shape

    def _everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Returns which of the ``flags`` all ranks have: a scalar looks like the part of who has one element."""
        if self._shards is None or not flags:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.int32, device=self._shards.group.control_device)
        start_sum(self._shards, counts)
        return [count == self._shards.group.world_size for count in counts.tolist()]

    def _is_ambiguous(self, parameter: torch.Tensor, value: Any) -> bool:
        """Whether a plain tensor of a state dict may be like the parameter or a scalar, which have the same shape."""
        shape = self._slots[id(parameter)][1].shape
        return not shape and isinstance(value, torch.Tensor) and not isinstance(value, Piece) and not value.shape

    def _is_whole(self, parameter: torch.Tensor, value: Any, here: Any) -> bool:
        """Whether a value of a state dict is one element for each of the parameter's.

        If the parameter has but one, so have scalars: then the optimizer's own state of it ``here`` tells.
        """
        if self._is_ambiguous(parameter, value):
            return self._is_shaped(id(parameter), here)
        return isinstance(value, Piece) or (
            isinstance(value, torch.Tensor) and value.shape == self._slots[id(parameter)][1].shape
        )

    def _local(self, parameter: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
        found = self._slots.get(id(parameter))
        if found is None:
            return value
        _, slot = found
        if tuple(value.shape) != tuple(slot.shape):
            raise CheckpointError(
                f"parameter {name!r}: expected shape {tuple(slot.shape)}, got {tuple(value.shape)}; load a state of "
                f"this model"
            )
        if not isinstance(value, Piece):
            return value.reshape(-1)[slot.own].view_as(parameter)
        length = slot.own.stop - slot.own.start
        if (value.start, value.local.numel()) != (slot.own.start, length):
            raise CheckpointError(
                f"parameter {name!r}: this rank has elements {slot.own.start} to {slot.own.stop}, got a piece of "
                f"another rank or world, {value!r}; save and load pieces by torch.distributed.checkpoint"
            )
        return value.local.view_as(parameter)

    def _is_for(self, rank: int | None) -> bool:
        return rank is None or all(each == rank for each in self._ranks)


def _fitted(parameter: torch.Tensor, name: str, groups: Sequence[Any], key: str, value: Any) -> Any:
    """Returns ``value`` on the device and of the dtype that torch's ``Optimizer.load_state_dict`` would give it."""
    if not isinstance(value, torch.Tensor):
        return value
    fit: Any = torch.optim.Optimizer._process_value_according_to_param_policy
    return fit(parameter, value, name, groups, key)


def _state_of_zeros(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Returns the state that the optimizer makes for its parameters when it steps, by shapes; all tensors are zero.

    A twin takes the step, the optimizer is left as it is: what a step makes of no gradient is not what it was before
    (weight decay goes into the moments, Rprop's and ASGD's rates change).
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({key: each for key, each in optimizer.__dict__.items() if key != "step"})  # a scheduler's
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    mirrors = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        mirrors[parameter] = mirror = nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
        mirror.__dict__.update(parameter.__dict__)
        if parameter.requires_grad:
            mirror.grad = torch.zeros_like(parameter)
    twin.param_groups = [{**group, "params": [mirrors[p] for p in group["params"]]} for group in optimizer.param_groups]
    twin.step()
    return {
        parameter: {
            key: torch.zeros_like(each) if isinstance(each, torch.Tensor) else each
            for key, each in twin.state.get(mirror, {}).items()
        }
        for parameter, mirror in mirrors.items()
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
