"""How long a plan takes on given links: rounds, each as long as its busiest link, and segments that overlap.

[Note: the cost model]
Two ranks are at a distance: on one host, in one rack, or across racks. A distance has a latency, the bandwidth of one
rank, and a bandwidth that some ranks share: those of a host its memory; those of a host, for all that leaves it, the
host's link; those of a rack, for all that leaves it, the rack's uplink. Links carry both directions at once. A rank
also takes time for each message and for adding.
A round takes the latency of its longest way and the time of its busiest resource. One instance of a plan takes the sum
of its rounds. With segments several instances overlap: after the first has gone through, each further one costs the
time that the busiest resource works for it in all rounds together, or, if that is more, its share of the latency that
the instances in flight cannot hide.
Hockney, The communication challenge for MPP, Parallel Computing 1994 (latency and bandwidth); Thakur, Rabenseifner and
Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005 (rounds).

[Note: counts and symmetry]
``profile`` says what each resource has to do. Up to ``COUNTED_RANKS`` ranks it counts the plans of all. In larger
worlds it counts those of some ranks, whole hosts of the root's rack first, and takes the others to be like them; a
round in which none of them is busy is taken to be like the one before or after it. That is exact where all hosts do the
same, and an estimate in trees and chains. ``Profile.method`` says which it was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..topology import Topology
from . import Algorithm
from .plan import Outline, Plan, Recv, Reduce, Round

__all__ = ["COUNTED_RANKS", "Level", "LinkModel", "Load", "Profile", "Step", "predict", "profile", "seconds"]

COUNTED_RANKS = 256
_SAMPLED_ACTIONS = 150_000  # in larger worlds: no further plan is counted after so many; about a second
IN_FLIGHT = 4  # instances of a plan that the executor keeps under way


@dataclass(frozen=True, kw_only=True)
class Level:
    """The links at one distance. ``shared_bytes_per_s`` is what all ranks of a host, or of a rack, have together."""

    latency_s: float
    bytes_per_s: float
    shared_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """The links of a machine room, how fast a rank adds, and how long a message keeps it busy, whatever its size.

    ``factors``, by "VERB ALGORITHM", are what measured times were of those that the rest of the model gives: pairs
    (bytes, factor), smallest first.
    """

    host: Level
    rack: Level
    far: Level
    added_bytes_per_s: float = math.inf
    message_s: float = 0.0
    factors: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @property
    def levels(self) -> tuple[Level, Level, Level]:
        """By ``Topology.distance``."""
        return self.host, self.rack, self.far

    def factor(self, verb: str, algorithm: str, nbytes: float) -> float:
        """Returns the factor for ``nbytes``: between known ones in proportion (of logarithms), else 1."""
        points = self.factors.get(f"{verb} {algorithm}") or ((1, 1.0),)
        right = next((at for at, (size, _) in enumerate(points) if size > nbytes), len(points))
        if right in (0, len(points)):
            return points[max(right - 1, 0)][1]
        (low, first), (high, last) = points[right - 1 : right + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return first * math.pow(last / first, share)


class Load(NamedTuple):
    """What one rank does in a round, or in all: bytes by distance and bytes added, as fractions of the whole buffer."""

    sent: tuple[float, float, float] = (0.0, 0.0, 0.0)
    received: tuple[float, float, float] = (0.0, 0.0, 0.0)
    added: float = 0.0
    messages: float = 0.0

    def plus(self, other: Load, times: float = 1) -> Load:
        """Returns the sum of this and ``times`` times the other."""
        (a, b, c), (d, e, f), added, messages = self
        (u, v, w), (x, y, z), more_added, more_messages = other
        sent = a + times * u, b + times * v, c + times * w
        received = d + times * x, e + times * y, f + times * z
        return Load(sent, received, added + times * more_added, messages + times * more_messages)


class Step(NamedTuple):
    """``repeats`` rounds that cost the same: the different loads of ranks, and the sums of those of hosts and racks."""

    repeats: int
    ranks: frozenset[Load]
    hosts: frozenset[Load]
    racks: frozenset[Load]

    @property
    def distance(self) -> int:
        """The longest way of a message; -1 if there is none."""
        return max((far for load in self.ranks for far in range(3) if load.sent[far] or load.received[far]), default=-1)

    def busy_s(self, model: LinkModel, nbytes: float) -> float:
        """Returns how long the busiest resource works for one such round."""
        rates = [level.bytes_per_s for level in model.levels]
        shared = [level.shared_bytes_per_s for level in model.levels]
        longest = 0.0
        for load in self.ranks:
            wire_s = max(_over(load.sent, rates), _over(load.received, rates)) + load.added / model.added_bytes_per_s
            longest = max(longest, nbytes * wire_s + load.messages * model.message_s)
        for load in self.hosts:
            link = max(sum(load.sent[1:]), sum(load.received[1:])) / shared[1]
            longest = max(longest, nbytes * link, nbytes * load.sent[0] / shared[0])
        for load in self.racks:
            longest = max(longest, nbytes * max(load.sent[2], load.received[2]) / shared[2])
        return longest


def _over(fractions: Iterable[float], rates: Sequence[float]) -> float:
    return sum(fraction / rate for fraction, rate in zip(fractions, rates))


class Profile(NamedTuple):
    """What a plan asks of the links, whatever they are: its rounds, and all of them together (``total``).

    ``method`` is "counted" or "symmetry".
    """

    steps: tuple[Step, ...]
    total: Step
    method: str

    @property
    def rounds(self) -> int:
        """The number of rounds in which anything is sent."""
        return sum(step.repeats for step in self.steps)


def seconds(profile: Profile, model: LinkModel, nbytes: float, segments: int = 1) -> float:
    """Returns the time of a plan for ``nbytes``, the bytes of the largest buffer of the call, cut into ``segments``."""
    part = nbytes / segments
    levels = model.levels
    instance_s = sum(
        step.repeats * (levels[step.distance].latency_s + step.busy_s(model, part)) for step in profile.steps
    )
    further_s = max(profile.total.busy_s(model, part), instance_s / IN_FLIGHT)
    return instance_s + (segments - 1) * further_s


def predict(
    algorithm: Algorithm, verb: str, topology: Topology, model: LinkModel, nbytes: float, *, root: int = 0,
    segments: int = 1,
) -> float:  # fmt: skip
    """Returns the seconds that ``verb`` of ``nbytes`` takes. Raises PlanError where the algorithm has no plan."""
    factor = model.factor(verb, algorithm.name, nbytes)
    return factor * seconds(profile(algorithm, verb, topology, root), model, nbytes, segments)


@lru_cache(maxsize=256)
def profile(algorithm: Algorithm, verb: str, topology: Topology, root: int = 0) -> Profile:
    """Returns what the plans of ``verb`` ask of the links. Raises PlanError where the algorithm has none."""
    plan = algorithm.plan(verb, root, topology, root)
    n = topology.world_size
    if n <= COUNTED_RANKS:
        plans = [algorithm.build(verb, rank, topology, root) if rank != root else plan for rank in range(n)]
        return _Count(topology, _chunks(verb, plan)).profile(_aligned(plans), "counted")
    sample = _sample(topology, root)
    count = _Count(topology, _chunks(verb, plan))
    outlines = algorithm.outline(verb, sample, topology, root)
    if outlines is None:
        plans, left = [plan], _SAMPLED_ACTIONS - _actions(plan)
        for rank in sample[1:]:
            if left < 0:
                break
            plans.append(algorithm.build(verb, rank, topology, root))
            left -= _actions(plans[-1])
        sample = [plan.rank for plan in plans]
        outlines = _aligned(plans)
    count.stand_for_all(sample, root)
    return count.profile(outlines, "symmetry")


def _chunks(verb: str, plan: Plan) -> int:
    """Returns how many chunks the whole buffer is cut into."""
    if verb in ("gather", "scatter", "barrier"):
        return plan.world_size
    return max(plan.input_chunks, plan.output_chunks)


def _actions(plan: Plan) -> int:
    return len(plan.rounds) + sum(len(round_.transfers) for round_ in plan.rounds)


def _aligned(plans: Sequence[Plan]) -> list[Outline]:
    rounds = []
    for number in range(len(plans[0].rounds)):
        busy = {plan.rank: plan.rounds[number] for plan in plans if plan.rounds[number].transfers}
        rounds.append(Outline(1, busy, 1))
    return rounds


def _sample(topology: Topology, root: int) -> list[int]:
    """Returns ranks to go by: the root, whole hosts of its rack, and the ranks 1, 2, 4, ... after it.

    The last are those that high branches of trees start from.
    """
    n = topology.world_size
    spine = [(root + (1 << step)) % n for step in range((n - 1).bit_length())]
    hosts = _sampled_hosts(topology, root)
    return list(dict.fromkeys([root, *(rank for host in hosts for rank in topology.hosts[host]), *spine]))


def _sampled_hosts(topology: Topology, root: int) -> tuple[int, int, int]:
    """Returns the root's host, the last of its rack, and an ordinary one; in a small rack they may be the same."""
    first = topology.host_of(root)
    rack = topology.racks[topology.rack_of(first)]
    return first, rack[-1], rack[len(rack) // 2]


class _Count:
    """Adds up the loads of ranks, hosts and racks."""

    def __init__(self, topology: Topology, chunks: int) -> None:
        self._topology = topology
        self._chunks = chunks
        self._is_sample = False
        # For how many a counted one stands: a rank on its host, a host in its rack.
        self._rank_weights: dict[int, float] = {}
        self._host_weights: dict[int, float] = {}

    def stand_for_all(self, sample: Sequence[int], root: int) -> None:
        """Takes the ranks of a host, and the hosts of the root's rack, that are not in ``sample`` to be like others."""
        self._is_sample = True
        topology = self._topology
        first, last, ordinary = hosts = _sampled_hosts(topology, root)
        rack = topology.racks[topology.rack_of(first)]
        counted = {host: [rank for rank in topology.hosts[host] if rank in sample] for host in rack}
        for host, ranks in counted.items():
            for rank in ranks:  # a lone rank of another host speaks for itself: the others stand for its host
                self._rank_weights[rank] = len(topology.hosts[host]) / len(ranks) if host in hosts else 0
        if not counted[ordinary]:
            ordinary = last if counted[last] else first
        self._host_weights[ordinary] = 1 + len(rack) - sum(bool(counted[host]) for host in set(hosts))

    def profile(self, outlines: Iterable[Outline], method: str) -> Profile:
        """Returns the profile of a plan of these rounds."""
        steps: list[Step] = []
        totals: dict[int, Load] = defaultdict(Load)
        unseen = 0  # rounds of which the sample knows nothing, since the last step
        for repeats, rounds, turns in outlines:
            if not rounds:
                unseen += self._is_sample
                continue
            loads = {rank: self._load(rank, round_) for rank, round_ in rounds.items()}
            for rank, load in loads.items():
                totals[rank] = totals[rank].plus(load, turns)
            step = self._step(repeats, loads)
            # Whole hosts are in the sample, so what it does not see goes between hosts.
            if unseen and steps and 0 < steps[-1].distance <= (step.distance or 2):
                steps[-1] = steps[-1]._replace(repeats=steps[-1].repeats + unseen)
            else:
                step = step._replace(repeats=repeats + unseen)
            unseen = 0
            if steps and steps[-1][1:] == step[1:]:
                step = step._replace(repeats=step.repeats + steps.pop().repeats)
            steps.append(step)
        if unseen and steps:
            steps[-1] = steps[-1]._replace(repeats=steps[-1].repeats + unseen)
        return Profile(tuple(steps), self._step(1, totals), method)

    def _step(self, repeats: int, loads: Mapping[int, Load]) -> Step:
        hosts: dict[int, Load] = defaultdict(Load)
        for rank, load in loads.items():
            host = self._topology.host_of(rank)
            hosts[host] = hosts[host].plus(load, self._rank_weights.get(rank, 1))
        racks: dict[int, Load] = defaultdict(Load)
        for host, load in hosts.items():
            rack = self._topology.rack_of(host)
            racks[rack] = racks[rack].plus(load, self._host_weights.get(host, 1))
        return Step(repeats, frozenset(loads.values()), frozenset(hosts.values()), frozenset(racks.values()))

    def _load(self, rank: int, round_: Round) -> Load:
        sent, received, added = [0, 0, 0], [0, 0, 0], 0
        for transfer in round_.transfers:
            way = received if isinstance(transfer, Recv) else sent
            way[self._topology.distance(rank, transfer.peer)] += transfer.chunk.span
        for action in round_.local:
            if isinstance(action, Reduce):
                added += (len(action.inputs) - 1) * action.output.span
        of = self._chunks
        return Load(
            (sent[0] / of, sent[1] / of, sent[2] / of),
            (received[0] / of, received[1] / of, received[2] / of),
            added / of,
            len(round_.transfers),
        )
