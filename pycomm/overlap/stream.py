"""CommStream: collectives that go on while Python computes.

On the CPU one thread a stream runs a native loop (``csrc/overlap``: ``scheduler.h`` says in which order items go, and
why all ranks keep to it). Over shared memory the loop agrees and moves by itself: it is woken by a submission, sleeps
while it waits, and never takes Python's lock; a second thread completes what has ended. What is not native - compressed
calls, functions of ``submit``, other transports - the loop asks of Python, in its turn. Between hosts there are two
*lanes*, groups of the same ranks, so that one's bytes are on the wire while the other's ranks agree and wake up. Large
transfers are cut into segments, so that an urgent small one overtakes. CUDA tensors take ``cuda.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Any

import torch

from ..algorithms.executor import Collective
from ..collectives.call import Call
from ..collectives.context import parse_op, parse_options, resolve
from ..collectives.futures import Tellers
from ..collectives.group import Group
from ..collectives.tensors import as_tensor, flatten
from ..collectives.verbs import all_gather_single, all_reduce, check_op
from ..collectives.work import Work
from ..errors import TransportError
from ..ops import native
from ..sizes import whole_number
from ..transport import _wording as wording
from ..types import ReduceOp
from .cuda import CudaLane
from .lane import Lane
from .report import OverlapReport, Stopwatch
from .slices import begin_quick_switches, end_quick_switches, short_slices, shorten_slice

__all__ = ["CommStream", "StreamWork"]

SEGMENT_BYTES = 2 << 20
_CLOSE_TIMEOUT_S = 10.0
_BREAK_OFF_TIMEOUT_S = 5.0  # a waiting call sees within milliseconds that it is to end
_TOLD_BYTES = 256  # of what ranks say of an item that differs
_Segment = Callable[[Group], Any]  # of a lane
_ON_ONE_HOST = ("shm", "local")  # where moving is the cores' own work: a second lane would only take from the first

_log = logging.getLogger("pycomm")


class StreamWork(Work):
    """A call of a stream. Waiting for it counts as exposed communication."""

    def __init__(self, description: str, tellers: Tellers, watch: Stopwatch) -> None:
        super().__init__(description, tellers)
        self._watch = watch

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Waits as ``Work.result`` does."""
        if self.future.done():
            return super().result(timeout)
        with self._watch.waiting():
            return super().result(timeout)


