"""Short cuts over transports that compare nothing themselves: an ordinary all_reduce with the least Python around it.

The ordinary path (``verbs.py``) makes of a call what serves any call: 30 us of Python, where MPI takes 3 to compare
what the ranks call and to move 4 bytes. Here a contiguous CPU tensor goes straight to the swap of frames, and, if it
does not fit a frame, on to the transport's own all_reduce: the same comparison, kernels, order and errors. What comes
before the swap and after it is native (csrc/bindings/frames.cpp). As every short cut it answers False if nothing has
happened, where the ordinary path must serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..types import ReduceOp
from .tensors import operator_of

if TYPE_CHECKING:
    from .board import Recorder
    from .group import Group

__all__ = ["short_cuts_by_frames"]


def short_cuts_by_frames(group: Group, recorder: Recorder | None) -> dict[str, Callable[..., bool]]:
    """Returns the short cuts of a group, by verb; none where its calls do not go by frames."""
    room = group.engine.selector.room_for_frames("all_reduce")
    call = group.engine.agreement.short_call if room else None
    return {} if call is None else {"all_reduce": _all_reduce(group, recorder, room, call)}


def _all_reduce(group: Group, recorder: Recorder | None, room: int, call: Any) -> Callable[..., bool]:
    transport, agreement, turn = group.transport, group.engine.agreement, group.turn("all_reduce")
    if recorder is not None:
        recorder.record(call)

    def can_be_native(tensor: torch.Tensor, op: ReduceOp, nbytes: int) -> bool:
        is_chosen = group.engine.selector.is_native_at("all_reduce", nbytes)
        return is_chosen and transport.supports("all_reduce", tensor.dtype, op)

    def all_reduce(tensor: Any = None, op: Any = ReduceOp.SUM, *others: Any) -> bool:
        if type(op) is not ReduceOp:
            op = operator_of(op)
        # Tensors made here would be of the inference mode, and other threads may have to write them.
        if others or op is None or torch.is_inference_mode_enabled():
            return False
        with turn:
            nbytes = call.read(tensor, op)
            is_framed = nbytes <= room
            if nbytes == 0 or not (is_framed or can_be_native(tensor, op, nbytes)):
                return False
            if not is_framed and tensor.is_inference():  # which torch writes only as the ordinary path dresses it
                return False
            is_done = False
            turn.begin()
            try:
                seq = 0 if recorder is None else recorder.next_seq()
                if is_framed:
                    agreement.reduce(True, seq, group.timeout_s)
                else:
                    agree = partial(agreement.reduce, False, seq, group.timeout_s)
                    is_flat = tensor.dim() == 1 and not tensor.requires_grad  # a view takes 20 us, behind a large call
                    flat = tensor if is_flat else tensor.detach().as_strided((tensor.numel(),), (1,))
                    transport.all_reduce_agreed(agree, flat, flat, op, 1.0, group.timeout_s)
                is_done = True
            finally:
                call.end(not is_done)
        return True

    return all_reduce
