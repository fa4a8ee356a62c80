"""Short cuts over transports that compare nothing themselves: ordinary small calls with the least Python around them.

The ordinary path (``verbs.py``) makes of a call what serves any call: 30 us of Python, where MPI takes 3 to compare
what the ranks call and to move 4 bytes. Here contiguous CPU tensors go straight to the swap of frames: the same
comparison, kernels, order and errors. An all_reduce that does not fit a frame goes on to the transport's own. What
comes before the swap and after it is native (csrc/bindings/frames.cpp). As every short cut it answers False if nothing
has happened, where the ordinary path must serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PycommError
from ..transport._wording import CODES
from ..types import ReduceOp
from .short_cuts import as_chosen
from .tensors import operator_of

if TYPE_CHECKING:
    from .board import Recorder
    from .group import Group

__all__ = ["short_cuts_by_frames"]


# What is served by frames alone, but for all_to_all, whose ranks compare more than a header.
_FRAMED = (
    "all_gather",
    "all_gather_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
)
_WITH_LISTS = ("all_gather", "gather", "reduce_scatter", "scatter")
_ANY_LENGTH = 1 << 62


def short_cuts_by_frames(group: Group, recorder: Recorder | None) -> dict[str, Callable[..., bool]]:
    """Returns the short cuts of a group, by verb; none where its calls do not go by frames."""
    room = {verb: _room(group, as_chosen(verb)) for verb in ("all_reduce", *_FRAMED)}
    call = group.engine.agreement.short_call if any(room.values()) else None
    if call is None:
        return {}
    if recorder is not None:
        recorder.record(call)
    cuts = {verb: _framed(group, recorder, verb, room[verb], call) for verb in _FRAMED if room[verb]}
    if room["all_reduce"]:
        cuts["all_reduce"] = _all_reduce(group, recorder, room["all_reduce"], call)
    return cuts


def _room(group: Group, verb: str) -> int:
    try:
        return group.engine.selector.room_for_frames(verb)
    except PycommError:  # of a rule of the user's that cannot be: the ordinary path raises it, when the verb is called
        return 0


def _framed(group: Group, recorder: Recorder | None, verb: str, room: int, call: Any) -> Callable[..., bool]:
    agreement, turn = group.engine.agreement, group.turn(verb)
    carried, has_lists = as_chosen(verb), verb in _WITH_LISTS
    code = CODES[carried]

    def framed(*arguments: Any) -> bool:
        # Tensors made here would be of the inference mode, and other threads may have to write them.
        if torch.is_inference_mode_enabled():
            return False
        with turn:
            if call.read(code, has_lists, room, *arguments) < 0:
                return False
            is_done = False
            turn.begin()
            try:
                agreement.run_short(carried, True, 0 if recorder is None else recorder.next_seq(), group.timeout_s)
                is_done = True
            finally:
                call.end(not is_done)
        return True

    return framed


def _all_reduce(group: Group, recorder: Recorder | None, room: int, call: Any) -> Callable[..., bool]:
    transport, agreement, turn = group.transport, group.engine.agreement, group.turn("all_reduce")
    code = CODES["all_reduce"]

    def can_be_native(tensor: torch.Tensor, op: ReduceOp, nbytes: int) -> bool:
        is_chosen = group.engine.selector.is_native_at("all_reduce", nbytes)
        return is_chosen and transport.supports("all_reduce", tensor.dtype, op)

    def all_reduce(tensor: Any = None, op: Any = ReduceOp.SUM, *others: Any) -> bool:
        if type(op) is not ReduceOp:
            op = operator_of(op)
        if others or op is None or torch.is_inference_mode_enabled():
            return False
        with turn:
            nbytes = call.read(code, False, _ANY_LENGTH, tensor, op)
            is_framed = nbytes <= room
            if nbytes < 0 or not (is_framed or can_be_native(tensor, op, nbytes)):
                return False
            if not is_framed and tensor.is_inference():  # which torch writes only as the ordinary path dresses it
                return False
            is_done = False
            turn.begin()
            try:
                seq = 0 if recorder is None else recorder.next_seq()
                if is_framed:
                    agreement.run_short("all_reduce", True, seq, group.timeout_s)
                else:
                    agree = partial(agreement.run_short, "all_reduce", False, seq, group.timeout_s)
                    is_flat = tensor.dim() == 1 and not tensor.requires_grad  # a view takes 20 us, behind a large call
                    flat = tensor if is_flat else tensor.detach().as_strided((tensor.numel(),), (1,))
                    transport.all_reduce_agreed(agree, flat, flat, op, 1.0, group.timeout_s)
                is_done = True
            finally:
                call.end(not is_done)
        return True

    return all_reduce
