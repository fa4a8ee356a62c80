"""What every collective begins with: the ranks tell one another what they call, and compare.

[Note: agreement]
Ranks that disagree (verb, operator, dtype, numel, root, algorithm, splits, members of a new group) would wait for ever,
get garbage, or have gloo end the process. So before a byte of a buffer moves each rank sends a *frame* to every other
one, for which there is room whatever they call, so that this exchange itself cannot go wrong. A frame is a header (what
is called) and a payload. What fits the payload needs nothing more: the frames are the collective (``FRAMES``). Every
rank combines them in rank order with the same kernel, so the result has the same bits everywhere. Larger ones pay for
one small exchange beside a large one.

How long a frame is, ``Transport.frame_bytes``, says the transport. Of a call that sends every rank more than it needs
(a part of it would do) at most 16 KiB to all other ranks together go so: a link of 1 Gbit/s carries them in 0.13 ms,
about what the exchange alone takes there; or 960 bytes to each. Of an all_to_all no rank knows how much the others
send. So who sends little lets it travel along, and says so; if all did, that was all.

A transport that compares calls in its own collectives (shared memory) takes this way only for plans and new groups.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import memmove
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import NativeUnavailableError
from ..ops import native
from ..ops.reduce import reduce_at
from ..transport import _wording as wording
from ..transport.base import FRAME_COMPARED_BYTES, FRAME_HEADER_BYTES
from ..types import ReduceOp, dtype_of_name

if TYPE_CHECKING:
    from ..errors import CollectiveMismatchError
    from ..transport.base import Meanwhile, MeanwhileOnHost, Transport
    from .executor import Collective

__all__ = ["FRAMES", "Agreement", "count_call", "fits_frames", "may_use_frames", "room_for"]

FRAMES = "frames"  # the name of the algorithm that is this exchange alone
# verb, op, dtype, unused, root, numel, algorithm; then, not compared, this rank's factor. The payload begins on the
# next cache line, so it is aligned for every dtype.
_HEADER = struct.Struct("<BBBxiq16sd")
_NAME_BYTES, _NUMBER_BYTES = 16, 8
_PAYLOAD_AT = FRAME_HEADER_BYTES
_SMALL_BYTES, _SMALL_IN_ALL = 960, 16 << 10
_WHOLE = frozenset({"all_reduce", "broadcast", "all_gather_single"})  # every rank gets all of every payload
_OUTSIDE = -1  # in place of the number of members: this rank joins none
_MOST_SWAPPED = 16  # memories of frames that are remembered; a transport has one, or one for each length


def fits_frames(transport: Transport, call: Collective) -> bool:
    """Whether frames are enough for ``call``: it is small, in host memory, and the transport has nothing faster."""
    if not may_use_frames(transport, call.verb) or call.verb == "all_to_all_single":  # whose splits differ by rank
        return False
    if call.verb == "barrier":
        return True
    parts = transport.world_size if call.verb in ("reduce_scatter_single", "scatter") else 1
    tensor = _any_tensor(call)
    return tensor.is_cpu and _numel(call) * parts * tensor.itemsize <= room_for(transport, call.verb)


def may_use_frames(transport: Transport, verb: str) -> bool:
    """Whether frames may be all of a small call of ``verb``; not of a barrier that is for other devices, too."""
    has_frames = not transport.compares_calls and bool(transport.native) and transport.can_agree("cpu")
    return has_frames and (verb != "barrier" or set(transport.devices) == {"cpu"})


def room_for(transport: Transport, verb: str) -> int:
    """Returns how many bytes of each rank a frame carries."""
    whole = transport.frame_bytes - _PAYLOAD_AT
    if verb in _WHOLE:
        return whole
    return min(whole, max(_SMALL_BYTES, _SMALL_IN_ALL // max(1, transport.world_size - 1)))


class _Swapped(NamedTuple):
    """Where all ranks' frames lie once they have been swapped, in rank order."""

    frames: Sequence[torch.Tensor]
    rows: list[memoryview]  # their bytes
    compared: list[memoryview]  # of which all ranks must have the same
    addresses: list[int]

    @classmethod
    def of(cls, frames: Sequence[torch.Tensor]) -> _Swapped:
        rows = [frame.numpy().data for frame in frames]
        compared = [row[:FRAME_COMPARED_BYTES] for row in rows]
        return cls(frames, rows, compared, [frame.data_ptr() for frame in frames])


