"""Observers of a group: what they are told, and short cuts that tell them."""

from __future__ import annotations

import importlib
import sys
import time
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
    "ONCE_IDLE",
    "SHORT_CUT_MESSAGES",
    "SHORT_CUT_STARTS",
    "SHORT_CUT_VERBS",
    "CollectiveRecord",
    "DataHook",
    "Hook",
    "StartHook",
    "as_chosen",
    "make_record",
    "not_now",
    "observed",
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

# The arguments of a short cut that say how much it moves, and how it reduces; None where there is none.
_LARGEST_AND_OP: dict[str, tuple[int | None, int | None]] = {
    "all_reduce": (0, 1),
    "broadcast": (0, None),
    "all_gather_single": (0, None),
    "reduce_scatter_single": (1, 2),
    "barrier": (None, None),
    "reduce": (0, 2),
    "all_to_all_single": (0, None),
    "gather": (0, None),
    "scatter": (0, None),
    "all_gather": (1, None),
    "reduce_scatter": (0, 2),
    "all_to_all": (0, None),
}
SHORT_CUT_VERBS = tuple(_LARGEST_AND_OP)
SHORT_CUT_MESSAGES = ("batch_isend_irecv", "irecv", "isend", "recv", "send")  # of which hooks are not told
# What one may start, to be waited for later; while hooks are attached nobody does.
SHORT_CUT_STARTS = ("all_gather_single", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter_single")
_ON_LISTS = ("all_gather", "reduce_scatter", "all_to_all")
_OF_ONE_RANK = ("gather", "scatter", *_ON_LISTS)  # that argument, or the first tensor of it, is one rank's part


def not_now(*_arguments: object) -> bool:
    """The short cut that is never taken: stands in a group's ``fast_*`` and ``start_*`` while it may take no other."""
    return False


def _once_idle(verb: str) -> Callable[..., Any]:
    """Returns what stands in a group's ``start_*`` while its worker thread has calls to run: once it has run them, the
    next call is started again. Its last argument is the group.
    """

    def start(*arguments: Any) -> Any:
        group = arguments[-1]
        return group.is_idle and getattr(group, f"start_{verb}")(*arguments)

    return start


ONCE_IDLE = {f"start_{verb}": _once_idle(verb) for verb in SHORT_CUT_STARTS}


def as_chosen(verb: str) -> str:
    """Returns the verb for which the algorithm of ``verb`` is chosen: lists go as one tensor does."""
    return f"{verb}_single" if verb in _ON_LISTS else verb


def observed(verb: str, fast: Callable[..., bool], tell: Callable[..., None], world_size: int) -> Callable[..., bool]:
    """Returns the short cut ``fast`` with a stop watch: where it was taken, ``tell`` learns of it (see Group)."""
    largest, op = _LARGEST_AND_OP[verb]

    def watched(*arguments: Any) -> bool:
        start_ns = time.perf_counter_ns()
        if not fast(*arguments):
            return False
        end_ns = time.perf_counter_ns()
        dtype, numel = torch.uint8, 0
        if largest is not None:
            tensor = arguments[largest][0] if verb == "all_to_all" else arguments[largest]
            dtype, numel = tensor.dtype, tensor.numel()
        numel *= world_size if verb in _OF_ONE_RANK else 1
        reduce_op = None
        if op is not None:  # the caller may have left it at its default
            reduce_op = ReduceOp[arguments[op].name] if op < len(arguments) else ReduceOp.SUM  # or torch's
        tell(verb, "native", dtype, reduce_op, numel, None, start_ns, end_ns)
        return True

    return watched


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
