"""A picture of the results: time over size, and pycomm's time as a ratio to each peer's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import ConfigError
from ...sizes import format_bytes
from .measure import ratio
from .table import Cell

__all__ = ["plot", "require_matplotlib"]

OWN_COLOUR = "#d62728"
PEER_COLOURS = {"gloo": "#7f7f7f", "openmpi": "#1f77b4", "mpich": "#2ca02c", "impi": "#9467bd"}


def require_matplotlib() -> None:
    """Raises ConfigError before anything is measured if there will be no way to draw it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, and it is not installed: pip install 'pycomm[plot]'")


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draws one column of panels for each world size, kind of buffers and place; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[tuple[int, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.world_size, cell.case.buffers, cell.case.place].append(cell)
    figure, axes = plt.subplots(
        2, len(groups), figsize=(1.5 + 5 * len(groups), 8), sharex="col", squeeze=False, layout="constrained",
        height_ratios=[3, 2],
    )  # fmt: skip
    for column, ((world_size, buffers, place), group) in enumerate(groups.items()):
        top, bottom = axes[0][column], axes[1][column]
        sizes = [cell.case.nbytes for cell in group]
        own_us = [cell.own.median_us for cell in group]
        top.plot(sizes, own_us, "o-", color=OWN_COLOUR, label="pycomm", linewidth=2, zorder=5)
        for peer in dict.fromkeys(name for cell in group for name in cell.peers):
            having = [cell for cell in group if peer in cell.peers]
            colour = PEER_COLOURS.get(peer)
            peer_sizes = [cell.case.nbytes for cell in having]
            top.plot(peer_sizes, [c.peers[peer][1].median_us for c in having], "s-", ms=4, color=colour, label=peer)
            ratios = [ratio(c.own, c.peers[peer][1]) for c in having]
            bottom.plot(peer_sizes, ratios, "s-", ms=4, color=colour, label=f"pycomm / {peer}")
        where = "in place" if place == "in" else "out of place"
        kind = "private buffers, back to back" if buffers == "private" else "shared segment, fresh input"
        top.set_title(f"{group[0].case.verb}, {world_size} ranks, {where}\n{kind}", fontsize=10)
        top.set_ylabel("time, us (median)")
        top.set_yscale("log")
        top.legend(fontsize=8)
        bottom.axhline(1.0, color="black", linewidth=1)
        bottom.set_ylabel("pycomm's time / peer's time")
        bottom.set_yscale("log")
        bottom.set_xlabel("message size")
        bottom.set_xscale("log", base=2)
        ticks = sizes[:: max(1, len(sizes) // 7)]
        bottom.set_xticks(ticks, [format_bytes(nbytes) for nbytes in ticks], rotation=30, fontsize=8)
        for panel in (top, bottom):
            panel.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
