"""The table, with the columns that users of nccl-tests know, and the peers beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType

from ...monitor._tables import FirstThatFits, FittingTable
from ...monitor.bandwidth import busbw_factor
from ...sizes import format_bytes
from .measure import Figure, ratio
from .worker.cases import Case

__all__ = ["Cell", "Row", "best_of_variants", "make_table", "summary"]

GOOD, BAD = "green", "red"


def best_of_variants(figures: dict[str, Figure]) -> dict[str, tuple[str, Figure]]:
    """Groups ``peer:variant`` figures by peer; returns each peer's fastest variant and its figure."""
    best: dict[str, tuple[str, Figure]] = {}
    for name, figure in figures.items():
        peer = name.partition(":")[0]
        if peer not in best or figure.median_us < best[peer][1].median_us:
            best[peer] = (name, figure)
    return best


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case measured: pycomm's figure and the peers'."""

    case: Case
    world_size: int
    own: Figure
    peers: dict[str, tuple[str, Figure]] = field(default_factory=dict)

    @property
    def algbw_gbps(self) -> float:
        """Bytes / time, in GB/s."""
        return self.case.nbytes / self.own.median_us / 1000

    @property
    def busbw_gbps(self) -> float:
        """algbw times the collective's factor, in GB/s: comparable with the speed of the hardware."""
        return self.algbw_gbps * busbw_factor(self.case.verb, self.world_size)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer (with its variant) and pycomm's time as a ratio to it."""
        if not self.peers:
            return None
        name, figure = min(self.peers.values(), key=lambda named: named[1].median_us)
        return name, ratio(self.own, figure)

    def as_json(self) -> list[dict[str, Any]]:
        """Returns one object for each library in this case."""
        head = {
            "verb": self.case.verb,
            "world_size": self.world_size,
            "bytes": self.case.nbytes,
            "count": self.case.numel,
            "type": self.case.dtype,
            "redop": self.case.op,
            "place": self.case.place,
            "buffers": self.case.buffers,
            "async": self.case.is_async,
        }
        named = {"pycomm": ("pycomm", self.own), **self.peers}
        lines = []
        for library, (variant, figure) in named.items():
            algbw = self.case.nbytes / figure.median_us / 1000
            lines.append(
                {
                    "kind": "result",
                    **head,
                    "library": library,
                    "variant": variant,
                    "time_us": round(figure.median_us, 4),
                    "p99_us": round(figure.p99_us, 4),
                    "algbw_gbps": round(algbw, 4),
                    "busbw_gbps": round(algbw * busbw_factor(self.case.verb, self.world_size), 4),
                    "wrong": figure.wrong,
                    "pycomm_ratio": round(ratio(self.own, figure), 4),
                    "rounds_us": [round(us, 4) for us in figure.rounds_us],
                    "line_ns": [round(ns, 1) for ns in figure.line_ns],
                }
            )
        return lines


Row = dict[str, Cell]  # by place, cells of one size


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _colour(value: float, text: str) -> str:
    return f"[{GOOD if value < 1 else BAD}]{text}[/]"


def make_table(title: str, rows: Sequence[Row], places: Sequence[str], peer_names: Sequence[str]) -> RenderableType:
    """Lays out ``rows`` with a group of columns for each place: pycomm's, the peers' times, the ratio to the best.

    Where there is no room the places stand below each other; figures are never cut.
    """
    heads = {place: f"{'in' if place == 'in' else 'out of'} place" for place in places}
    whole = _table(title, rows, heads, peer_names)
    if len(places) == 1:
        return whole
    below = (_table(f"{title}, {head}", rows, {place: ""}, peer_names) for place, head in heads.items())
    return FirstThatFits(whole, Group(*below))


def _table(title: str, rows: Sequence[Row], heads: Mapping[str, str], peer_names: Sequence[str]) -> FittingTable:
    """Returns the table of the places of ``heads``, which has what stands above the columns of each."""
    # The element type and the operator are the same in all rows.
    peers = [f"\n{peer} us" for peer in peer_names]
    dispensable = ["redop", "type", "count", "\np99 us", "\nalgbw GB/s", *peers] if len(heads) == 1 else []
    table = FittingTable(title, dispensable=dispensable)
    table.header_style, table.box = "bold", SIMPLE_HEAD
    for name in ("bytes", "count", "type", "redop"):
        table.add_column(name, justify="right")
    for head in heads.values():
        names = ["time us", "p99 us", "algbw GB/s", "busbw GB/s", "#wrong"]
        names += [f"{peer} us" for peer in peer_names] + (["ratio", "best peer"] if peer_names else [])
        for index, name in enumerate(names):
            table.add_column(f"{head if index == 0 else ''}\n{name}", justify="right")
    for row in rows:
        case = next(iter(row.values())).case
        op = case.op.lower() if case.verb in ("all_reduce", "reduce", "reduce_scatter") else "none"
        cells = [format_bytes(case.nbytes), str(case.numel), case.dtype, op]
        for place in heads:
            cells += _place_cells(row.get(place), peer_names)
        table.add_row(*cells)
    return table


def _place_cells(cell: Cell | None, peer_names: Sequence[str]) -> list[str]:
    if cell is None:
        return ["-"] * (5 + (len(peer_names) + 2 if peer_names else 0))
    own = cell.own
    wrong = str(own.wrong) if own.wrong == 0 else f"[bold {BAD}]{own.wrong}[/]"
    cells = [_us(own.median_us), _us(own.p99_us), f"{cell.algbw_gbps:.2f}", f"{cell.busbw_gbps:.2f}", wrong]
    if not peer_names:
        return cells
    for peer in peer_names:
        if peer not in cell.peers:
            cells.append("-")
        else:
            figure = cell.peers[peer][1]
            cells.append(_us(figure.median_us) + (f" [{BAD}]({figure.wrong} wrong)[/]" if figure.wrong else ""))
    best = cell.best_peer
    return [*cells, *(("-", "-") if best is None else (_colour(best[1], f"{best[1]:#.3g}"), best[0]))]


def summary(cells: Sequence[Cell]) -> str:
    """Returns the closing lines: average bus bandwidth, wrong elements, how pycomm stands against the best peers."""
    lines = [
        f"average busbw {sum(cell.busbw_gbps for cell in cells) / len(cells):.3f} GB/s; "
        f"wrong elements {sum(cell.own.wrong for cell in cells)}"
    ]
    ratios = [best[1] for cell in cells if (best := cell.best_peer) is not None]
    if ratios:
        mean = exp(sum(log(r) for r in ratios) / len(ratios))
        won = sum(r < 1 for r in ratios)
        lines.append(
            f"time / best peer's time: geometric mean {mean:.2f}, worst {max(ratios):.2f}; "
            f"faster in {won} of {len(ratios)} cases"
        )
    return "\n".join(lines)
