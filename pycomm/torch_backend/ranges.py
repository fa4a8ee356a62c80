"""Ranges in torch's profiler: ``pycomm:all_reduce`` with the tensors of each call, and of who waits for it.

[Note: no range from call to end]
A call that goes on in another thread may end after the profiler does, also if it has been waited for: who ends its
range would then write into memory of the profiler that is freed (torch 2.13). So a range is open in one thread, inside
one function; what a call takes from its beginning to its end shows ``pycomm.monitor.write_trace``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

__all__ = ["is_profiling", "range_of_call", "range_of_wait"]

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def range_of_call(
    verb: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor] = ()
) -> AbstractContextManager[Any]:
    """Returns the range in which a call is made; with ``record_shapes=True`` the profiler notes the tensors' shapes."""
    if not is_profiling():
        return contextlib.nullcontext()
    tensors = [*written, *read]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    made: AbstractContextManager[Any] = _RecordFunctionFast(f"pycomm:{verb}", tensors, {"bytes": nbytes})
    return made


def range_of_wait(verb: str) -> AbstractContextManager[Any]:
    """Returns the range in which a call under way is waited for: the communication that computing does not hide."""
    return _RecordFunctionFast(f"pycomm:{verb} (waiting)") if is_profiling() else contextlib.nullcontext()
