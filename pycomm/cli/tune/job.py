"""What every rank does to tune: probe, check, time, fit, and agree on rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ...algorithms.cost import LinkModel
from ...algorithms.tables import Rule, Span
from ...algorithms.tuned import Place, predict_call
from ...collectives.group import Group
from ...types import ReduceOp
from .fit import LARGE_FITTED_BYTES, Measured, fit, probe
from .measure import is_right, make_call, time_in_turns

__all__ = ["Effort", "Result", "candidates", "rules_of", "tune"]

_MARGIN = 0.95  # another algorithm must need less than this share of native's time to displace it


class Effort(NamedTuple):
    """How much to measure: rounds, the time of a turn, and how many of the algorithms that the model ranks first."""

    rounds: int
    turn_ms: float
    near: int


class Result(NamedTuple):
    """What was found, alike on all ranks."""

    place: Place
    links: LinkModel
    measured: list[Measured]
    rules: list[Rule]


def tune(
    group: Group, verbs: Sequence[str], sizes: Sequence[int], effort: Effort, note: Callable[[str], None]
) -> Result:
    """Tunes ``verbs`` for groups like ``group``, all of whose ranks call this.

    Raises PlanError where an algorithm gives a wrong result. ``note`` is told what goes on.
    """
    engine = group.engine
    topology = engine.selector.topology
    place = (group.transport.name, group.world_size, len(topology.hosts))
    links = probe(group)
    note(f"links: {links.host.latency_s * 1e6:.1f} us and {links.host.bytes_per_s / 1e9:.2f} GB/s inside a host")
    measured: list[Measured] = []
    for verb in verbs:
        for nbytes in sizes:
            names = candidates(group, verb, nbytes, links, effort.near)
            calls = {}
            for name in names:
                if not is_right(engine, group, verb, nbytes, name):
                    raise _wrong(name, verb, nbytes, place)
                calls[name] = make_call(engine, group, verb, nbytes, name)
            times = time_in_turns(group, calls, effort.rounds, effort.turn_ms)
            measured += [Measured(verb, nbytes, name, median(each)) for name, each in times.items()]
            best = min(measured[-len(names) :], key=lambda each: each.seconds)
            note(f"{verb} of {nbytes} B: {best.algorithm}, {best.seconds * 1e6:.1f} us, of {', '.join(names)}")
        links = fit(links, measured, topology, group.transport.segment_bytes)
    return Result(place, links, measured, list(rules_of(measured, place)))


def candidates(group: Group, verb: str, nbytes: int, links: LinkModel, near: int) -> list[str]:
    """Returns the algorithms worth timing: the transport's own, `direct`, and ``near`` that the model ranks first.

    From 1 MiB on, where the model is fitted, they are all that have a plan.
    """
    engine = group.engine
    topology, segment_bytes = engine.selector.topology, group.transport.segment_bytes

    def predicted(name: str) -> float:
        return predict_call(name, verb, topology, links, nbytes, segment_bytes=segment_bytes)

    import torch

    ranked = sorted(engine.selector.candidates(verb), key=predicted)
    is_native = group.transport.supports(verb, torch.float32, ReduceOp.SUM)
    near = len(ranked) if nbytes >= LARGE_FITTED_BYTES else near
    names = [*(["native"] if is_native else []), "direct", *ranked[:near]]
    return list(dict.fromkeys(names))


def rules_of(measured: Sequence[Measured], place: Place) -> Iterator[Rule]:
    """Yields the rules that say, for each collective, which algorithm was best around each measured size."""
    transport, ranks, hosts = place
    for verb in dict.fromkeys(each.verb for each in measured):
        sizes = sorted({each.nbytes for each in measured if each.verb == verb})
        best = [_best(each for each in measured if (each.verb, each.nbytes) == (verb, nbytes)) for nbytes in sizes]
        borders = [0, *(_between(a, b) for a, b in pairwise(sizes))]
        starts = [at for at in range(len(sizes)) if at == 0 or best[at] != best[at - 1]]
        for at, following in zip(starts, [*starts[1:], None], strict=True):
            span = Span(borders[at], None if following is None else borders[following])
            yield Rule(verb, transport, Span(ranks, ranks + 1), Span(hosts, hosts + 1), span, best[at], "tuned")


def _best(measured: Iterable[Measured]) -> str:
    times = {each.algorithm: each.seconds for each in measured}
    best = min(times, key=lambda name: times[name])
    return "native" if times.get("native", math.inf) * _MARGIN <= times[best] else best


def _between(smaller: int, larger: int) -> int:
    """Returns a size between two measured ones: a power of two where there is one."""
    return 1 << round((math.log2(smaller) + math.log2(larger)) / 2)


def _wrong(name: str, verb: str, nbytes: int, place: Place) -> Exception:
    from ...errors import PlanError

    transport, ranks, hosts = place
    return PlanError(
        f"{name} gives a wrong result: {verb} of {nbytes} B over {transport}, {ranks} ranks on {hosts} hosts; nothing "
        f"was stored. Take it out of the table, and report it"
    )


def as_dicts(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """Returns what is stored of the times."""
    return [each._asdict() for each in measured]
