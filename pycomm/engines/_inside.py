"""Engines inside a module that another engine runs: those that average the gradients of some of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

import pycomm

from ..reducer.reduce import Wire

__all__ = ["Averaging", "engines_in", "groups_of", "mark_engine"]


class Averaging(Protocol):
    """An engine whose gradients may add up over several passes before they are averaged."""

    @property
    def wires(self) -> Sequence[Wire]:
        """Over which it averages them."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients only accumulate."""

    def abandon(self) -> None:
        """Forgets a pass that was ended in the middle, of which all ranks know."""

    def sync_gradients(self) -> None:
        """Averages what has accumulated."""


_engines: WeakKeyDictionary[nn.Module, ReferenceType[Averaging]] = WeakKeyDictionary()


def mark_engine(module: nn.Module, engine: Averaging) -> None:
    """Says that ``engine`` averages the gradients of ``module``; an earlier one does so no longer."""
    _engines[module] = ref(engine)


def engines_in(module: nn.Module) -> list[Averaging]:
    """Returns the engines of ``module`` and of those in it, in the order of the modules."""
    found = (_engines[each]() for each in module.modules() if each in _engines)
    return [engine for engine in found if engine is not None]


def groups_of(engines: Sequence[Averaging], beside: pycomm.Group | None = None) -> list[pycomm.Group]:
    """Returns ``beside``, if there is one, and the groups of ``engines``: each once, in one order on all ranks."""
    groups = [] if beside is None else [beside]
    groups += [wire.group for engine in engines for wire in engine.wires]
    return list({group.name: group for group in groups}.values())
