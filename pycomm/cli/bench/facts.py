"""Facts of the machine and the software, for the head of a table and for JSON lines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["StolenTime", "machine_facts"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _chosen(setting: str) -> str:
    """Returns the word in brackets of a sysfs choice such as ``always [madvise] never``."""
    return setting.partition("[")[2].partition("]")[0]


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
        ticks = [int(field) for field in _read("/proc/stat").partition("\n")[0].split()[1:9]]
        return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def machine_facts() -> dict[str, Any]:
    """Returns what a reader needs to place the figures."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shmem_huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
