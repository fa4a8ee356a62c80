"""Short cuts: the calls of a group that go straight to native code, and tell hooks all the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..types import ReduceOp

__all__ = [
    "ONCE_IDLE",
    "SHORT_CUT_MESSAGES",
    "SHORT_CUT_STARTS",
    "SHORT_CUT_VERBS",
    "ShortCuts",
    "as_chosen",
    "not_now",
    "observed",
]

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


ONCE_IDLE = {verb: _once_idle(verb) for verb in SHORT_CUT_STARTS}


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


class ShortCuts:
    """The short cuts of a group, which its verbs try before anything else: ``fast_*`` make a call, or begin a message;
    ``start_*`` begin a call.

    They are ``not_now`` while the group's worker thread has calls to run (the latter ``ONCE_IDLE``) or the group is
    closed, and those of collectives also while all_reduces are being coalesced or a start hook is attached.
    """

    __slots__ = (
        *(f"fast_{verb}" for verb in (*SHORT_CUT_VERBS, *SHORT_CUT_MESSAGES)),
        *(f"start_{verb}" for verb in SHORT_CUT_STARTS),
    )

    fast_all_gather: Callable[..., bool]
    fast_all_gather_single: Callable[..., bool]
    fast_all_reduce: Callable[..., bool]
    fast_all_to_all: Callable[..., bool]
    fast_all_to_all_single: Callable[..., bool]
    fast_barrier: Callable[..., bool]
    fast_batch_isend_irecv: Callable[..., Any]
    fast_broadcast: Callable[..., bool]
    fast_gather: Callable[..., bool]
    fast_irecv: Callable[..., Any]
    fast_isend: Callable[..., Any]
    fast_recv: Callable[..., Any]
    fast_reduce: Callable[..., bool]
    fast_reduce_scatter: Callable[..., bool]
    fast_reduce_scatter_single: Callable[..., bool]
    fast_scatter: Callable[..., bool]
    fast_send: Callable[..., Any]
    start_all_gather_single: Callable[..., Any]
    start_all_reduce: Callable[..., Any]
    start_barrier: Callable[..., Any]
    start_broadcast: Callable[..., Any]
    start_reduce: Callable[..., Any]
    start_reduce_scatter_single: Callable[..., Any]

    def _refresh_fast(self) -> None:
        """Chooses those that may be taken now; the group does."""
        raise NotImplementedError

    def _take(self, fast: Mapping[str, Callable[..., Any]], starts: Mapping[str, Callable[..., Any]]) -> None:
        """Sets those of the verbs named, and the others to ``not_now``."""
        for verb in (*SHORT_CUT_VERBS, *SHORT_CUT_MESSAGES):
            setattr(self, f"fast_{verb}", fast.get(verb, not_now))
        for verb in SHORT_CUT_STARTS:
            setattr(self, f"start_{verb}", starts.get(verb, not_now))
