"""Makes an ordinary module parallel: replaces the layers that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import nn

import pycomm

from ...errors import ConfigError
from .._marks import cut_of
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = ["parallelize"]

_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "column": ColumnParallelLinear.of,
    "column, gathered": partial(ColumnParallelLinear.of, gathers_output=True),
    "qkv": partial(ColumnParallelLinear.of, blocks=3),
    "row": RowParallelLinear.of,
    "vocabulary": VocabParallelEmbedding.of,
}


_NAMED = 8  # of the modules that an error names


class _Choice(NamedTuple):
    name: str  # the first one, of a layer that has several
    pattern: str
    kind: str


def parallelize(module: nn.Module, plan: Mapping[str, str], group: Any = None) -> nn.Module:
    """Replaces layers of ``module``, in place, by this rank's parts of them; returns the module.

    ``plan`` says for patterns of names what they become: ``{"blocks.*.up": "column", "blocks.*.down": "row"}``; also
    "column, gathered", "qkv" (three cuts side by side) and "vocabulary". Every rank has the same module. A layer in
    several places is replaced in all; parameters stay frozen, and tied. Raises ConfigError, and has replaced nothing,
    for a pattern that names nothing, for a layer that cannot be cut, is more than a plain ``nn.Linear`` or
    ``nn.Embedding``, or is to be cut in two ways, and for tied parameters of which one would be cut otherwise.
    """
    found = pycomm.get_group(group)
    names = dict(module.named_modules(remove_duplicate=False))
    del names[""]
    made = {layer: _make(layer, choice, found) for layer, choice in _chosen(names, plan).items()}
    _keep_ties(module, made)
    for name, layer in names.items():
        if layer in made:
            parent, _, child = name.rpartition(".")
            setattr(names[parent] if parent else module, child, made[layer])
    return module


def _chosen(names: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[nn.Module, _Choice]:
    chosen: dict[nn.Module, _Choice] = {}
    for pattern, kind in plan.items():
        if kind not in _MAKERS:
            raise ConfigError(f"parallelize: {pattern!r}: expected one of {', '.join(_MAKERS)}, got {kind!r}")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"parallelize: {pattern!r} names no module inside of the one given; it has "
                f"{', '.join(list(names)[:_NAMED]) or 'none'}{', ...' if len(names) > _NAMED else ''}"
            )
        for name in matching:
            choice = chosen.setdefault(names[name], _Choice(name, pattern, kind))
            if choice.kind != kind:
                raise ConfigError(
                    f"parallelize: {name!r} is to be {choice.kind!r} by {choice.pattern!r} and {kind!r} by "
                    f"{pattern!r}; expected one of them: choose patterns that do not overlap"
                )
    return chosen


def _make(layer: nn.Module, choice: _Choice, group: pycomm.Group) -> nn.Module:
    try:
        return _MAKERS[choice.kind](layer, group)
    except ConfigError as error:
        raise ConfigError(f"parallelize: {choice.name!r} as {choice.kind!r}: {error}") from error


def _keep_ties(module: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Lets layers that had one parameter have one part of it."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append((name, owner, name.rpartition(".")[2]))
    ties = [each for each in holders.values() if len(each) > 1 and any(owner in made for _, owner, _ in each)]
    for tie in ties:
        cuts = [cut_of(getattr(made.get(owner, owner), child)) for _, owner, child in tie]
        if len(set(cuts)) > 1:
            told = ", ".join(
                f"{name} ({'whole' if cut is None else f'dim {cut.dim}, blocks {cut.blocks}'})"
                for (name, _, _), cut in zip(tie, cuts, strict=True)
            )
            raise ConfigError(
                f"parallelize: one parameter has several places and would be cut in different ways: {told}; expected "
                f"one way: name all of the layers in the plan, such as an embedding as 'vocabulary' and its head as "
                f"'column', or untie them first"
            )
    for (_, first, own), *others in ties:
        for _, owner, child in others:
            setattr(made.get(owner, owner), child, getattr(made.get(first, first), own))
