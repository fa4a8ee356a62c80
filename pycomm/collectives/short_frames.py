"""Short cuts over transports that compare nothing themselves: an ordinary all_reduce with the least Python around it.

The ordinary path (``verbs.py``) makes of a call what serves any call: 30 us of Python, where MPI takes 5 to compare
what the ranks call and to move 4 bytes. Here a contiguous CPU tensor goes straight to the swap of frames, and, if it
does not fit a frame, on to the transport's own all_reduce: the same comparison, kernels, order and errors. As every
short cut it answers False if nothing has happened, where the ordinary path must serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms._agreement import FRAMES
from ..ops.reduce import reduce_supported
from ..types import DType, ReduceOp, dtype_of_name

if TYPE_CHECKING:
    from .board import Recorder
    from .group import Group

__all__ = ["short_cuts_by_frames"]

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})  # a subclass may mean something else


def short_cuts_by_frames(group: Group, recorder: Recorder | None) -> dict[str, Callable[..., bool]]:
    """Returns the short cuts of a group, by verb; none where its calls do not go by frames."""
    room = group.engine.selector.room_for_frames("all_reduce")
    return {"all_reduce": _all_reduce(group, recorder, room)} if room else {}


def _all_reduce(group: Group, recorder: Recorder | None, room: int) -> Callable[..., bool]:
    transport, agreement, turn = group.transport, group.engine.agreement, group.turn("all_reduce")
    is_native = partial(group.engine.selector.is_native_at, "all_reduce")

    def all_reduce(tensor: Any = None, op: Any = ReduceOp.SUM, *others: Any) -> bool:
        if others or type(tensor) not in _TYPES or type(op) is not ReduceOp or tensor.layout is not torch.strided:
            return False
        dtype = _reducible(tensor.dtype, op)
        if dtype is None or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
        numel = tensor.numel()
        nbytes = numel * dtype.itemsize
        is_framed = nbytes <= room
        if not (is_framed or (is_native(nbytes) and transport.supports("all_reduce", tensor.dtype, op))) or numel == 0:
            return False
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a wrapper without memory of its own, inside torch.func
            return False
        if address == 0 or torch.is_inference_mode_enabled():  # then tensors made here would be of that mode
            return False
        with turn:
            if recorder is not None:
                recorder.begin_short("all_reduce", FRAMES if is_framed else "native", op, dtype, numel)
            is_done = False
            try:
                agreement.reduce(address if is_framed else 0, numel, dtype, op, group.timeout_s)
                if not is_framed:
                    flat = tensor.detach().as_strided((numel,), (1,))
                    transport.all_reduce(flat, flat, op, 1.0, group.timeout_s)
                is_done = True
            finally:
                if recorder is not None:
                    recorder.end(has_failed=not is_done)
        return True

    return all_reduce


@cache
def _reducible(dtype: torch.dtype, op: ReduceOp) -> DType | None:
    """Returns what is known of ``dtype`` if a short cut reduces it by ``op``; it has no place for a factor."""
    is_known = op is not ReduceOp.PREMUL_SUM and reduce_supported(dtype, op)
    return dtype_of_name(str(dtype).removeprefix("torch.")) if is_known else None
