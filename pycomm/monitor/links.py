"""Latency and bandwidth between every two ranks, measured by messages, and which links are slow."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from ..collectives.context import resolve
from ..collectives.group import Group
from ..collectives.p2p import recv, send
from ..collectives.verbs import all_gather_single, barrier

__all__ = ["Links", "measure_links", "slow_links"]

_TAG = 31_001
_SMALL_BYTES = 8
_SLOW_FACTOR = 2.0  # so many times worse than the median link


class Links(NamedTuple):
    """``latency_us[i][j]``: one way, between ranks i and j; ``bandwidth_gbps[i][j]`` in GB/s. The diagonals are 0."""

    latency_us: list[list[float]]
    bandwidth_gbps: list[list[float]]


def measure_links(group: Group | None = None, nbytes: int = 1 << 20, seconds_a_pair: float = 0.1) -> Links:
    """Measures one pair of ranks after another, so that they do not disturb each other. Called by every rank.

    Half of a round trip, the median of as many as ``seconds_a_pair`` allows: for messages of 8 bytes, then of
    ``nbytes``. The same on every rank.
    """
    found = resolve(group)
    mine = torch.zeros(2 * found.world_size, dtype=torch.float64, device="cpu")
    for low in range(found.world_size):
        for high in range(low + 1, found.world_size):
            barrier(found)
            if found.rank in (low, high):
                peer = high if found.rank == low else low
                is_first = found.rank == low
                small_s = _half_trip_s(found, peer, is_first, _SMALL_BYTES, seconds_a_pair / 2)
                large_s = _half_trip_s(found, peer, is_first, nbytes, seconds_a_pair / 2)
                mine[2 * peer] = small_s * 1e6
                mine[2 * peer + 1] = nbytes / large_s / 1e9
    device = found.control_device
    table = torch.empty(found.world_size * mine.numel(), dtype=torch.float64, device=device)
    all_gather_single(table, mine.to(device), found)
    pairs = table.cpu().view(found.world_size, found.world_size, 2)
    rows = torch.triu(pairs.permute(2, 0, 1))  # as the lower rank of each pair saw it
    both = rows + rows.transpose(1, 2)
    return Links(both[0].tolist(), both[1].tolist())


def _half_trip_s(group: Group, peer: int, is_first: bool, nbytes: int, limit_s: float) -> float:
    """Plays ping-pong with ``peer``; the lower rank says how often. Returns half of a round trip."""
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=group.control_device)
    go_on = torch.ones(1, dtype=torch.uint8, device=group.control_device)
    trips: list[float] = []
    end_s = time.perf_counter() + limit_s
    while True:
        if is_first:
            go_on[0] = len(trips) < 3 or time.perf_counter() < end_s
            send(go_on, group=group, group_dst=peer, tag=_TAG)
        else:
            recv(go_on, group=group, group_src=peer, tag=_TAG)
        if not go_on.item():
            return median(trips[1:]) if trips[1:] else 0.0
        start_s = time.perf_counter()
        if is_first:
            send(payload, group=group, group_dst=peer, tag=_TAG)
            recv(payload, group=group, group_src=peer, tag=_TAG)
        else:
            recv(payload, group=group, group_src=peer, tag=_TAG)
            send(payload, group=group, group_dst=peer, tag=_TAG)
        trips.append((time.perf_counter() - start_s) / 2)


def slow_links(links: Links) -> list[tuple[int, int, str]]:
    """Returns (rank, rank, what) of the links that are at least twice as bad as the median link."""
    pairs = [(i, j) for i in range(len(links.latency_us)) for j in range(i)]
    found = []
    for what, unit, matrix in (("latency", "us", links.latency_us), ("bandwidth", "GB/s", links.bandwidth_gbps)):
        usual = median(matrix[i][j] for i, j in pairs) if pairs else 0.0
        for i, j in pairs:
            value = matrix[i][j]
            worse = value / usual if what == "latency" else usual / value if value else float("inf")
            if worse > _SLOW_FACTOR:
                found.append((j, i, f"{what} {value:.3g} {unit}, the median link has {usual:.3g}"))
    return found
