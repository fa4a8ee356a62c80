"""A unit: a module whose parameters are gathered and freed together, and how far its pass has come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from ...errors import PycommError
from ...reducer.reduce import Waitable
from .flat import FlatParameter

__all__ = ["Unit"]


class Unit:
    """A module whose parameters are gathered together; ``index`` counts the units, 0 is the outermost."""

    def __init__(self, index: int, name: str, module: nn.Module, flats: Sequence[FlatParameter]) -> None:
        self.index, self.name, self.module, self.flats = index, name, module, flats
        self.trained = [flat for flat in flats if flat.is_trained]
        self.expected = sum(len(flat.slots) for flat in self.trained)  # gradients in a pass
        self.arrived: set[str] = set()  # those of this pass
        self.has_begun = False  # its backward pass, in this pass
        self.start = self.end = 0  # of its forward pass, as counted by that of the whole
        self.gathers: list[Waitable] = []
        self.reductions: list[Waitable] = []

    @property
    def numel(self) -> int:
        """The number of elements of its parameters, without padding."""
        return sum(slot.stop - slot.start for flat in self.flats for slot in flat.slots)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of this pass are there."""
        return len(self.arrived) == self.expected

    def wait_gathered(self) -> None:
        """Waits for the parameters that are on their way."""
        gathers, self.gathers = self.gathers, []
        try:
            for work in gathers:
                work.wait()
        except BaseException:  # they have not come
            for flat in self.flats:
                flat.expire()
            raise

    def finish_reduce(self) -> None:
        """Waits for the reductions that were started and finishes them."""
        reductions, self.reductions = self.reductions, []
        for work in reductions:
            work.wait()
        for flat in self.trained:
            flat.finish_reduce()

    def abandon(self) -> None:
        """Waits for what is on its way, whether it comes or not, and frees the full parameters."""
        for work in (*self.gathers, *self.reductions):
            with suppress(PycommError):
                work.wait()
        self.gathers, self.reductions = [], []
        for flat in self.flats:
            flat.expire()
        self.free()

    def free(self) -> None:
        """Frees the full parameters. What is on its way to them is waited for."""
        self.wait_gathered()
        for flat in self.flats:
            flat.free()

    def show(self, is_full: bool) -> None:
        """Puts the full parameters into the modules, or the pieces."""
        for flat in self.flats:
            flat.show(is_full)
