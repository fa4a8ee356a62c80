"""Algorithms: a collective as data (``plan.py``), and the one loop that runs it on any transport (``executor.py``).

A member, for example ``direct.py``, is a pure function ``plan(verb, rank, world_size, root=0) -> Plan``.
"""

from __future__ import annotations

from ..registry import Registry

__all__ = ["ALGORITHMS"]

ALGORITHMS = Registry("pycomm.algorithms", "pycomm.algorithms", "algorithm", helpers=frozenset({"plan", "executor"}))
