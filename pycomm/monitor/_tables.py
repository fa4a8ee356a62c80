"""Tables that suit the width they are printed in: text is folded and columns are left out, figures are never cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["FirstThatFits", "FittingTable"]

_ENDLESS = 10_000  # columns


def _fits(console: Console, options: ConsoleOptions, thing: RenderableType) -> bool:
    endless = options.update(max_width=_ENDLESS)
    return Measurement.get(console, endless, thing).maximum <= options.max_width


class FirstThatFits:
    """The first of some renderables that is no wider than there is room, else the last."""

    def __init__(self, *choices: RenderableType) -> None:
        self.choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield next((each for each in self.choices if _fits(console, options, each)), self.choices[-1])


class FittingTable(Table):
    """A table that folds the text columns of ``folded`` to so many characters where it is wider than there is room.

    If that is not enough it leaves out those of ``dispensable``, in this order, and says which. Its title has the
    room's width, not the columns'.
    """

    def __init__(
        self, title: str = "", *, dispensable: Sequence[str] = (), folded: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
        self.dispensable, self.folded = dispensable, folded or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text.from_markup(str(self.title), style="table.title")
        lean = self._without(frozenset(), {})
        for count in range(len(self.dispensable) + 1):
            if _fits(console, options, lean):
                break
            lean = self._without(frozenset(self.dispensable[:count]), self.folded)
        yield from Table.__rich_console__(lean, console, options)
        gone = [name.replace("\n", " ").strip() for name in self.dispensable if name in _names(self) - _names(lean)]
        if gone:
            yield Text(f"no room for: {', '.join(gone)}", style="dim")

    def _without(self, gone: frozenset[str], folded: Mapping[str, int]) -> FittingTable:
        lean = copy.copy(self)
        lean.title, lean.columns = None, []
        for column in self.columns:
            name = str(column.header)
            if name not in gone:
                kept = copy.copy(column)
                kept._index = len(lean.columns)
                kept.no_wrap = name not in folded
                kept.overflow = "fold"
                kept.max_width = folded.get(name)
                lean.columns.append(kept)
        return lean


def _names(table: Table) -> set[str]:
    return {str(column.header) for column in table.columns}
