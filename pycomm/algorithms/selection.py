"""Which algorithm serves a call: what the caller names, else what the first rule of the table says that fits.

The choice depends on nothing but what is equal on all ranks: the call's collective, element type, operator and size,
the group's transport and hosts, and the table, whose digests the ranks compare before they use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import env
from ..errors import ConfigError, PlanError, PycommError
from ..topology import Topology
from . import ALGORITHMS, find_algorithm
from ._agreement import FRAMES, fits_frames, may_use_frames, room_for
from .plan import Plan
from .tables import Rule, Table, parse_rules
from .tuned import load_rules

if TYPE_CHECKING:
    from ..transport.base import Transport
    from .executor import Collective

__all__ = ["DEFAULT_RULES", "Choice", "Selector", "load_table"]

DEFAULT_RULES = parse_rules(
    """
    *  mixed  *  *  *  native
    *  mixed  *  2-  *  hierarchical
    all_reduce  mpi  2-4  1  16MiB-  ring
    *  *  *  *  *  native
    *  *  *  *  *  direct
    """,
    "default",
)


class Choice(NamedTuple):
    """The name of what serves a call, its plan (None: the transport's own collective), and the rule that says so.

    The rule is None if the caller named the algorithm.
    """

    name: str
    plan: Plan | None
    rule: Rule | None = None


class Selector:
    """Chooses for the calls of one group. The same on all of its ranks."""

    def __init__(self, transport: Transport, topology: Topology, table: Table) -> None:
        self.topology = topology
        self.table = table
        self._transport = transport
        self._rules: dict[str, tuple[Rule, ...]] = {}

    def choose(self, call: Collective, algorithm: str | None = None) -> Choice:
        """Returns what serves ``call``; ``algorithm`` is what the caller asks for, None and "auto" leave it open.

        Raises ConfigError for an unknown name and for "native" where the transport does not carry the call, PlanError
        for an algorithm that has no plan for it in this group.
        """
        if algorithm is not None and algorithm != "auto":
            self._check(call, algorithm)
            return Choice(algorithm, self._plan(algorithm, call))
        nbytes = call.whole_bytes(self._transport.world_size)
        for rule in self.rules(call.verb):
            if rule.source == "default" and fits_frames(self._transport, call):
                return Choice(FRAMES, None, rule)  # the ranks compare what they call anyway; here that is all it takes
            if rule.fits_bytes(nbytes) and (rule.algorithm != "native" or self._is_native(call)):
                return Choice(rule.algorithm, self._plan(rule.algorithm, call), rule)
        raise AssertionError("the last default rule fits everything")

    def rules(self, verb: str) -> tuple[Rule, ...]:
        """Returns the rules for ``verb`` in this group, in order. Raises PlanError, ConfigError as ``choose``."""
        rules = self._rules.get(verb)
        if rules is None:
            place = self._transport.name, self._transport.world_size, len(self.topology.hosts)
            named = [rule for rule in self.table.rules if rule.is_for(verb, *place)]
            rules = self._rules[verb] = tuple(rule for rule in named if self._can_serve(rule, verb))
        return rules

    def is_always_native(self, verb: str) -> bool:
        """Says whether the transport's own collective serves ``verb`` at every size, if it carries the call."""
        for rule in self.rules(verb):
            if rule.algorithm != "native":
                return False
            if rule.fits_bytes(None):
                return True
        return False

    def is_native_at(self, verb: str, nbytes: int) -> bool:
        """Says whether the transport's own collective serves ``verb`` at this size, if it carries the call."""
        return next(rule.algorithm for rule in self.rules(verb) if rule.fits_bytes(nbytes)) == "native"

    def room_for_frames(self, verb: str) -> int:
        """Returns up to how many bytes of each rank go by FRAMES, for verbs of which ``fits_frames`` says no more."""
        is_default = may_use_frames(self._transport, verb) and self.rules(verb)[0].source == "default"
        return room_for(self._transport, verb) if is_default else 0

    def within(self, transport: Transport, ranks: Sequence[int]) -> Selector:
        """Returns the selector of a group of these ``ranks`` of this one, which ``transport`` joins."""
        return Selector(transport, Topology.of_hosts([self.topology.host_of(rank) for rank in ranks]), self.table)

    def candidates(self, verb: str) -> list[str]:
        """Returns the names of all registered algorithms that have a plan of ``verb`` for this group."""
        return [name for name in ALGORITHMS.names() if find_algorithm(name).supports(verb, self.topology)]

    def _can_serve(self, rule: Rule, verb: str) -> bool:
        """Raises if the rule names ``verb`` itself, the user wrote it, and it cannot be."""
        if rule.algorithm == "native":
            is_there = verb in self._transport.native or verb in self._transport.fast
            problem: PycommError = ConfigError(f"transport {self._transport.name!r} does not carry {verb} itself")
        else:
            algorithm = find_algorithm(rule.algorithm)
            is_there = algorithm.supports(verb, self.topology)
            problem = PlanError(f"{rule.algorithm} has no plan of {verb} for {self._group()}")
        if not is_there and rule.verb == verb and rule.source not in ("default", "tuned"):
            raise type(problem)(f"{rule.source}, rule {str(rule)!r}: {problem}; correct the rule")
        return is_there

    def _check(self, call: Collective, name: str) -> None:
        if name == "native":
            if self._is_native(call):
                return
            of_op = "" if call.op is None else f" {call.op.name}"
            raise ConfigError(
                f"algorithm 'native': transport {self._transport.name!r} does not carry {call.verb}{of_op} of "
                f"{call.dtype} itself; use algorithm='direct', or leave the choice to 'auto'"
            )
        try:
            found = find_algorithm(name)
        except (ConfigError, TypeError):  # not even a name
            known = ", ".join(("auto", "native", *ALGORITHMS.names()))
            raise ConfigError(f"unknown algorithm {name!r}; known: {known}") from None
        if not found.supports(call.verb, self.topology):
            others = ", ".join(self.candidates(call.verb))
            raise PlanError(f"{name} has no plan of {call.verb} for {self._group()}; use 'auto', or one of: {others}")

    def _is_native(self, call: Collective) -> bool:
        return self._transport.supports(call.verb, call.dtype, call.op)

    def _plan(self, name: str, call: Collective) -> Plan | None:
        if name == "native":
            return None
        return find_algorithm(name).plan(call.verb, self._transport.rank, self.topology, call.root)

    def _group(self) -> str:
        sizes = [len(ranks) for ranks in self.topology.hosts]
        hosts = "one host" if len(sizes) == 1 else f"{len(sizes)} hosts of {', '.join(map(str, sizes[:16]))}"
        return f"{self._transport.world_size} ranks on {hosts}"


def load_table(override: str | None = None) -> Table:
    """Returns the table of this process: ``override`` (None: PYCOMM_ALGORITHMS), what was tuned here, the default."""
    text = str(env.read("PYCOMM_ALGORITHMS")) if override is None else override
    return Table.of((*parse_rules(text, "PYCOMM_ALGORITHMS"), *load_rules(), *DEFAULT_RULES))
