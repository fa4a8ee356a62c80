"""What every collective begins with: the ranks tell one another what they call, and compare.

[Note: agreement]
Ranks that disagree (verb, operator, dtype, numel, root, algorithm, splits, members of a new group) would wait for ever,
get garbage, or have gloo end the process. So before a byte of a buffer moves each rank sends a *frame* to every other
one, of the same size whatever it calls, so that this exchange itself cannot go wrong. A frame is a header (what is
called) and a payload. What fits the payload needs nothing more: the frames are the collective (``FRAMES``), and every
rank combines them in rank order with the same kernel, so the result has the same bits everywhere. Larger ones pay for
one small exchange beside a large one.

A transport that compares calls in its own collectives (shared memory) takes this way only for plans and new groups.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from ctypes import memmove
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..ops.reduce import reduce_at
from ..transport import _wording as wording
from ..types import ReduceOp, dtype_of_name

if TYPE_CHECKING:
    from ..transport.base import Exchange, Transport
    from .executor import Collective

__all__ = ["FRAMES", "Agreement", "agree_on_members", "fits_frames", "swap"]

FRAMES = "frames"  # the name of the algorithm that is this exchange alone
_FRAME_BYTES = 1024
# verb, op, dtype, unused, root, numel, algorithm; then, not compared, this rank's factor. The payload begins on the
# next cache line, so it is aligned for every dtype.
_HEADER = struct.Struct("<BBBxiq16sd")
_NAME_BYTES = 16
_COMPARED_BYTES = 32
_PAYLOAD_AT = 64
_PAYLOAD_BYTES = _FRAME_BYTES - _PAYLOAD_AT
_OUTSIDE = -1  # in place of the number of members: this rank joins none


def fits_frames(transport: Transport, call: Collective) -> bool:
    """Whether frames are enough for ``call``: it is small, in host memory, and the transport has nothing faster."""
    if transport.compares_calls or not transport.native or not transport.can_agree("cpu"):
        return False
    if call.verb == "barrier":
        return set(transport.devices) == {"cpu"}
    if call.verb == "all_to_all_single":  # its splits differ from rank to rank
        return False
    parts = transport.world_size if call.verb in ("reduce_scatter_single", "scatter") else 1
    tensor = _any_tensor(call)
    return tensor.is_cpu and _numel(call) * parts * tensor.itemsize <= _PAYLOAD_BYTES


class Agreement:
    """What compares the calls of one group's ranks. Its frame is filled anew for each call; one thread at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._raw = self._frame.numpy().data

    def run(self, call: Collective, algorithm: str, timeout_s: float | None) -> None:
        """Raises CollectiveMismatchError, on every rank, unless all make this call; if by FRAMES, completes it.

        Does nothing where the transport compares calls itself, or cannot.
        """
        transport = self._transport
        is_native = transport.compares_calls and algorithm == "native"
        if is_native or not transport.can_agree("cpu" if call.verb == "barrier" else _any_tensor(call).device.type):
            return
        self._fill(call, algorithm)
        frames = swap(transport, self._frame, call.verb, timeout_s)
        raw = frames.numpy().data.cast("B")
        mine = self._raw[:_COMPARED_BYTES]
        if any(raw[start : start + _COMPARED_BYTES] != mine for start in range(0, len(raw), _FRAME_BYTES)):
            raise wording.mismatch(transport.place(call.verb), _describe(_headers(frames)))
        if call.verb == "all_to_all_single":
            _agree_on_splits(transport, call, timeout_s)
        if algorithm == FRAMES:
            _finish(call, transport.rank, frames)

    def _fill(self, call: Collective, algorithm: str) -> None:
        op = 0 if call.op is None else int(call.op)
        name = algorithm.encode()[:_NAME_BYTES]
        fields = wording.CODES[call.verb], op, _code_of(call.dtype), call.root, _numel(call), name, call.factor
        _HEADER.pack_into(self._raw, 0, *fields)
        is_silent = call.verb in ("broadcast", "scatter") and self._transport.rank != call.root
        if algorithm == FRAMES and call.input is not None and not is_silent:
            # A copy by torch takes about four times as long.
            memmove(self._frame.data_ptr() + _PAYLOAD_AT, call.input.data_ptr(), call.input.nbytes)