class Agreement:
    """What compares the calls of one group's ranks. Its frame is filled anew for each call; one thread at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._bytes = transport.frame_bytes
        self._frame = torch.zeros(self._bytes, dtype=torch.uint8, device="cpu")
        self._raw = self._frame.numpy().data
        self._payload = self._frame.data_ptr() + _PAYLOAD_AT
        self._swapped: dict[int, _Swapped] = {}  # by the id of the frames, which lie in the same memory again and again
        self._looked_at: Sequence[torch.Tensor] | None = None  # by the short call

    def run(
        self,
        call: Collective,
        algorithm: str,
        timeout_s: float | None,
        meanwhile: Meanwhile | None = None,
        may_carry: bool = False,
    ) -> bool:
        """Raises CollectiveMismatchError, on every rank, unless all make this call; says whether it is complete.

        That it is by FRAMES, and an all_to_all that all ranks ``may_carry`` so, if none sends much. Does nothing where
        the transport compares calls itself, or cannot. ``meanwhile`` is called, where the transport allows it, once
        this host's ranks are known to agree, while the frames of others travel.
        """
        transport = self._transport
        is_native = transport.compares_calls and algorithm == "native"
        if is_native or not transport.can_agree("cpu" if call.verb == "barrier" else _any_tensor(call).device.type):
            return False
        op = 0 if call.op is None else int(call.op)
        header = _header(call.verb, op, _code_of(call.dtype), call.root, _numel(call), algorithm, call.factor)
        if call.verb == "all_to_all_single":
            return self._agree_on_splits(call, header, timeout_s, meanwhile, may_carry)
        is_silent = call.verb in ("broadcast", "scatter") and transport.rank != call.root
        sent = None if algorithm != FRAMES or is_silent else call.input
        payload = [] if sent is None else [(sent.data_ptr(), sent.nbytes)]
        swapped = self._swap(header, payload, call.verb, timeout_s, meanwhile)
        if algorithm == FRAMES:
            self._finish(call, swapped)
        return algorithm == FRAMES

    @cached_property
    def short_call(self) -> Any:
        """The native FrameCall that ``run_short`` takes; None without a native core, or if it cannot read tensors."""
        try:
            made = native().FrameCall
        except NativeUnavailableError:
            return None
        rank, world_size = self._transport.rank, self._transport.world_size
        call = made(torch.Tensor, torch.nn.Parameter, self._frame.data_ptr(), rank, world_size)
        call.name(FRAMES, "native")
        return call if call.can_read else None

    def run_short(
        self, verb: str, is_framed: bool, seq: int, timeout_s: float | None, meanwhile: Meanwhile | None = None
    ) -> None:
        """As ``run`` for the call of ``verb`` whose arguments ``short_call`` has read: the shortest way.

        ``seq`` is its number on the board. Unless ``is_framed`` it compares alone: a native collective follows.
        """
        transport, call = self._transport, self.short_call
        count_call(transport, verb)
        transport.check_whole(verb)
        nbytes, on_host = call.begin(is_framed, seq), self._on_host(meanwhile)
        frames = transport.exchange_frames(self._frame, nbytes, verb, timeout_s, on_host)
        if frames is not self._looked_at:
            call.look_at(self._look_up(frames).addresses)
            self._looked_at = frames
        if not call.agrees():
            raise self._mismatch(verb, self._look_up(frames).rows)
        if is_framed:
            call.finish()

    def agree_on_members(self, ranks: Sequence[int] | None, timeout_s: float | None) -> None:
        """Raises CollectiveMismatchError, on every rank, unless the ranks that anybody lists pass that very list.

        Called by every rank of the group. None is the list of a rank that joins no group; lists that have no rank in
        common make several groups.
        """
        transport, verb = self._transport, "new_group"
        if not transport.can_agree("cpu"):
            return
        listed = [_OUTSIDE] if ranks is None else [len(ranks), *ranks]
        listed += [_OUTSIDE] * (transport.world_size + 1 - len(listed))
        table, _ = self._swap_numbers(_header(verb, 0, 0, 0, 0, "", 0.0), listed, verb, timeout_s)
        lists = [None if row[0] == _OUTSIDE else list(row[1 : 1 + row[0]]) for row in table]
        # A rank may also pass a list that it is not in: torch wants every rank to name the members.
        if any(lists[rank] != members for members in lists if members is not None for rank in members):
            transport.check_lost(verb)
            rows = [f"new_group({'none' if members is None else members})" for members in lists]
            raise wording.mismatch(transport.place(verb), rows)

    def _agree_on_splits(
        self,
        call: Collective,
        header: bytes,
        timeout_s: float | None,
        meanwhile: Meanwhile | None,
        may_carry: bool,
    ) -> bool:
        """Compares what each rank sends to each other one with what that one expects; every rank sees all of it.

        Says whether the frames had all of it with them.
        """
        n, me = self._transport.world_size, self._transport.rank
        assert call.input is not None and call.output is not None
        payload_at = _PAYLOAD_AT + (1 + 2 * n) * _NUMBER_BYTES
        room = min(room_for(self._transport, call.verb), self._bytes - payload_at)
        carries = may_carry and call.input.is_cpu and call.output.is_cpu and call.input.nbytes <= room
        numbers = [carries, *call.input_splits, *call.output_splits]
        sent = (call.input.data_ptr(), call.input.nbytes) if carries else (0, 0)
        table, frames = self._swap_numbers(header, numbers, call.verb, timeout_s, meanwhile, sent)
        for source in range(n):
            for target in range(n):
                sends, expects = table[source][1 + target], table[target][1 + n + source]
                if sends != expects:
                    raise wording.splits_differ(self._transport.place(call.verb), source, target, sends, expects)
        if not all(row[0] for row in table):
            return False
        item, output = call.output.itemsize, call.output.data_ptr()
        for frame, row in zip(frames, table, strict=True):
            start, nbytes = sum(row[1 : 1 + me]) * item, row[1 + me] * item
            memmove(output, frame + payload_at + start, nbytes)
            output += nbytes
        return True

    def _swap_numbers(
        self,
        header: bytes,
        numbers: Sequence[int],
        verb: str,
        timeout_s: float | None,
        meanwhile: Meanwhile | None = None,
        sent: tuple[int, int] = (0, 0),
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Returns every rank's ``numbers``, equally many on all ranks that make this call, and compares headers.

        Also where all ranks' frames lie, which have behind the numbers what is ``sent``, an address and so many bytes.
        """
        packed = struct.pack(f"{len(numbers)}q", *numbers)
        if len(packed) <= self._bytes - _PAYLOAD_AT:
            swapped = self._swap(header, [(packed, len(packed)), sent], verb, timeout_s, meanwhile)
            table = [struct.unpack_from(f"{len(numbers)}q", row, _PAYLOAD_AT) for row in swapped.rows]
            return table, swapped.addresses
        # So many ranks are rare: their numbers go by themselves.
        self._swap(header, [], verb, timeout_s, meanwhile)
        frame = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        told = self._transport.exchange(frame, verb, timeout_s).view(torch.int64).tolist()
        return [tuple(row) for row in told], []

    def _swap(
        self,
        header: bytes,
        payload: Sequence[tuple[int | bytes, int]],
        verb: str,
        timeout_s: float | None,
        meanwhile: Meanwhile | None = None,
    ) -> _Swapped:
        """Swaps frames; this rank's ``payload`` is bytes, or addresses, and how many each. Compares headers."""
        transport = self._transport
        count_call(transport, verb)
        transport.check_whole(verb)
        self._raw[:_PAYLOAD_AT] = header
        end = self._payload
        for source, nbytes in payload:
            memmove(end, source, nbytes)  # a copy by torch takes about four times as long
            end += nbytes
        on_host = self._on_host(meanwhile)
        frames = transport.exchange_frames(self._frame, end - self._payload + _PAYLOAD_AT, verb, timeout_s, on_host)
        swapped = self._look_up(frames)
        mine = header[:FRAME_COMPARED_BYTES]
        for other in swapped.compared:
            if other != mine:
                raise self._mismatch(verb, swapped.rows)
        return swapped

    def _mismatch(self, verb: str, rows: Sequence[memoryview]) -> CollectiveMismatchError:
        """Returns the error of ranks that call different things, by the bytes of their frames.

        Raises PeerLostError if that is because one of them knows of a lost rank and makes a group without it.
        """
        if any(row[0] == wording.CODES["new_group"] for row in rows):
            self._transport.check_lost(verb)
        return wording.mismatch(self._transport.place(verb), _describe(rows))

    def _on_host(self, meanwhile: Meanwhile | None) -> MeanwhileOnHost | None:
        """Returns what does ``meanwhile`` if the frames of this host's ranks, that it is given, are like this one's."""
        if meanwhile is None:
            return None
        mine = self._raw[:FRAME_COMPARED_BYTES]

        def act(frames: Sequence[torch.Tensor]) -> None:
            if all(frame[:FRAME_COMPARED_BYTES].numpy().data == mine for frame in frames):
                meanwhile()

        return act

    def _look_up(self, frames: Sequence[torch.Tensor]) -> _Swapped:
        """Returns where ``frames`` lie; to ask them costs as much as a call."""
        swapped = self._swapped.get(id(frames))
        if swapped is None:
            if len(self._swapped) == _MOST_SWAPPED:
                self._swapped.clear()
            swapped = self._swapped[id(frames)] = _Swapped.of(frames)
        return swapped

    def _finish(self, call: Collective, swapped: _Swapped) -> None:
        """Makes the result of a small collective from every rank's payload."""
        output = call.output
        if output is None or output.numel() == 0 or call.verb == "barrier":
            return
        nbytes = _numel(call) * output.itemsize
        start = self._transport.rank * nbytes if call.verb in ("reduce_scatter_single", "scatter") else 0
        if call.op is not None:
            is_scaled = call.op is ReduceOp.PREMUL_SUM
            factors = [float(_HEADER.unpack_from(row)[-1]) for row in swapped.rows] if is_scaled else None
            reduce_at(output, [frame + _PAYLOAD_AT + start for frame in swapped.addresses], call.op, factors)
            return
        start += _PAYLOAD_AT
        sources = [call.root] if call.verb in ("broadcast", "scatter") else range(len(swapped.frames))
        payloads = [swapped.frames[rank][start : start + nbytes].view(output.dtype) for rank in sources]
        torch.cat(payloads, out=output)


@lru_cache(maxsize=1024)
def _header(verb: str, op: int, dtype: int, root: int, numel: int, algorithm: str, factor: float) -> bytes:
    name = algorithm.encode()[:_NAME_BYTES]
    return _HEADER.pack(wording.CODES[verb], op, dtype, root, numel, name, factor).ljust(_PAYLOAD_AT, b"\0")


def count_call(transport: Transport, verb: str) -> None:
    """A call of the ranks begins with an exchange: counts it. Raises TransportError in a forked child."""
    transport.calls += 1
    transport.check_not_forked(verb)


def _describe(rows: Sequence[memoryview]) -> list[str]:
    """Returns in words what each rank calls, by the bytes of its frame."""
    # The algorithm is of interest where it is all that differs.
    differs_elsewhere = len({bytes(row[: FRAME_COMPARED_BYTES - _NAME_BYTES]) for row in rows}) > 1
    calls = []
    for verb, op, dtype, root, numel, name, _ in map(_HEADER.unpack_from, rows):
        algorithm = "" if differs_elsewhere else name.rstrip(b"\0").decode()
        calls.append(wording.describe_call(wording.CALLS[verb], op, dtype, numel, root, algorithm))
    return calls


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
