"""Algorithms: a collective as data (``plan.py``), and the one loop that runs it on any transport (``executor.py``).

[Note: what an algorithm is]
A module of this package, for example ``ring.py``, or one that a third party names by an entry point of the group
``pycomm.algorithms``. It has

- ``VERBS``: the collectives that it has plans for, a part of ``types.VERBS``;
- ``plan(verb, rank, topology, root=0) -> Plan``: a pure function, called with a verb of VERBS and ranks of a
  world of two or more;
- ``supports(verb, topology) -> bool``, if it does not suit every world;
- ``outline(verb, ranks, topology, root=0) -> list[Outline] | None``, if its plans are too long to cost round by round;
- ``of_parts(*names) -> Algorithm``, if it is made of others: "hierarchical(ring,tree)".

``find_algorithm(name)`` gives it to the executor, the simulator and the command line, checked and cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError, PlanError
from ..registry import Registry
from ..topology import Topology
from .plan import Outline, Plan

__all__ = ["ALGORITHMS", "Algorithm", "find_algorithm"]

ALGORITHMS = Registry(
    "pycomm.algorithms",
    "pycomm.algorithms",
    "algorithm",
    helpers=frozenset(
        {"cost", "engine", "executor", "native", "plan", "schedule", "selection", "simulator", "tables", "tuned"}
    ),
)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by its full name; ``build``, ``suits`` and ``outline`` are its own functions, without checks."""

    name: str
    verbs: tuple[str, ...]
    build: Callable[[str, int, Topology, int], Plan]
    suits: Callable[[str, Topology], bool] = lambda verb, topology: True
    outline: Callable[[str, Sequence[int], Topology, int], list[Outline] | None] = lambda verb, ranks, topology, root: (
        None
    )

    def supports(self, verb: str, topology: Topology) -> bool:
        """Says whether there are plans of ``verb`` for the ranks of ``topology``."""
        return verb in self.verbs and self.suits(verb, topology)

    def plan(self, verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
        """Returns the plan of ``rank``; ``root`` matters to reduce, broadcast, gather and scatter.

        Raises PlanError for a verb that the algorithm has not, a world that does not suit it, and ranks outside it.
        """
        return _plan(self, verb, rank, topology, root)


@lru_cache(maxsize=1024)
def _plan(algorithm: Algorithm, verb: str, rank: int, topology: Topology, root: int) -> Plan:
    world_size = topology.world_size
    if verb not in algorithm.verbs:
        raise PlanError(f"{algorithm.name} has no plan for {verb!r}; it has: {', '.join(algorithm.verbs)}")
    if not (0 <= rank < world_size and 0 <= root < world_size):
        raise PlanError(f"{algorithm.name} plan of {verb}: rank {rank} and root {root} must be in 0..{world_size - 1}")
    if not algorithm.suits(verb, topology):
        sizes = ", ".join(str(len(ranks)) for ranks in topology.hosts[:16])
        raise PlanError(
            f"{algorithm.name} has no plan of {verb} for {world_size} ranks on hosts of {sizes}; "
            "choose another algorithm, or leave the choice to 'auto'"
        )
    if world_size == 1:  # so that no other algorithm has to think of it
        return find_algorithm("direct").build(verb, rank, topology, root)
    return algorithm.build(verb, rank, topology, root)


@lru_cache(maxsize=1024)
def find_algorithm(name: str) -> Algorithm:
    """Returns the algorithm ``name``: a registered one, or "NAME(PART,PART)" of one that is made of others.

    Raises ConfigError, listing the known names, if there is none.
    """
    match = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", name)
    if match is None:
        raise ALGORITHMS.unknown(name)
    module = ALGORITHMS.load(match[1])
    if match[2] is not None:
        if not hasattr(module, "of_parts"):
            raise ConfigError(f"algorithm {name!r}: {match[1]} is not made of parts; name it without brackets")
        parts: Algorithm = module.of_parts(*(part.strip() for part in match[2].split(",")))
        return parts
    optional = {"suits": getattr(module, "supports", None), "outline": getattr(module, "outline", None)}
    given = {field: function for field, function in optional.items() if function is not None}
    return Algorithm(name, tuple(module.VERBS), module.plan, **given)
