"""Measures latency and bandwidth between every two ranks, draws them as a heat map, and names the slow links.

pycomm probe -n 4                                   ranks on this host
torchrun --nnodes 2 ... -m pycomm probe             ranks of any launcher, on any hosts
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..sizes import format_bytes
from ..topology import detect_launch
from ._arguments import check_output, check_transport, message_bytes, positive, positive_int

if TYPE_CHECKING:
    from rich.table import Table

    from ..monitor.links import Links

__all__ = ["heat_map", "main"]


def heat_map(title: str, matrix: Sequence[Sequence[float]], is_low_good: bool) -> Table:
    """Returns a table of ranks by ranks whose cells go from green (the best link) to red (the worst)."""
    from rich.text import Text

    from ..monitor._tables import FittingTable

    values = [value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]
    low, high = min(values, default=0.0), max(values, default=1.0)
    table = FittingTable(title)
    table.add_column("rank", justify="right")
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="center", min_width=8)
    for i, row in enumerate(matrix):
        cells = []
        for j, value in enumerate(row):
            # Links that are within a quarter of each other have one colour: noise is no finding.
            badness = 0.0 if high <= 1.25 * low else (value - low) / (high - low)
            badness = badness if is_low_good or high <= 1.25 * low else 1.0 - badness
            style = f"rgb(0,0,0) on rgb({round(90 + 165 * badness)},{round(200 - 120 * badness)},90)"
            cells.append(Text("-", style="dim") if i == j else Text(f"{_three_digits(value):^8}", style=style))
        table.add_row(str(i), *cells)
    return table


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _show(links: Links, nbytes: int, options: argparse.Namespace) -> None:
    from rich.console import Console

    from ..monitor.links import slow_links

    slow = slow_links(links)
    if options.json:
        print(json.dumps({**links._asdict(), "slow": slow}))
        return
    console = Console(record=options.svg is not None, width=None if sys.stdout.isatty() else 120)
    console.print(heat_map("latency, us one way (8 B)", links.latency_us, is_low_good=True))
    console.print()
    console.print(heat_map(f"bandwidth, GB/s ({format_bytes(nbytes)})", links.bandwidth_gbps, is_low_good=False))
    console.print()
    for one, other, what in slow:
        console.print(f"slow link: ranks {one} and {other}: {what}", style="yellow", highlight=False)
    if not slow:
        console.print("no link is twice as bad as the median link", highlight=False)
    if options.svg:
        console.save_svg(options.svg, title="pycomm probe")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and shows; returns 0, or what the ranks returned that it started."""
    parser = argparse.ArgumentParser(
        prog="pycomm probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-n", type=positive_int, metavar="N", help="ranks to start on this host (default: 2); not under a launcher")
    add("--transport", default="auto", help="as for pycomm.init (default: %(default)s)")
    add("--bytes", default="1MiB", help="of the messages that measure bandwidth (default: %(default)s)")
    add("--seconds", type=positive, default=0.1, metavar="S", help="for each pair of ranks (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--svg", help="also draw the heat maps into this file")
    arguments = sys.argv[2:] if argv is None else list(argv)
    options = parser.parse_args(arguments)
    nbytes = message_bytes("--bytes", options.bytes)
    if nbytes == 0:
        raise ConfigError(f"--bytes {options.bytes}: expected a message of some length, to measure bandwidth with")
    check_transport(options.transport)
    check_output("--svg", options.svg, (".svg",))
    launch = detect_launch()
    if launch.launcher == "none":
        from ..launch.run import run_job

        return run_job(["-n", str(options.n or 2), "-m", "pycomm", "probe", *arguments])
    if options.n not in (None, launch.world_size):
        raise ConfigError(f"-n {options.n}: the launcher has started {launch.world_size} ranks; leave -n out.")
    from ..collectives.init import finalize, init
    from ..monitor.links import measure_links

    group = init(options.transport)
    links = measure_links(group, nbytes, options.seconds)
    if group.rank == 0:
        _show(links, nbytes, options)
    finalize()
    return 0