class CommStream:
    """One named stream of all_reduces and functions of your own, for one purpose ("gradients", "parameters"). Also a
    context manager.

    Made by every rank of ``group``, in the same order as other streams and groups; every rank submits the same items in
    the same order; one that differs raises CollectiveMismatchError on all of them, and nothing of it moves. A tensor
    that was submitted is neither read nor written by others until its Work is complete.
    """

    def __init__(self, name: str = "comm", group: Any = None, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """``segment_bytes`` is the longest time, in bytes, that an urgent item waits; equal on all ranks."""
        self._segment_bytes = whole_number(segment_bytes, "segment_bytes", 1)
        parent = resolve(group)
        self.name = name
        lanes = 1 if parent.transport.name in _ON_ONE_HOST else 2
        with short_slices():  # also for the threads of the transport
            self.group = _same_ranks(parent, f"{parent.name}/{name}")  # where the ranks agree
            groups = [_same_ranks(self.group, f"{self.group.name}.{lane}") for lane in range(lanes)]
        self._lanes = [Lane(group, has_thread=lanes > 1) for group in groups]
        self._turn = 0
        self._progress: Any = None  # native; made for the first item
        self._swap: Callable[[torch.Tensor, str], torch.Tensor] = self._gather
        if self.group.transport.native_group is None and self.group.transport.can_agree("cpu"):
            self._swap = self.group.exchanger(native().STREAM_FRAME_BYTES)
        self._under: dict[int, _Under] = {}  # the items that are not complete, by their numbers
        self._watch = Stopwatch()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._cuda: CudaLane | None = None
        self.group.add_closer(self._stop)
        for lane_group in groups:
            lane_group.add_closer(lambda: self._is_over_in(0.0))

    # -- submitting --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, *, priority: int = 0, **options: Any) -> Work:
        """Reduces ``tensor`` over all ranks, in place; returns at once.

        A CPU tensor of more than ``segment_bytes`` goes in segments, unless it is compressed; one that is not
        contiguous is copied as its turn comes, and its result copied back. ``options`` are those of
        ``pycomm.all_reduce``.
        """

        if tensor.is_cuda:
            return self._submit_cuda(lambda: all_reduce(tensor, op, self._lanes[0].group, **options), [tensor])
        with self.group.scope("all_reduce"):
            reduce_op, factor = parse_op(op)
            parsed = parse_options(**options)
            dense = as_tensor(tensor, "tensor", writes=True)
            check_op(dense.dtype, reduce_op)
            # A copy is empty so far: items before this one may still write to the tensor.
            flat = flatten(dense, reads=False, writes=True, devices=self.group.transport.devices)
        dtype = str(dense.dtype).removeprefix("torch.")
        terms = f"({reduce_op.name}, {dtype}, {tensor.numel()} elements)"
        if parsed.compression is not None:
            whole_call: list[_Segment] = [lambda lane: all_reduce(tensor, op, lane, **options)]
            under = _Under("all_reduce", f"{terms}, compressed", whole_call, tensor, tensor, has_state=True)
            return self._submit(under, priority, tensor.nbytes)

        def whole(part: torch.Tensor) -> Collective:
            return Collective(verb="all_reduce", input=part, output=part, op=reduce_op, factor=factor)

        def run(part: torch.Tensor, lane: Group) -> None:
            lane.run(Call("all_reduce", [whole(part)], (), *parsed, is_agreed=True), False)

        # Nothing that the ranks have to share may follow from how the tensor lies in this one's memory.
        parts: Sequence[torch.Tensor] = [flat.tensor]
        if tensor.nbytes > self._segment_bytes:
            parts = flat.tensor.split(max(1, self._segment_bytes // tensor.itemsize))  # type: ignore[no-untyped-call]
        if len(parts) > 1:
            terms += f" in segments of {parts[0].numel()}"
        if parsed.algorithm is not None:
            terms += f", algorithm {parsed.algorithm}"
        segments: list[_Segment] = [partial(run, part) for part in parts]
        if flat.finish is not None:
            copied = _Copied(dense, flat.tensor, flat.finish, len(segments))
            segments = [partial(copied.move, segment) for segment in segments]
        under = _Under("all_reduce", terms, segments, flat.tensor, tensor)
        if flat.finish is None and self._is_native(whole(parts[0]), whole(parts[-1]), algorithm=parsed.algorithm):
            lane = self._lanes[0].group
            timeout_s = lane.timeout_s if parsed.timeout_s is None else parsed.timeout_s
            under.native = lane.transport.native_all_reduce(flat.tensor, reduce_op, factor, timeout_s)
        return self._submit(under, priority, parts[0].nbytes, max(1, parts[0].numel()))

    def _is_native(self, *segments: Collective, algorithm: str | None) -> bool:
        """Whether the stream's thread moves these without Python: no plan's rounds, and nobody to be told of them."""
        lane = self._lanes[0].group
        if lane.transport.native_group is None or lane.is_observed:
            return False
        with lane.scope("all_reduce"):
            return all(lane.engine.choose(each, algorithm).name == "native" for each in segments)

    def submit(self, fn: Callable[[Group], Any], *, priority: int = 0, hold: Any = None, nbytes: int = 0) -> Work:
        """Calls ``fn(group)`` on the stream, where ``group`` is one of the stream's own; the Work has what it returns.

        ``hold`` is kept alive until then. ``nbytes`` says about how much it moves, for the credit; it is equal on all
        ranks, as ``priority`` is. ``fn`` may make several collectives; nothing overtakes it once it has begun.
        Compressed ones belong into ``all_reduce``: what a compressor owes stays in the group that was called, and
        between hosts ``fn`` is given one of two.
        """
        held = [
            each for each in (hold if isinstance(hold, (list, tuple)) else [hold]) if isinstance(each, torch.Tensor)
        ]
        if any(tensor.is_cuda for tensor in held):
            return self._submit_cuda(lambda: fn(self._lanes[0].group), held)
        nbytes = whole_number(nbytes, "nbytes", 0)
        segments: list[_Segment] = [lambda lane: fn(lane)]
        under = _Under(getattr(fn, "__name__", "a function"), f", by submit(nbytes={nbytes})", segments, hold)
        return self._submit(under, priority, nbytes)

    def _submit(self, under: _Under, priority: int, segment_bytes: int, segment_numel: int = 0) -> Work:
        priority = whole_number(priority, "priority", -(1 << 63))
        under.terms += f", priority {priority}"
        digest = int.from_bytes(blake2b(under.terms.encode(), digest_size=8).digest(), "little")
        self.group.transport.check_not_forked(under.what)  # first: one of the parent's threads may have had the lock
        with self._changed:
            if self._is_closed:
                raise TransportError(f"stream {self.name!r} is closed on rank {self.group.rank}; make a new one")
            progress = self._progress = self._progress or native().StreamProgress(
                self.group.world_size, self._segment_bytes
            )
            if not self._under:
                begin_quick_switches()
            if under.native is None:
                number = progress.submit(priority, digest, len(under.segments), segment_bytes)
            else:
                number = progress.submit_all_reduce(priority, digest, segment_numel, *under.native)
            where = f"(item {number} of stream {self.name!r} on rank {self.group.rank})"
            under.work = work = StreamWork(f"{under.what} {where}", self.group.tellers, self._watch)
            self._under[number] = under
            if not self._threads:
                self._start()
        return work

    def _start(self) -> None:
        """Starts the thread of the loop, and one to complete what that moves without Python."""
        is_native = self.group.transport.native_group is not None
        for target in (self._run, self._await_ended)[: 1 + is_native]:
            thread = threading.Thread(target=target, name=f"pycomm-stream-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _submit_cuda(self, call: Callable[[], Any], hold: Sequence[torch.Tensor]) -> Work:
        self.group.check_open()
        if self._cuda is None:
            self._cuda = CudaLane(f"a call of stream {self.name!r} on rank {self.group.rank}")
        return self._cuda.submit(call, hold)

    # -- waiting, reporting, ending ----------------------------------------------------------------------------------

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Blocks this thread until every item is complete or has failed; False if ``timeout_s`` ran out before."""
        self.group.transport.check_not_forked("synchronize")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._watch.waiting():
            with self._changed:
                is_over = self._changed.wait_for(lambda: not self._under, timeout_s)
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            return is_over and (self._cuda is None or self._cuda.is_over_in(left_s))

    def step(self) -> OverlapReport:
        """Ends a step: returns how much communication was hidden, and how much exposed, since the last one."""
        comm_s, nbytes = (0.0, 0) if self._progress is None else self._progress.take_moved()
        return self._watch.lap(comm_s, nbytes)

    def close(self) -> None:
        """Waits for the items under way, and gives the group back."""
        self.group.close()

    def __enter__(self) -> CommStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stop(self) -> bool:
        """Called as the group closes; says whether the thread has ended, so that the transport may go."""
        with self._changed:
            self._is_closed = True
        if self._threads:
            self._progress.close()
        if self._is_over_in(_CLOSE_TIMEOUT_S):
            return True
        _log.warning("stream %r: closed while an item is under way, which is broken off", self.name)
        for group in (self.group, *(lane.group for lane in self._lanes)):
            group.transport.abandon()
        return self._is_over_in(_BREAK_OFF_TIMEOUT_S)

    def _is_over_in(self, timeout_s: float) -> bool:
        """Waits for the GPU, and for the threads, but for this one, if that closes the stream."""
        deadline = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0.0))
        is_done = self._cuda is None or self._cuda.is_over_in(max(deadline - time.monotonic(), 0.0))
        return is_done and not any(thread.is_alive() for thread in others)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs the native loop, which calls what follows. Of that ``_exchange`` and ``_refuse`` may raise."""
        shorten_slice()
        group = self.group.transport.native_group
        collect = self._collect if group is None else None
        end_grant = self._end_grant if len(self._lanes) > 1 else None
        self._progress.run(group, self._exchange, self._refuse, self._move, collect, end_grant)
        for lane in self._lanes:
            lane.stop()

    def _exchange(self, frame: bytes) -> Any:
        """Swaps the frames of the ranks' agreement where the native core does not."""
        return self._swap(torch.frombuffer(bytearray(frame), dtype=torch.uint8), "all_gather_single").numpy()

    def _gather(self, frame: torch.Tensor, _verb: str) -> torch.Tensor:
        """The exchange of a transport that has none: NCCL's alone."""
        device = self.group.control_device
        frames = torch.empty((self.group.world_size, frame.numel()), dtype=torch.uint8, device=device)
        all_gather_single(frames, frame.to(device), self.group)
        return frames.cpu()

    def _refuse(self, number: int) -> None:
        """Raises what becomes of an item that is not the same on all ranks, each of which comes here with it."""
        under = self._noted(number)
        mine = f"{under.what}{under.terms}".encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
        told = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), "all_gather_single")
        rows = [bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in told]
        where = f"item {number} of stream {self.name!r}, {self.group.member}"
        raise wording.mismatch(where, rows)

    def _noted(self, number: int) -> _Under:
        with self._changed:  # whoever submits it has it until it is noted
            return self._under[number]

    def _move(self, number: int, segment: int) -> None:
        """Begins to move a segment on the lane whose turn it is."""
        under = self._noted(number)
        lane = self._lanes[0 if under.has_state else self._turn % len(self._lanes)]
        lane.start(partial(self._move_on, lane.group, number, under, segment))
        self._turn += 1

    def _end_grant(self) -> None:
        self._lanes[self._turn % len(self._lanes)].wait()  # agreed on as late as can be: others may become urgent

    def _move_on(self, group: Group, number: int, under: _Under, segment: int) -> None:
        """Moves one segment, in the thread of a lane."""
        start_ns = time.monotonic_ns()
        try:
            if under.error is None:
                under.answer = under.segments[segment](group)
            if isinstance(under.answer, Work):
                under.answer, under.error = None, under.answer.future.exception()
            group.settle()  # calls that it began and did not wait for: the native core comes next
        except BaseException as raised:  # goes to whoever waits for the item
            under.error = under.error or raised
        self._progress.ended(number, start_ns)
        self._collect()

    def _await_ended(self) -> None:
        """The second thread of a stream whose loop does without Python."""
        shorten_slice()
        while ended := self._progress.await_ended():
            self._complete(ended)

    def _collect(self) -> None:
        self._complete(self._progress.collect())

    def _complete(self, ended: Sequence[tuple[int, BaseException | None]]) -> None:
        """Completes the items that have ended, in whichever thread has found that."""
        for number, error in ended:
            with self._changed:
                under = self._under[number]
            work, error = under.work, under.error or error
            result = under.result if under.answer is None else under.answer
            del under.segments, under.hold, under.result, under.answer  # not kept by whoever keeps the handle
            if error is not None:
                work.set_exception(error)
            else:
                work.set_result(result)
            with self._changed:
                del self._under[number]
                if not self._under:
                    end_quick_switches()
                    self._changed.notify_all()


class _Under:
    """What the stream keeps of an item until it is complete: its handle, and what must live as long."""

    def __init__(
        self,
        what: str,
        terms: str,
        segments: Sequence[_Segment],
        hold: Any,
        result: Any = None,
        has_state: bool = False,
    ) -> None:
        """``terms``, put behind ``what``, say what has to be the same on all ranks.

        ``has_state``: it leaves something behind in its lane's group (a residual), so its lane is the first one.
        """
        self.what = what
        self.terms = terms
        self.segments = segments
        self.hold = hold
        self.result = result  # unless the call returns something
        self.has_state = has_state
        self.native: tuple[Any, ...] | None = None  # what the native core needs to move it without Python
        self.work: StreamWork
        self.answer: Any = None
        self.error: BaseException | None = None


class _Copied:
    """What an item has instead of a tensor that is not flat: a copy, filled before its first segment moves and copied
    back after its last.
    """

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor, finish: Callable[[], None], segments: int) -> None:
        self._tensor = tensor
        self._copy = copy
        self._finish = finish
        self._is_filled = False
        self._left = segments
        self._lock = threading.Lock()  # two lanes may move segments of it at a time

    def move(self, segment: _Segment, lane: Group) -> None:
        """Moves ``segment``, a part of the copy."""
        with self._lock:
            if not self._is_filled:
                self._copy.view(self._tensor.shape).copy_(self._tensor)
                self._is_filled = True
        segment(lane)  # if one fails, nothing is copied back
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._finish()


def _same_ranks(parent: Group, name: str) -> Group:
    made = parent.subgroup(list(range(parent.world_size)), name)
    assert made is not None, "every rank of the parent is a member"
    return made
