"""When ranks fail: faults as data, to try a job with; and a group that is made again when a rank was lost.

``inject`` makes ranks fail on purpose (``inject.py``). ``Membership`` brings the ranks of a job together again after
some of them were lost and started again (``membership.py``).
"""

from __future__ import annotations

from .inject import HOWS, MOMENTS, Fault, InjectedFault, Injection, fail_at, inject
from .membership import Generation, Membership

__all__ = [
    "HOWS",
    "MOMENTS",
    "Fault",
    "Generation",
    "InjectedFault",
    "Injection",
    "Membership",
    "fail_at",
    "inject",
]
