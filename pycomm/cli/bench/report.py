"""Where results go as they come: a growing table on the terminal, JSON lines in a file, a picture at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from .table import Cell, Row, make_table, summary

__all__ = ["Report"]

WIDTH_WITHOUT_TERMINAL = 240


class Report:
    """Takes rows of cells. With ``is_silent`` (ranks other than 0) it keeps them and shows nothing."""

    def __init__(self, json_path: Path | None, is_silent: bool = False) -> None:
        width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
        self.console = Console(width=width, highlight=False, quiet=is_silent)
        self.cells: list[Cell] = []
        self._json: TextIO | None = json_path.open("w") if json_path and not is_silent else None

    def write_json(self, line: dict[str, Any]) -> None:
        """Adds one line to the file, at once, so that an interrupted session keeps what it measured."""
        if self._json is not None:
            self._json.write(json.dumps(line) + "\n")
            self._json.flush()

    def facts(self, facts: dict[str, Any]) -> None:
        """Shows and writes what a reader needs to place the figures."""
        shown = [f"{name}: {value}" for name, value in facts.items() if value is not None]
        self.console.print("  ".join(shown), style="dim", markup=False, soft_wrap=True)
        self.write_json({"kind": "facts", **facts})

    def note(self, text: str) -> None:
        """Shows something that the reader should know, such as a peer left out."""
        self.console.print(text, style="yellow", markup=False, soft_wrap=True)
        self.write_json({"kind": "note", "text": text})

    def table(self, title: str, rows: Iterable[Row], places: Sequence[str], peer_names: Sequence[str]) -> None:
        """Shows ``rows`` as they arrive."""
        shown: list[Row] = []
        live = Live(make_table(title, shown, places, peer_names), console=self.console, auto_refresh=False)
        live.vertical_overflow = "visible"
        with live if self.console.is_terminal else nullcontext():
            for row in rows:
                shown.append(row)
                for cell in row.values():
                    for line in cell.as_json():
                        self.write_json(line)
                live.update(make_table(title, shown, places, peer_names), refresh=self.console.is_terminal)
        if not self.console.is_terminal:
            self.console.print(live.renderable)
        cells = [cell for row in shown for cell in row.values()]
        if cells:
            self.console.print(summary(cells) + "\n")
        self.cells += cells

    @property
    def num_wrong(self) -> int:
        """Wrong elements of pycomm's results so far."""
        return sum(cell.own.wrong for cell in self.cells)

    def close(self) -> None:
        """Closes the file."""
        if self._json is not None:
            self._json.close()
