"""The figures of the board for others: JSON lines, and Prometheus by an HTTP port or a text file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import NativeUnavailableError
from .bandwidth import CollectiveStats, snapshot
from .watch import own_board

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["prometheus_registry", "serve_prometheus", "write_json_lines", "write_prometheus"]

_LABELS = ("rank", "group", "verb", "algorithm", "transport", "max_bytes")
_COUNTERS = {
    "calls": ("pycomm_calls", "Collectives that this rank has finished", 1.0),
    "bytes": ("pycomm_bytes", "Bytes of their buffers", 1.0),
    "wire_bytes": ("pycomm_wire_bytes", "Bytes that this rank's link had to carry", 1.0),
    "total_us": ("pycomm_seconds", "Time spent in them", 1e-6),
}
_QUANTILES = {"p50_us": "0.5", "p90_us": "0.9", "p99_us": "0.99"}


def write_json_lines(file: TextIO) -> int:
    """Writes one line for each class of calls so far, with the rank and the time; returns how many."""
    board = own_board()
    rank, now_s = -1 if board is None else board.rank, time.time()
    entries = snapshot()
    for entry in entries:
        file.write(json.dumps({"time_s": now_s, "rank": rank, **entry}) + "\n")
    return len(entries)


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise NativeUnavailableError(
            "prometheus-client is not installed; add it with: pip install 'pycomm[monitor]'"
        ) from error
    return prometheus_client


class _Collector:
    """Makes metrics of the snapshot whenever Prometheus asks, so that nothing runs in between."""

    def collect(self) -> Iterator[Any]:
        """Yields the metric families."""
        core = _client().core
        board = own_board()
        rank = "" if board is None else str(board.rank)
        entries = [(_labels(entry, rank), entry) for entry in snapshot()]
        for field, (name, text, scale) in _COUNTERS.items():
            counter = core.CounterMetricFamily(name, text, labels=_LABELS)
            for labels, entry in entries:
                counter.add_metric(labels, entry[field] * scale)  # type: ignore[literal-required]
            yield counter
        quantiles = core.GaugeMetricFamily(
            "pycomm_call_seconds", "Quantiles of the time of a call", labels=(*_LABELS, "quantile")
        )
        busbw = core.GaugeMetricFamily("pycomm_busbw_bytes_per_second", "Bus bandwidth so far", labels=_LABELS)
        for labels, entry in entries:
            for field, quantile in _QUANTILES.items():
                quantiles.add_metric([*labels, quantile], entry[field] * 1e-6)  # type: ignore[literal-required]
            busbw.add_metric(labels, entry["busbw_gbps"] * 1e9)
        yield quantiles
        yield busbw


def _labels(entry: CollectiveStats, rank: str) -> list[str]:
    return [rank, *(str(entry[field]) for field in _LABELS[1:])]  # type: ignore[literal-required]


def prometheus_registry() -> CollectorRegistry:
    """Returns a registry with this rank's figures. Raises NativeUnavailableError without prometheus-client."""
    registry: CollectorRegistry = _client().CollectorRegistry()
    registry.register(_Collector())
    return registry


def serve_prometheus(port: int, address: str = "127.0.0.1") -> int:
    """Serves this rank's figures over HTTP, from threads of prometheus-client; returns the port (0 picks a free one).

    Each rank of a host needs a port of its own. The default address is reached from this host alone.
    """
    server, _ = _client().start_http_server(port, addr=address, registry=prometheus_registry())
    return int(server.server_port)


def write_prometheus(path: str | os.PathLike[str]) -> None:
    """Writes this rank's figures for node_exporter's textfile collector, in one step."""
    _client().write_to_textfile(os.fspath(path), prometheus_registry())
