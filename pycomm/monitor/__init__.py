"""Observers: what calls cost, who waits for whom, who is late, what is wrong. The data path imports none of them.

pycomm.monitor.snapshot()                 what each class of calls cost so far (``table()`` to print)
pycomm.monitor.table_at_exit()            the same, when the job ends
pycomm.monitor.write_trace("job.json")    all ranks on one timeline, for Perfetto
pycomm.monitor.serve_prometheus(9400)     the figures for Prometheus
pycomm.monitor.stragglers()               which rank comes late
pycomm.verify(model)                      whether the replicas are equal
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bandwidth import CollectiveStats, snapshot, table, table_at_exit
    from .export import prometheus_registry, serve_prometheus, write_json_lines, write_prometheus
    from .integrity import GradientNorms, Replicas, checked, gradient_norms, verify
    from .lateness import Lateness, StragglerReport, on_straggler, stragglers
    from .profiler import profiler_ranges
    from .timeline import write_trace
    from .verdict import Verdict
    from .watch import Hang, on_hang

_MODULE_OF = {
    name: module
    for module, names in {
        "bandwidth": "CollectiveStats snapshot table table_at_exit",
        "export": "prometheus_registry serve_prometheus write_json_lines write_prometheus",
        "integrity": "GradientNorms Replicas checked gradient_norms verify",
        "profiler": "profiler_ranges",
        "lateness": "Lateness StragglerReport on_straggler stragglers",
        "timeline": "write_trace",
        "verdict": "Verdict",
        "watch": "Hang on_hang",
    }.items()
    for name in names.split()
}

__all__ = [
    "CollectiveStats",
    "GradientNorms",
    "Hang",
    "Lateness",
    "Replicas",
    "StragglerReport",
    "Verdict",
    "checked",
    "gradient_norms",
    "on_hang",
    "on_straggler",
    "profiler_ranges",
    "prometheus_registry",
    "serve_prometheus",
    "snapshot",
    "stragglers",
    "table",
    "table_at_exit",
    "verify",
    "write_json_lines",
    "write_prometheus",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pycomm.monitor' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value
