"""Fits the link model of ``algorithms/cost.py`` to a job: first probes of the links, then the times of whole plans.

The probes exchange messages between pairs of ranks at each distance, and add. What they cannot see (what ranks share,
how long a message keeps a rank busy) comes from the measured plans: each number of the model in turn is moved by
smaller and smaller steps to where the sum of |log(predicted / measured)| is least.

[Note: factors]
The model has no term for copies that stay in a cache, ranks that wait for a core, and segments that overlap less than
they could. What that makes of an algorithm's time changes slowly with the size. So measured / predicted of each point
becomes a factor of that collective and algorithm around that size.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from ...algorithms.cost import Level, LinkModel
from ...algorithms.tuned import predict_call
from ...collectives.group import Group
from ...ops.reduce import reduce_
from ...topology import Topology
from ...types import ReduceOp
from .measure import most, time_in_turns

__all__ = ["LARGE_FITTED_BYTES", "Measured", "error_of", "fit", "probe"]

_SMALL_BYTES, _LARGE_BYTES = 8, 4 << 20
_TAG = 7
_STEPS = (4.0, 2.0, 1.5, 1.2, 1.08)
# What moves data counts in full; below, where the scheduler has its say, a little, so that latencies have a meaning.
_FITTED_BYTES, LARGE_FITTED_BYTES, _SMALL_WEIGHT = 16 << 10, 1 << 20, 0.15


class Measured(NamedTuple):
    """The median seconds of ``verb`` with buffers of ``nbytes`` by ``algorithm``."""

    verb: str
    nbytes: int
    algorithm: str
    seconds: float


def probe(group: Group) -> LinkModel:
    """Returns a first model of the links between the ranks of ``group``, all of which call this."""
    topology = group.engine.selector.topology
    host = _probe_level(group, _partners(topology, is_same_host=True))
    rack = _probe_level(group, _partners(topology, is_same_host=False)) if len(topology.hosts) > 1 else host
    left, right, total = torch.ones(3, _LARGE_BYTES // 4, dtype=torch.float32, device="cpu")
    start = time.perf_counter()
    for _ in range(5):
        reduce_(total, [left, right], ReduceOp.SUM)
    added_s = most(group, [(time.perf_counter() - start) / 5])[0]
    return LinkModel(
        host=host, rack=rack, far=rack, added_bytes_per_s=_LARGE_BYTES / added_s, message_s=host.latency_s / 4
    )


def fit(model: LinkModel, measured: Sequence[Measured], topology: Topology, segment_bytes: int) -> LinkModel:
    """Returns ``model`` moved to where it predicts ``measured`` best. Pure arithmetic: alike on all ranks."""
    model = replace(model, factors={})
    points = [each for each in measured if each.nbytes >= _FITTED_BYTES and each.algorithm != "native"]
    weights = [1.0 if each.nbytes >= LARGE_FITTED_BYTES else _SMALL_WEIGHT for each in points]

    def error(candidate: LinkModel) -> float:
        total = 0.0
        for weight, each in zip(weights, points, strict=True):
            total += weight * abs(math.log(_predicted(each, topology, candidate, segment_bytes) / each.seconds))
        return total

    least = error(model)
    knobs = _KNOBS if len(topology.hosts) > 1 else [*_KNOBS[:3], *_KNOBS[6:]]
    for step in _STEPS:
        is_better = True
        while is_better:
            is_better = False
            for knob in knobs:
                for factor in (step, 1 / step):
                    moved = knob(model, factor)
                    if (now := error(moved)) < least - 1e-6:
                        model, least, is_better = moved, now, True
    return replace(model, factors=_factors(model, points, topology, segment_bytes))


def _factors(
    model: LinkModel, points: Sequence[Measured], topology: Topology, segment_bytes: int
) -> dict[str, list[tuple[int, float]]]:
    """See [Note: factors]."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for each in sorted(points, key=lambda each: each.nbytes):
        ratio = each.seconds / _predicted(each, topology, model, segment_bytes)
        found[f"{each.verb} {each.algorithm}"].append((each.nbytes, ratio))
    return dict(found)


def error_of(model: LinkModel, measured: Sequence[Measured], topology: Topology, segment_bytes: int) -> list[float]:
    """Returns |predicted - measured| / measured of each, predicted without the factors of its own size."""
    errors = []
    for each in measured:
        others = {key: [point for point in found if point[0] != each.nbytes] for key, found in model.factors.items()}
        predicted = _predicted(each, topology, replace(model, factors=others), segment_bytes)
        errors.append(abs(predicted - each.seconds) / each.seconds)
    return errors


def _predicted(each: Measured, topology: Topology, model: LinkModel, segment_bytes: int) -> float:
    return predict_call(each.algorithm, each.verb, topology, model, each.nbytes, segment_bytes=segment_bytes)


def _partners(topology: Topology, *, is_same_host: bool) -> list[tuple[int, int]]:
    """Returns pairs of ranks that talk to each other at a time: neighbours on a host, or on two hosts."""
    if is_same_host:
        return [pair for ranks in topology.hosts for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    hosts = topology.hosts
    return [pair for a, b in zip(hosts[::2], hosts[1::2], strict=False) for pair in zip(a, b, strict=False)]


def _probe_level(group: Group, pairs: list[tuple[int, int]]) -> Level:
    peer = next((a + b - group.rank for a, b in pairs if group.rank in (a, b)), None)

    def exchange(nbytes: int) -> Callable[[], None]:
        sent, coming = torch.zeros(2, nbytes, dtype=torch.uint8, device="cpu")

        def call() -> None:
            if peer is not None:
                requests = group.transport.irecv(coming, peer, _TAG), group.transport.isend(sent, peer, _TAG)
                for request in requests:
                    request.wait()

        return call

    calls = {"small": exchange(_SMALL_BYTES), "large": exchange(_LARGE_BYTES)}
    times = {name: median(each) for name, each in time_in_turns(group, calls, 5, 5.0).items()}
    bytes_per_s = _LARGE_BYTES / max(times["large"] - times["small"], 1e-9)
    return Level(
        latency_s=max(times["small"], 1e-8),
        bytes_per_s=bytes_per_s,
        shared_bytes_per_s=bytes_per_s * max(1, len(pairs)) * 2,
    )


def _of_level(name: str, field: str) -> Callable[[LinkModel, float], LinkModel]:
    def move(model: LinkModel, factor: float) -> LinkModel:
        level = getattr(model, name)
        moved = replace(level, **{field: getattr(level, field) * factor})
        return replace(model, **({name: moved, "far": moved} if name == "rack" else {name: moved}))

    return move


def _of_rank(field: str) -> Callable[[LinkModel, float], LinkModel]:
    return lambda model, factor: replace(model, **{field: getattr(model, field) * factor})


_FIELDS = ("latency_s", "bytes_per_s", "shared_bytes_per_s")
_KNOBS: list[Callable[[LinkModel, float], LinkModel]] = [
    *(
        _of_level(name, field)
        for name in ("host", "rack")
        for field in ("latency_s", "bytes_per_s", "shared_bytes_per_s")
    ),
    _of_rank("added_bytes_per_s"),
    _of_rank("message_s"),
]
