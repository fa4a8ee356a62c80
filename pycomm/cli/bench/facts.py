"""Facts of the machine and the software, for the head of a table and for JSON lines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from ...topology import memory_bytes, processor
from .._facts import chosen

__all__ = ["StolenTime", "machine_facts"]


class StolenTime:
    """How much of this virtual machine's time its hypervisor gave to others, since this was made."""

    def __init__(self) -> None:
        self._stolen, self._total = self._read()

    def share(self) -> float:
        """Returns the stolen share of all cores' time, from 0 to 1; 0 where the system does not count it."""
        stolen, total = self._read()
        return (stolen - self._stolen) / max(1, total - self._total)

    @staticmethod
    def _read() -> tuple[int, int]:
        # proc(5): user nice system idle iowait irq softirq steal; guest time is part of user time
        try:
            first = Path("/proc/stat").read_text().partition("\n")[0]
        except OSError:
            return 0, 0
        ticks = [int(field) for field in first.split()[1:9]]
        return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def machine_facts() -> dict[str, Any]:
    """Returns what a reader needs to place the figures."""
    import torch

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "kernel": platform.release(),
        "transparent_huge_pages": chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_huge_pages": chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