def agree_on_members(transport: Transport, ranks: Sequence[int] | None, timeout_s: float | None) -> None:
    """Raises CollectiveMismatchError, on every rank, unless the ranks that anybody lists pass that very list.

    Called by every rank of the group. None is the list of a rank that joins no group; lists that have no rank in common
    make several groups.
    """
    if not transport.can_agree("cpu"):
        return
    verb = "new_group"
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
    _HEADER.pack_into(frame.numpy().data, 0, wording.CODES[verb], 0, 0, 0, 0, b"", 0.0)
    headers = _headers(swap(transport, frame, verb, timeout_s))
    if any(header[:_COMPARED_BYTES] != headers[0][:_COMPARED_BYTES] for header in headers):
        raise wording.mismatch(transport.place(verb), _describe(headers))
    mine = torch.full((transport.world_size + 1,), _OUTSIDE, dtype=torch.int32)
    listed = [_OUTSIDE] if ranks is None else [len(ranks), *ranks]
    mine[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
    table = transport.exchange(mine.view(torch.uint8), verb, timeout_s).view(torch.int32).tolist()
    lists = [None if row[0] == _OUTSIDE else row[1 : 1 + row[0]] for row in table]
    # A rank may also pass a list that it is not in: torch wants every rank to name the members.
    if any(lists[rank] != members for members in lists if members is not None for rank in members):
        rows = [f"new_group({'none' if members is None else members})" for members in lists]
        raise wording.mismatch(transport.place(verb), rows)


def swap(
    transport: Transport, frame: torch.Tensor, verb: str, timeout_s: float | None, exchange: Exchange | None = None
) -> torch.Tensor:
    """As ``Transport.exchange``, or by the ``exchange`` that is given; counts as a call."""
    transport.calls += 1
    if transport.pid != os.getpid():
        raise wording.forked(transport.place(verb))
    return (exchange or transport.exchange)(frame, verb, timeout_s)


def _headers(frames: torch.Tensor) -> list[bytes]:
    return [row[:_PAYLOAD_AT].tobytes() for row in frames.numpy()]


def _finish(call: Collective, rank: int, frames: torch.Tensor) -> None:
    """Makes the result of a small collective from every rank's payload."""
    output = call.output
    if output is None or output.numel() == 0 or call.verb == "barrier":
        return
    nbytes = _numel(call) * output.itemsize
    start = _PAYLOAD_AT + (rank * nbytes if call.verb in ("reduce_scatter_single", "scatter") else 0)
    if call.op is not None:
        is_scaled = call.op is ReduceOp.PREMUL_SUM
        factors = [float(_HEADER.unpack_from(header)[-1]) for header in _headers(frames)] if is_scaled else None
        first = frames.data_ptr() + start
        reduce_at(output, [first + member * _FRAME_BYTES for member in range(len(frames))], call.op, factors)
        return
    payloads = [frame[start : start + nbytes].view(output.dtype) for frame in frames]
    if call.verb in ("broadcast", "scatter"):
        output.copy_(payloads[call.root])
    else:
        torch.cat(payloads, out=output)


def _agree_on_splits(transport: Transport, call: Collective, timeout_s: float | None) -> None:
    """Compares what each rank sends to each other one with what that one expects; every rank sees all of it."""
    n = transport.world_size
    mine = torch.tensor([*call.input_splits, *call.output_splits], dtype=torch.int64)
    table = transport.exchange(mine.view(torch.uint8), call.verb, timeout_s).view(torch.int64).tolist()
    for source in range(n):
        for target in range(n):
            sent, expected = table[source][target], table[target][n + source]
            if sent != expected:
                raise wording.splits_differ(transport.place(call.verb), source, target, sent, expected)


def _describe(headers: Sequence[bytes]) -> list[str]:
    # The algorithm is of interest where it is all that differs.
    differs_elsewhere = len({header[: _COMPARED_BYTES - _NAME_BYTES] for header in headers}) > 1
    rows = []
    for verb, op, dtype, root, numel, name, _ in map(_HEADER.unpack_from, headers):
        algorithm = "" if differs_elsewhere else name.rstrip(b"\0").decode()
        rows.append(wording.describe_call(wording.CALLS[verb], op, dtype, numel, root, algorithm))
    return rows


def _any_tensor(call: Collective) -> torch.Tensor:
    tensor = call.input if call.input is not None else call.output
    assert tensor is not None, "only a barrier has no tensor"
    return tensor


def _numel(call: Collective) -> int:
    """Returns the elements of one rank's part: what all ranks must agree on."""
    if call.verb in ("barrier", "all_to_all_single"):
        return 0
    part = call.output if call.verb in ("reduce_scatter_single", "scatter", "broadcast") else call.input
    assert part is not None
    return part.numel()


@cache
def _code_of(dtype: torch.dtype) -> int:
    known = dtype_of_name(str(dtype).removeprefix("torch."))
    assert known is not None, f"collectives let no {dtype} pass"
    return known.code
