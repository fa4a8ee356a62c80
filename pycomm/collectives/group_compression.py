"""What a group knows of compression: the compressors it was asked for by text, their state, and what they moved."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.executor import Collective
from ..compression import Compressor, Part, checked_spec, parse
from ..compression.wrappers.error_feedback import ErrorFeedback
from ..errors import CheckpointError, ConfigError, PycommError, TransportError
from ..types import ReduceOp
from . import compressed
from .auto_compression import STATEFUL, WARM_UP_CALLS, AutoCompression, AutoDecision
from .compression_wire import CompressionReport, Timer, Tools, Wire, Workspace

if TYPE_CHECKING:
    from .call import Call
    from .group import Group

__all__ = ["GroupCompression"]


class GroupCompression:
    """The compression of one group's calls; ``Group.compression``.

    ``last`` reports on the last compressed call of this rank, ``total`` on all. ``measure_error`` (the same on all
    ranks) lets each call also run exactly, to fill ``last.relative_error``: for looking, not for training.
    """

    def __init__(self, group: Group) -> None:
        self.last = CompressionReport()
        self.total = CompressionReport()
        self.measure_error = False
        self._group = group
        self._hosts: tuple[Group, Group] | None = None  # the ranks of this host; those with this local rank
        self._auto = AutoCompression()
        self._compressors: dict[str, Compressor] = {}
        self._holders: dict[str, weakref.ref[Any]] = {}  # by the key of its state
        self._workspace = Workspace()
        self._executor: ThreadPoolExecutor | None = None
        self._calls = 0

    @property
    def decisions(self) -> list[AutoDecision]:
        """What compression="auto" decided in this group, with the numbers; ``str`` of one tells it."""
        return self._auto.decisions

    def compressor(self, spec: Any) -> Compressor:
        """Returns the compressor of a text: the same one each time, so that its state goes on. Raises ConfigError."""
        if isinstance(spec, Compressor):
            return spec
        found = self._compressors.get(spec)
        if found is None:
            found = self._compressors[spec] = parse(spec)
        return found

    def key_of(self, name: str, holder: Any) -> str:
        """Returns by which name compressors are to keep the state of ``holder``, such as a parameter, called ``name``.

        State goes on under a name, whatever bucket it is in and in a checkpoint. But several engines of a group may
        have parameters of one name: those of two critics, or of a generator and a discriminator. What is owed to one
        must not be delivered to the other. So it is ``name`` for the first holder of that name, ``"2:name"`` for the
        second, and so on; the same holder keeps its own, and nobody gets that of one that is gone. All ranks make their
        engines in the same order, so they agree.
        """
        keys = itertools.chain([name], (f"{number}:{name}" for number in itertools.count(2)))
        return next(key for key in keys if self._holders.setdefault(key, weakref.ref(holder))() is holder)

    def check(self, verb: str, op: ReduceOp | None, named: Iterable[tuple[str, torch.dtype]], spec: Any) -> None:
        """Raises ConfigError if ``spec``, a checked one, cannot compress ``verb`` of tensors of such names and dtypes.

        For engines, which make the calls later, to say so where ``spec`` was given.
        """
        if spec == "auto":
            return
        compressor = self.compressor(spec)
        for name, dtype in named:
            compressed.check_kind(verb, dtype, op, compressor, [Part(name, (1,))])

    def explain(self, verb: str, numel: int, dtype: torch.dtype, op: ReduceOp | None, spec: Any) -> str:
        """Says what compresses ``verb`` with a largest buffer of ``numel`` elements, and why. Raises ConfigError."""
        if spec != "auto":
            return f"Compressed by {self.compressor(checked_spec(spec)).spec}, as the caller asks."
        reason = compressed.why_not(verb, dtype, op)
        if reason is not None:
            return f"Compression auto: none, because no compressor takes such calls: {reason}."
        share = self._group.world_size if verb == "all_gather_single" else 1
        kind = verb, numel // share * dtype.itemsize, str(dtype).removeprefix("torch.")
        found = [str(each) for each in self.decisions if each[:3] == kind]
        if not found:
            return f"Compression auto has not decided on such calls yet: the first {WARM_UP_CALLS} are measured."
        return "\n".join(f"Compression auto, {each}" for each in found)

    def prepare(self, call: Call) -> Callable[[float], CompressionReport] | None:
        """Checks ``call`` and returns what runs it within a timeout in seconds; None where "auto" never compresses.

        Raises ConfigError, and PlanError for an ``algorithm`` that cannot carry what the compressor sends.
        """
        first, is_auto = call.collectives[0], call.compression == "auto"
        algorithm = None if call.algorithm == "auto" else call.algorithm
        if is_auto and compressed.why_not(first.verb, first.dtype, first.op) is not None:
            return None
        compressor = self.compressor("none" if is_auto else call.compression)
        checked = compressed.check_call(call.verb, call.collectives, compressor, call.parts, call.name)
        is_split = self.is_between_hosts(checked, algorithm)
        if is_split:
            self._join_hosts()
        if is_auto and algorithm is not None:
            self._group.engine.choose(first, algorithm)  # raises, as a plain call does
        elif not is_auto and not is_split:
            self._check_carried(checked, algorithm)
        run = self._run_auto if is_auto else self._run
        return lambda timeout_s: run(checked, algorithm, timeout_s, is_split)

    def is_between_hosts(self, call: compressed.Squeezed, algorithm: str | None) -> bool:
        """Says whether ``call`` is compressed between hosts only: if asked by algorithm="hierarchical", and by default.

        Raises ConfigError if it is asked and cannot be.
        """
        if call.collective.verb != "all_reduce" or algorithm not in (None, "hierarchical"):
            return False
        hosts = self._group.engine.selector.topology.hosts
        reason = ""
        if len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1:
            reason = f"expected several hosts with equally many ranks, got hosts of {[len(ranks) for ranks in hosts]}"
        elif not all(each.is_for_shards for each, _ in call.compressor.routes(call.parts)):
            reason = f"compression {call.compressor.spec!r} has to see each rank's own tensor, not the sum of a host"
        if reason and algorithm == "hierarchical":
            raise ConfigError(f"algorithm 'hierarchical' with compression: {reason}; leave the algorithm to 'auto'")
        return not reason and len(hosts[0]) > 1

    def _check_carried(self, call: compressed.Squeezed, algorithm: str | None) -> None:
        """Raises ConfigError or PlanError unless ``algorithm`` serves what carries ``call``."""
        algorithm = _of_payloads(call.collective.verb, algorithm)
        if algorithm is not None:
            for each in compressed.payloads(call):
                self._group.engine.choose(each, algorithm)

    def _is_carried(self, call: compressed.Squeezed, algorithm: str | None, spec: str) -> bool:
        """Says whether ``algorithm`` serves what carries ``call`` if ``spec`` compresses it."""
        try:
            self._check_carried(call._replace(compressor=parse(spec)), algorithm)
        except PycommError:
            return False
        return True

    def _join_hosts(self) -> None:
        """Makes the two groups that compression between hosts works on. Called by all ranks, in the caller's thread."""
        if self._hosts is None:
            group, topology = self._group, self._group.engine.selector.topology
            local_rank = topology.local_rank_of(group.rank)
            neighbours = topology.hosts[topology.host_of(group.rank)]
            peers = [ranks[local_rank] for ranks in topology.hosts]
            inside = group.subgroup(neighbours, f"{group.name}.inside", with_all=True)
            between = group.subgroup(peers, f"{group.name}.between", with_all=True)
            assert inside is not None and between is not None, "this rank is in both"
            self._hosts = inside, between
            for part in self._hosts:
                part.transport.look_also_at(group.transport)

    def _leave_hosts(self, verb: str) -> None:
        """Closes the two groups after a failure in one of them, so that who waits for this rank in the other is told.

        Raises PeerLostError if this group knows what happened: its ranks are those that the caller knows.
        """
        for group in self._hosts or ():
            group.close()
        self._group.transport.check_lost(verb)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the compressors that were asked for by text, each by its text: this rank's, for a
        checkpoint, after all calls so far."""
        self._group.settle()
        stateful = {spec: each.state_dict() for spec, each in self._compressors.items() if each.is_stateful}
        return {"compressors": stateful, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` returned, or ``merge_states`` made of those of all ranks of another world; a
        compressor that it does not have begins anew. Raises CheckpointError, with nothing changed.
        """
        if set(state) != {"compressors", "calls"}:
            raise CheckpointError(
                f"expected the state of a group's compression, with 'compressors' and 'calls', got {sorted(state)}"
            )
        self._group.settle()
        states, calls = dict(state["compressors"]), int(state["calls"])
        for spec, each in states.items():
            parse(spec).load_state_dict(each)
        for spec in {**self._compressors, **states}:
            self.compressor(spec).load_state_dict(states.get(spec, parse(spec).state_dict()))
        self._calls = calls

    def close(self) -> None:
        """Ends the helper thread, once it is idle."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def _run_auto(
        self, call: compressed.Squeezed, algorithm: str | None, timeout_s: float, is_split: bool
    ) -> CompressionReport:
        return self._auto.run(
            call,
            algorithm,
            self._wire(call, algorithm, timeout_s, is_split),
            lambda: self._run_plain(call, algorithm, timeout_s, is_split),
            lambda spec: self._run(call._replace(compressor=self.compressor(spec)), algorithm, timeout_s, is_split),
            lambda spec: is_split or self._is_carried(call, algorithm, spec),
        )

    def _run_plain(self, call: compressed.Squeezed, algorithm: str | None, timeout_s: float, is_split: bool) -> None:
        """Runs ``call`` uncompressed, with what a candidate that "auto" gave up still owes of its tensors."""
        for spec in STATEFUL:
            given_up = self._compressors.get(spec)
            if isinstance(given_up, ErrorFeedback) and given_up.owes(call.parts):
                self._run(call._replace(compressor=given_up.exactly()), algorithm, timeout_s, is_split)
                given_up.forget(call.parts)
                return
        self._group.engine.execute(call.collective, algorithm, timeout_s)

    def _run(
        self, call: compressed.Squeezed, algorithm: str | None, timeout_s: float, is_split: bool
    ) -> CompressionReport:
        """Runs a checked call, in the thread whose turn it is; ``is_split``: compressing between hosts only."""
        start_ns = time.perf_counter_ns()
        wire = self._wire(call, algorithm, timeout_s, is_split)
        source = call.collective.input
        assert source is not None, "checked before"
        exact = source.to(torch.float32, copy=True) if self.measure_error else None
        seed = self._calls + 1
        compressed.agree(call, wire, seed, ", measuring the error" if self.measure_error else "")
        self._calls = seed  # no sooner: a rank that called something else has counted nothing
        try:
            compressed.run(call, wire, seed)
        except TransportError:
            if is_split:
                self._leave_hosts(call.collective.verb)
            raise
        timer, carrier = wire.timer, wire.between or wire
        share = wire.inside.world_size if wire.inside is not None else 1
        report = CompressionReport(
            calls=1,
            logical_bytes=_plain_bytes(call.collective, carrier.world_size) // share,
            wire_bytes=carrier.sent_bytes,
            encode_s=timer.encode_ns / 1e9,
            exchange_s=timer.exchange_ns / 1e9,
            decode_s=timer.decode_ns / 1e9,
            wall_s=(time.perf_counter_ns() - start_ns) / 1e9,
        )
        if exact is not None:
            error = _relative_error(call.collective, exact, self._wire(call, None, timeout_s))
            report = report._replace(relative_error=error)
        self.last, self.total = report, self.total.plus(report)
        return report

    def _wire(self, call: compressed.Squeezed, algorithm: str | None, timeout_s: float, is_split: bool = False) -> Wire:
        tools = Tools(self._workspace, Timer(), self._pool)
        wire = Wire(self._group, tools, _of_payloads(call.collective.verb, algorithm), timeout_s)
        if is_split:
            assert self._hosts is not None, "made by prepare"
            wire.inside, wire.between = (Wire(group, tools, None, timeout_s) for group in self._hosts)
        return wire

    def _pool(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="pycomm-codec")
        return self._executor


def _of_payloads(verb: str, algorithm: str | None) -> str | None:
    """Returns the algorithm that payloads go by where the caller asks for ``algorithm``; None: it is open.

    For an all_reduce "hierarchical" says which links are compressed.
    """
    return None if algorithm == "hierarchical" and verb == "all_reduce" else algorithm


def _plain_bytes(collective: Collective, world_size: int) -> int:
    """Returns what a rank sends of an uncompressed collective, by an algorithm that sends no byte twice."""
    assert collective.input is not None
    nbytes = collective.input.nbytes
    if collective.verb == "all_gather_single":
        return nbytes * (world_size - 1)
    rounds = 2 if collective.verb == "all_reduce" else 1
    return rounds * nbytes * (world_size - 1) // world_size


def _relative_error(collective: Collective, exact: torch.Tensor, wire: Wire) -> float:
    """Returns |result - exact| / |exact|, after reducing (or gathering) ``exact``, this rank's input, in float32."""
    assert collective.output is not None
    reference = torch.empty(collective.output.numel(), dtype=torch.float32, device=exact.device)
    if collective.verb == "all_gather_single":
        wire.all_gather(reference, exact)
    elif collective.verb == "reduce_scatter_single":
        wire.reduce_scatter(reference, exact)
    else:
        reference = exact
        wire.all_reduce(reference)
    if collective.op is ReduceOp.AVG:
        reference.div_(wire.world_size)
    difference = (collective.output.to(torch.float32) - reference).norm().item()
    scale = reference.norm().item()
    return difference / scale if scale else float(difference > 0)
