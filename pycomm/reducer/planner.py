"""Bucket sizes from measurements: when gradients arrive, and what an all_reduce of so many bytes takes.

    time of a bucket        latency_s + nbytes * s_per_byte        (two sizes are timed, the slowest rank counts)
    a bucket starts         when its last gradient is there and the bucket before it is done
    exposed                 end of the last bucket - end of the backward pass

That is for groups whose calls run beside the backward pass. Inside a host they do not (see ``Wire.of``): buckets are
sent at the end of it, and the best size is one whose gradients are still in a cache when they are brought into it:
``IN_LINE_BYTES``.
``benchmarks/engines.py --variants bucket_bytes=1MiB bucket_bytes=4MiB ...`` compares sizes on the machine at hand.

The size whose simulated step exposes least is taken; of sizes that are within 2 %, the largest, because each bucket
also costs something that is not in the model. All ranks use the same numbers, so all choose alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

import pycomm

from .layout import FIRST_BUCKET_BYTES, Slot, assign_buckets
from .reduce import Wire, start_mean

__all__ = ["IN_LINE_BYTES", "BackwardProfile", "BucketPlan", "Link", "exposed_s", "measure_link", "plan_buckets"]

IN_LINE_BYTES = 8 << 20
_SMALLEST_BYTES = 256 << 10
_PROBE_BYTES = (64 << 10, 4 << 20)
_PROBES = 5
_CLOSE = 1.02


class Link(NamedTuple):
    """What an all_reduce takes: ``latency_s + nbytes * s_per_byte``."""

    latency_s: float
    s_per_byte: float


class BucketPlan(NamedTuple):
    """The size to take, and the seconds that each size tried would expose. Kept as ``ddp.reducer.bucket_plan``."""

    bucket_bytes: int
    exposed_s: dict[int, float]
    link: Link


class BackwardProfile:
    """When each gradient arrived in one backward pass, in seconds since the first of them."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._times: list[float] = []

    def note(self, index: int) -> None:
        """The gradient of parameter ``index`` is there."""
        self.order.append(index)
        self._times.append(time.perf_counter())

    def restart(self) -> None:
        """Forgets the pass."""
        self.order, self._times = [], []

    def agreed_order(self, group: pycomm.Group, total: int) -> list[int]:
        """Returns rank 0's order of arrival on every rank; what has not arrived comes last. Collective."""
        missing = sorted(set(range(total)) - set(self.order), reverse=True)
        order = torch.tensor([*self.order, *missing], dtype=torch.int64, device=group.control_device)
        pycomm.broadcast(order, group=group, group_src=0)
        return list(order.tolist())

    def agreed_arrivals_s(self, group: pycomm.Group, total: int) -> list[float]:
        """Returns the mean over the ranks of each parameter's time of arrival. Collective."""
        start = self._times[0] if self._times else 0.0
        last = self._times[-1] - start if self._times else 0.0
        arrivals = torch.full((total,), last, dtype=torch.float64, device=group.control_device)
        for index, moment in zip(self.order, self._times):
            arrivals[index] = moment - start
        pycomm.all_reduce(arrivals, pycomm.ReduceOp.AVG, group)
        return list(arrivals.tolist())


def measure_link(wire: Wire) -> Link:
    """Times uncompressed all_reduces of two sizes on the group and returns the slowest rank's line. Collective."""
    plain = wire._replace(compression=None, is_async=False)
    times = []
    for nbytes in _PROBE_BYTES:
        flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=wire.group.control_device)
        start_mean(plain, flat, ())
        samples = []
        for _ in range(_PROBES):
            pycomm.barrier(wire.group)
            start = time.perf_counter()
            start_mean(plain, flat, ())
            samples.append(time.perf_counter() - start)
        times.append(median(samples))
    slowest = torch.tensor(times, dtype=torch.float64, device=wire.group.control_device)
    pycomm.all_reduce(slowest, pycomm.ReduceOp.MAX, wire.group)
    small_s, large_s = slowest.tolist()
    small, large = _PROBE_BYTES
    s_per_byte = max(large_s - small_s, 0.0) / (large - small)
    return Link(max(small_s - small * s_per_byte, 0.0), s_per_byte)


def exposed_s(
    buckets: Sequence[Sequence[int]], nbytes: Sequence[int], arrivals_s: Sequence[float], link: Link
) -> float:
    """Returns the simulated time from the last gradient to the end of the last bucket."""
    end_s = 0.0
    for bucket in buckets:
        start_s = max(end_s, max(arrivals_s[index] for index in bucket))
        end_s = start_s + link.latency_s + sum(nbytes[index] for index in bucket) * link.s_per_byte
    return end_s - max(arrivals_s)


def plan_buckets(slots: Sequence[Slot], arrivals_s: Sequence[float], link: Link) -> BucketPlan:
    """Returns the bucket size with the least exposed time for gradients that arrive at ``arrivals_s``."""
    nbytes = [slot.nbytes for slot in slots]
    order = sorted(range(len(slots)), key=lambda index: arrivals_s[index])
    candidates = [_SMALLEST_BYTES]
    while candidates[-1] < sum(nbytes):
        candidates.append(candidates[-1] * 2)
    exposed = {
        size: exposed_s(assign_buckets(slots, order, size, FIRST_BUCKET_BYTES), nbytes, arrivals_s, link)
        for size in candidates
    }
    best = min(exposed.values())
    return BucketPlan(max(size for size, each in exposed.items() if each <= best * _CLOSE), exposed, link)
