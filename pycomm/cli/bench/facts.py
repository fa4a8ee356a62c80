"""Facts of the machine and the software, for the head of a table and for JSON lines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["machine_facts"]


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
