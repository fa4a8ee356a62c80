"""Observers of a group, and what they are told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..types import ReduceOp
from .tensors import dtype_name

if TYPE_CHECKING:
    from ..algorithms.executor import Collective
    from .compression_wire import CompressionReport

__all__ = [
    "CollectiveRecord",
    "DataHook",
    "Hook",
    "StartHook",
    "make_record",
    "unwatched",
    "watched",
]

# What watches the boards of a job: it stands above this layer, and nothing here knows more of it than its name.
_WATCH = "pycomm.monitor.watch"


class CollectiveRecord(NamedTuple):
    """What a hook learns of one finished collective.

    ``numel`` and ``nbytes`` count the collective's whole buffer on one rank (nccl-tests' "size"). ``seq`` counts the
    group's calls, but for those that took a transport's short cut while no hook was attached. Times are of
    ``time.perf_counter_ns``. ``compression`` is what a compressed call moved and took, None of the others.
    """

    verb: str
    group_name: str
    transport: str
    algorithm: str
    dtype: str
    op: str | None
    numel: int
    nbytes: int
    seq: int
    start_ns: int
    end_ns: int
    compression: CompressionReport | None = None


Hook = Callable[[CollectiveRecord], None]
StartHook = Callable[[str, int], Callable[[], None] | None]  # of verb and seq; what it returns is called at the end
DataHook = Callable[["Collective", bool], None]  # a collective, and whether it is complete


def make_record(
    verb: str,
    names: tuple[str, str],
    algorithm: str,
    dtype: torch.dtype,
    op: ReduceOp | None,
    numel: int,
    seq: int,
    start_ns: int,
    end_ns: int,
    report: CompressionReport | None = None,
) -> CollectiveRecord:
    """Returns the record of a call of the group and transport of ``names``."""
    name, itemsize = _describe(dtype)
    op_name = None if op is None else _OP_NAMES[op]
    nbytes = numel * itemsize
    return CollectiveRecord(verb, *names, algorithm, name, op_name, numel, nbytes, seq, start_ns, end_ns, report)


def watched(group: Any, store: Any, config: Any, host_ids: Sequence[str]) -> None:
    """Tells the monitor that ``init`` has made ``group``; ``store`` is the monitor's own part of the job's store."""
    importlib.import_module(_WATCH).start(group, store, config, host_ids)


def unwatched() -> None:
    """Tells the monitor that the default group closes."""
    module = sys.modules.get(_WATCH)
    if module is not None:
        module.stop()


_OP_NAMES = {op: op.name for op in ReduceOp}  # an enum's own .name takes longer than a short cut


@cache
def _describe(dtype: torch.dtype) -> tuple[str, int]:
    return dtype_name(dtype), dtype.itemsize
