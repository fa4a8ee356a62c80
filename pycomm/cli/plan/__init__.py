"""Shows an algorithm: its rounds as a grid or a picture, what it costs, and which of all would be fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .._arguments import check_output

if TYPE_CHECKING:
    from ...topology import Topology

__all__ = ["main"]

MOST_RANKS = 1 << 20  # it takes half a minute to predict those
EPILOG = """\
examples:
  pycomm plan ring 4                                      the grid of rounds
  pycomm plan ring 4 --svg ring.svg                       the same as a picture
  pycomm plan tree 8 --verb broadcast --root 3
  pycomm plan hierarchical --hosts 2 --ranks 8 --predict 64MiB --latency 5us --bandwidth 25Gbit

--predict shows all algorithms side by side on links like these: --latency and --bandwidth are those of a host's link,
which its ranks share; inside a host see --host-latency and --host-bandwidth, of one rank.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycomm plan", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("algorithm", help="a registered name, or one with parts such as 'hierarchical(ring,tree)'")
    add("ranks", nargs="?", type=int, help="the number of ranks")
    add("--ranks", dest="ranks_option", type=int, metavar="N", help="the same")
    add("--hosts", default="1", metavar="N or N,N,...", help="hosts, or the ranks of each (default: %(default)s)")
    add("--hosts-per-rack", type=int, default=0, metavar="N", help="hosts that share an uplink (default: one rack)")
    add("--verb", default="all_reduce", help="the collective (default: %(default)s)")
    add("--root", type=int, default=0, help="the root of a reduce, broadcast, gather or scatter (default: 0)")
    add("--svg", type=Path, metavar="FILE", help="draw the rounds")
    add("--png", type=Path, metavar="FILE", help="draw the rounds")
    add("--predict", metavar="BYTES", help="predict the time of every algorithm for a buffer of this size")
    add("--latency", default="5us", metavar="T", help="between hosts (default: %(default)s)")
    add("--bandwidth", default="25Gbit", metavar="B", help="of a host's link (default: %(default)s)")
    add("--rack-latency", metavar="T", help="across racks (default: --latency)")
    add("--rack-bandwidth", metavar="B", help="of a rack's uplink (default: all that its hosts' links carry)")
    add("--host-latency", default="1us", metavar="T", help="inside a host (default: %(default)s)")
    add("--host-bandwidth", default="8GB", metavar="B", help="inside a host, of one rank (default: %(default)s)")
    add("--message-time", default="2us", metavar="T", help="what a message keeps a rank busy (default: %(default)s)")
    return parser


def _topology(options: argparse.Namespace) -> Topology:
    from ...topology import Topology

    ranks = options.ranks if options.ranks_option is None else options.ranks_option
    if options.ranks is not None and options.ranks_option not in (None, options.ranks):
        raise ConfigError(f"{options.ranks} ranks and --ranks {options.ranks_option}: give the number once.")
    try:
        sizes = [int(part) for part in options.hosts.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--hosts {options.hosts}: expected a number of hosts, or the ranks of each, as in 4,4,2.")
    if max(ranks or 0, sum(sizes)) > MOST_RANKS:
        raise ConfigError(f"{max(ranks or 0, sum(sizes))} ranks: expected {MOST_RANKS} at most")
    if "," not in options.hosts:
        hosts = sizes[0]
        if ranks is None or ranks < hosts:
            raise ConfigError(f"expected a number of ranks, {hosts} or more, got {ranks}: pycomm plan ring 4")
        sizes = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
    if ranks not in (None, sum(sizes)):
        raise ConfigError(
            f"--hosts {options.hosts} holds {sum(sizes)} ranks, but {ranks} were asked for; leave one out."
        )
    if options.hosts_per_rack < 0:
        raise ConfigError(f"--hosts-per-rack {options.hosts_per_rack}: expected 1 or more.")
    return Topology.of_sizes(sizes, options.hosts_per_rack)


def main(argv: Sequence[str]) -> int:
    """Prints the grid, or the prediction, and draws the pictures that were asked for."""
    from rich.console import Console

    from ...algorithms import find_algorithm
    from .predict import link_model, show_prediction

    options = _parser().parse_args(argv)
    topology = _topology(options)
    algorithm = find_algorithm(options.algorithm)
    pictures = [path for path in (options.svg, options.png) if path is not None]
    if pictures:
        from .picture import require_matplotlib

        require_matplotlib()
        check_output("--svg", options.svg)
        check_output("--png", options.png)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    links = link_model(options)
    if options.predict is not None:
        show_prediction(console, algorithm, topology, options, links)
    if options.predict is None or pictures:
        from .rounds import show_rounds, simulated

        shown = simulated(algorithm, options.verb, topology, options.root)
        if options.predict is None:
            show_rounds(console, shown)
        for path, kind in ((options.svg, "svg"), (options.png, "png")):
            if path is not None:
                from .picture import draw

                draw(shown, path, kind)
                console.print(f"drawn: {path}")
    return 0
