"""The predicted time of every algorithm, side by side."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, NamedTuple

from ...algorithms import ALGORITHMS, Algorithm, find_algorithm
from ...algorithms.cost import Level, LinkModel, profile, seconds
from ...sizes import format_bytes, parse_bandwidth, parse_bytes, parse_time
from ...topology import Topology

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Prediction", "link_model", "predictions", "show_prediction"]

_SEGMENTS = [1 << power for power in range(7)]


class Prediction(NamedTuple):
    """One algorithm's time at the best number of segments; ``whole_s`` is that of the data in one piece."""

    seconds: float
    name: str
    rounds: int
    sent: float  # bytes of the busiest rank, as a fraction of the buffer
    segments: int
    whole_s: float
    method: str


def link_model(options: argparse.Namespace) -> LinkModel:
    """Returns the links that the command line describes. Raises ConfigError."""
    latency_s, link = parse_time(options.latency), parse_bandwidth(options.bandwidth)
    far_latency_s = latency_s if options.rack_latency is None else parse_time(options.rack_latency)
    uplink = math.inf if options.rack_bandwidth is None else parse_bandwidth(options.rack_bandwidth)
    inside = Level(latency_s=parse_time(options.host_latency), bytes_per_s=parse_bandwidth(options.host_bandwidth))
    return LinkModel(
        host=inside,
        rack=Level(latency_s=latency_s, bytes_per_s=link, shared_bytes_per_s=link),
        far=Level(latency_s=far_latency_s, bytes_per_s=link, shared_bytes_per_s=uplink),
        message_s=parse_time(options.message_time),
    )


def predictions(algorithm: Algorithm, verb: str, topology: Topology, model: LinkModel, nbytes: int) -> list[Prediction]:
    """Returns what ``algorithm`` and all registered ones that have a plan would take, the fastest first."""
    found = []
    for name in dict.fromkeys([algorithm.name, *ALGORITHMS.names()]):
        each = find_algorithm(name)
        if not each.supports(verb, topology):
            continue
        known = profile(each, verb, topology)
        sent = max((sum(load.sent) for load in known.total.ranks), default=0.0)
        best, segments = min((seconds(known, model, nbytes, segments), segments) for segments in _SEGMENTS)
        whole_s = seconds(known, model, nbytes)
        found.append(Prediction(best, name, known.rounds, sent, segments, whole_s, known.method))
    return sorted(found)


def show_prediction(
    console: Console, algorithm: Algorithm, topology: Topology, options: argparse.Namespace, model: LinkModel
) -> None:
    """Prints the table. Raises PlanError if ``algorithm`` has no plan, and ConfigError."""
    from rich.text import Text

    from ...monitor._tables import FittingTable

    nbytes = parse_bytes(options.predict)
    algorithm.plan(options.verb, 0, topology, options.root)
    rows = predictions(algorithm, options.verb, topology, model, nbytes)
    hosts = len(topology.hosts)
    where = "one host" if hosts == 1 else f"{hosts} hosts, {options.bandwidth} and {options.latency} between them"
    table = FittingTable(
        f"{options.verb} of {format_bytes(nbytes)}, {topology.world_size} ranks on {where}",
        dispensable=("cost", "in one\npiece", "rounds", "segments", "sent by\nthe busiest"),
    )
    table.header_style = "dim"
    for heading in (
        "algorithm",
        "predicted",
        "x best",
        "segments",
        "in one\npiece",
        "rounds",
        "sent by\nthe busiest",
        "cost",
    ):
        table.add_column(heading, justify="left" if heading in ("algorithm", "cost") else "right")
    for row in rows:
        cells = (
            row.name, duration(row.seconds), f"{row.seconds / rows[0].seconds:.2f}" if rows[0].seconds else "1.00",
            str(row.segments), duration(row.whole_s), str(row.rounds), f"{row.sent:.2f} S", row.method,
        )  # fmt: skip
        style = "bold green" if row is rows[0] else "bold" if row.name == algorithm.name else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)


def duration(value_s: float) -> str:
    """Returns a time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value_s >= scale:
            return f"{value_s / scale:.3g} {unit}" if value_s < 1000 * scale else f"{value_s / scale:.0f} {unit}"
    return f"{value_s * 1e6:.3g} us"
