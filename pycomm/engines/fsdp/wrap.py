"""Which modules are units: what is gathered, and freed, together.

Every parameter belongs to one unit: that of the innermost module through which all ways lead to the places where it
stands. So a weight that is tied to several places stays one parameter, and a module that is used in several is one
module; if they lie in different units, what is theirs goes to the unit around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import ConfigError
from .._marks import shards_of

__all__ = ["Found", "Place", "Policy", "find_units", "materialize"]

Path = Sequence[nn.Module]  # from the root inwards
Policy = type[nn.Module] | Sequence[type[nn.Module]] | Sequence[str] | int | Callable[[str, nn.Module], bool] | None


class Place(NamedTuple):
    """Where a parameter stands: the attribute ``name`` of ``module``."""

    module: nn.Module
    name: str


class Found(NamedTuple):
    """A module that was chosen, and the parameters of its unit with their first names and all their places."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter, list[Place]]]


def find_units(root: nn.Module, policy: Policy) -> list[Found]:
    """Returns the units, ``root`` first, in the order of the modules. Raises ConfigError if no module fits ``policy``.

    ``policy``: classes of modules, their names, the least number of elements of a unit, or ``f(name, module) -> bool``.
    """
    sharded = [name for name, parameter in root.named_parameters() if shards_of(parameter) is not None]
    if sharded:
        raise ConfigError(
            f"{type(root).__name__} is sharded already, in {', '.join(sharded[:4])}; shard a module once, and choose "
            f"its units by wrap="
        )
    chosen = {"": root, **{name: module for name, module in root.named_modules() if name}}
    if policy is None:
        chosen = {"": root}
    elif isinstance(policy, int) and not isinstance(policy, bool):
        sizes = _of_size(root, policy)
        chosen = {name: module for name, module in chosen.items() if not name or name in sizes}
    else:
        fits = _predicate(policy)
        chosen = {name: module for name, module in chosen.items() if not name or fits(name, module)}
    if policy is not None and len(chosen) == 1:
        kinds = sorted({type(module).__name__ for _, module in root.named_modules()})
        raise ConfigError(
            f"wrap={policy!r} fits no module inside {type(root).__name__}; it has {', '.join(kinds[:12])}. Name a "
            f"class or a module that is there, or pass wrap=None for one unit"
        )
    members: dict[str, list[tuple[str, nn.Parameter, list[Place]]]] = {name: [] for name in chosen}
    names = {module: name for name, module in chosen.items()}
    for first, parameter, places, paths in _places(root):
        members[_unit_of(paths, names)].append((first, parameter, places))
    return [Found(name, module, members[name]) for name, module in chosen.items() if members[name] or not name]


def _predicate(policy: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(policy, type):
        return lambda _name, module: isinstance(module, policy)
    if isinstance(policy, (list, tuple, set, frozenset)):
        kinds = tuple(each for each in policy if isinstance(each, type))
        names = {each for each in policy if isinstance(each, str)}
        if len(kinds) + len(names) == len(policy) and policy:
            return lambda name, module: name in names or isinstance(module, kinds)
    elif callable(policy):
        return lambda name, module: bool(policy(name, module))
    raise ConfigError(
        f"wrap: expected classes of modules, names of modules, a number of elements, f(name, module) -> bool, or None; "
        f"got {policy!r}"
    )


def _of_size(root: nn.Module, least: int) -> set[str]:
    """Returns the names of the innermost modules with at least so many elements that are in no other one."""
    taken: set[int] = set()
    found = set()
    for name, module in reversed(list(root.named_modules())):  # what is inside a module comes before it
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if name and sum(own.values()) >= least:
            found.add(name)
            taken.update(own)
    return found


def _places(root: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Place], list[Path]]]:
    """Yields each parameter once: its first name, all its places, and all paths that lead to one."""
    modules = dict(root.named_modules(remove_duplicate=False))  # one that is in two places is there by both names
    found: dict[int, tuple[str, nn.Parameter, list[Place], list[Path]]] = {}
    for prefix, module in modules.items():
        path = [root, *(modules[name] for name in accumulate(prefix.split("."), "{}.{}".format))]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            first = f"{prefix}.{name}" if prefix else name
            _, _, places, paths = found.setdefault(id(parameter), (first, parameter, [], []))
            paths.append(path)
            if Place(module, name) not in places:
                places.append(Place(module, name))
    yield from found.values()


def _unit_of(paths: Sequence[Path], chosen: dict[nn.Module, str]) -> str:
    """Returns the innermost chosen module that is on all ``paths``."""
    return next(
        chosen[module] for module in reversed(paths[0]) if module in chosen and all(module in path for path in paths)
    )


def materialize(found: Found, initialize: Callable[[nn.Module], None], device: torch.device) -> Found:
    """Gives what is on meta memory on ``device``, and lets ``initialize(module)`` fill it, module by module.

    Inner units come first. Returns the unit with its new parameters; tied ones stay tied. Raises ConfigError if
    something was left unfilled.
    """
    modules: dict[nn.Module, list[str]] = {}
    parameters = []
    for name, parameter, places in found.parameters:
        if parameter.is_meta:
            parameter = nn.Parameter(_unfilled(parameter, device), parameter.requires_grad)
            for place in places:
                place.module.register_parameter(place.name, parameter)
                modules.setdefault(place.module, []).append(place.name)
        parameters.append((name, parameter, places))
    for module in found.module.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unfilled(buffer, device)
                modules.setdefault(module, []).append(name)
    for module, names in modules.items():
        _fill(module, names, initialize)
    return found._replace(parameters=parameters)


def _fill(module: nn.Module, names: Iterable[str], initialize: Callable[[nn.Module], None]) -> None:
    tensors = {**module._parameters, **module._buffers}
    apart = [name for name, each in tensors.items() if each is not None and each.is_meta]
    if apart:
        raise ConfigError(
            f"initialize: {type(module).__name__} has {sorted(names)} in one unit and {apart} in another (they are "
            f"tied to other modules); wrap such that a module's parameters are together, or build it on a real device"
        )
    with torch.no_grad():
        initialize(module)
    tensors = {**module._parameters, **module._buffers}
    unfilled = [name for name in names if (each := tensors[name]) is not None and bool(each.isnan().any())]
    if unfilled:
        raise ConfigError(
            f"initialize: {type(module).__name__} still has values that nobody set in {unfilled}, expected "
            f"initialize(module) to fill them, such as by module.reset_parameters()"
        )


def _unfilled(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() else made.zero_()
