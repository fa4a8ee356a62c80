"""Ranges in torch's profiler: ``pycomm:all_reduce`` with the tensors of each call, from its issue to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._profiler import _RecordFunctionFast

from .work import CallWork

__all__ = ["is_profiling", "ranged"]

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def ranged(verb: str, tensors: Sequence[torch.Tensor], issue: Callable[[], CallWork]) -> CallWork:
    """Runs ``issue`` inside a range of that name; with ``record_shapes=True`` the profiler notes the tensors' shapes.

    A call that goes on after ``issue`` has a second range, ``pycomm:all_reduce (under way)``, that ends with it.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with _RecordFunctionFast(f"pycomm:{verb}", list(tensors), {"bytes": nbytes}):
        work = issue()
    if not work.is_completed():
        handle = torch.ops.profiler._record_function_enter_new(f"pycomm:{verb} (under way)", f"{nbytes} bytes")
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, work.get_future())
    return work
