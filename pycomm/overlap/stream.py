"""CommStream: collectives that go on while Python computes.

On the CPU one thread a stream decides what goes next (``scheduler.py`` says in which order, and why all ranks keep to
it) and the worker threads of its *lanes*, groups of the same ranks, move it: in native code, asleep while they wait,
and without Python's lock, so they take little from the computation. Between hosts there are two lanes, so that one's
bytes are on the wire while the other's ranks agree and wake up. Large transfers are cut into segments, so that an
urgent small one overtakes. CUDA tensors take ``cuda.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..algorithms.executor import Collective
from ..collectives.context import parse_op, parse_options, resolve
from ..collectives.group import Call, Group
from ..collectives.tensors import as_tensor, flatten
from ..collectives.verbs import all_reduce, check_op
from ..collectives.work import Work
from ..errors import ConfigError, TransportError
from ..types import ReduceOp
from .agreement import Agreement
from .cuda import CudaLane
from .lane import Lane
from .report import OverlapReport, Stopwatch
from .scheduler import Item, Scheduler
from .slices import quick_switches, short_slices, shorten_slice

__all__ = ["CommStream", "StreamWork"]

SEGMENT_BYTES = 2 << 20
_CLOSE_TIMEOUT_S = 10.0
_FIRST_BYTES_PER_S = 1e9  # before anything was measured
_WEIGHT = 0.25  # of the last segment in the bandwidth
_Segment = Callable[[Group, bool], Any]  # of a lane, and whether the ranks have compared what it calls
_ON_ONE_HOST = ("shm", "local")  # where moving is the cores' own work: a second lane would only take from the first


class StreamWork(Work):
    """A call of a stream. Waiting for it counts as exposed communication."""

    def __init__(self, description: str, watch: Stopwatch) -> None:
        super().__init__(description)
        self._watch = watch

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Waits as ``Work.result`` does."""
        if self.future.done():
            return super().result(timeout)
        start_s = time.perf_counter()
        try:
            return super().result(timeout)
        finally:
            self._watch.waited(time.perf_counter() - start_s)


class CommStream:
    """One named stream of collectives, for one purpose ("gradients", "parameters"). Also a context manager.

    Made by every rank of ``group``, in the same order as other streams and groups; every rank submits the same items in
    the same order. A tensor that was submitted is neither read nor written by others until its Work is complete.
    """

    def __init__(self, name: str = "comm", group: Any = None, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """``segment_bytes`` is the longest time, in bytes, that an urgent item waits; equal on all ranks."""
        if segment_bytes < 1:
            raise ConfigError(f"segment_bytes: expected at least 1, got {segment_bytes}")
        parent = resolve(group)
        self.name = name
        lanes = 1 if parent.transport.name in _ON_ONE_HOST else 2
        with short_slices():  # also for the threads of the transport
            self.group = _same_ranks(parent, f"{parent.name}/{name}")  # where the ranks agree
            groups = [_same_ranks(self.group, f"{self.group.name}.{lane}") for lane in range(lanes)]
        self._lanes = [Lane(group, has_thread=lanes > 1) for group in groups]
        self._turn = 0
        self._pending = 0  # items that are not complete
        self._last_end_s = 0.0
        self._segment_bytes = segment_bytes
        self._scheduler = Scheduler()
        self._agreement = Agreement(self.group)
        self._watch = Stopwatch()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._cuda: CudaLane | None = None
        self.group.add_closer(self._stop)

    # -- submitting --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, *, priority: int = 0, **options: Any) -> Work:
        """Reduces ``tensor`` over all ranks, in place; returns at once.

        A contiguous CPU tensor of more than ``segment_bytes`` goes in segments, unless it is compressed. ``options``
        are those of ``pycomm.all_reduce``.
        """

        if tensor.is_cuda:
            return self._submit_cuda(lambda: all_reduce(tensor, op, self._lanes[0].group, **options), [tensor])
        if not tensor.is_contiguous() or options.get("compression") is not None:
            segments: Sequence[_Segment] = [lambda lane, _: all_reduce(tensor, op, lane, **options)]
            has_state = options.get("compression") is not None
            return self._submit(segments, priority, tensor.nbytes, tensor, "all_reduce", tensor, has_state=has_state)
        with self.group.scope("all_reduce"):
            reduce_op, factor = parse_op(op)
            parsed = parse_options(**options)
            flat = flatten(
                as_tensor(tensor, "tensor", writes=True), reads=True, writes=True, devices=self.group.transport.devices
            )
            check_op(tensor.dtype, reduce_op)

        def run(part: torch.Tensor, lane: Group, is_agreed: bool) -> None:
            collective = Collective(verb="all_reduce", input=part, output=part, op=reduce_op, factor=factor)
            lane.run(Call("all_reduce", [collective], (flat.finish,), *parsed, is_agreed=is_agreed), False)

        parts: Sequence[torch.Tensor] = [flat.tensor]
        if tensor.nbytes > self._segment_bytes and flat.finish is None:
            parts = flat.tensor.split(max(1, self._segment_bytes // tensor.itemsize))  # type: ignore[no-untyped-call]
        segments = [partial(run, part) for part in parts]
        what = ("all_reduce", reduce_op, tensor.dtype, tensor.numel(), parts[0].numel(), parsed)
        return self._submit(segments, priority, parts[0].nbytes, tensor, "all_reduce", tensor, what)

    def submit(self, fn: Callable[[Group], Any], *, priority: int = 0, hold: Any = None, nbytes: int = 0) -> Work:
        """Calls ``fn(group)`` on the stream, where ``group`` is one of the stream's own; the Work has what it returns.

        ``hold`` is kept alive until then. ``nbytes`` says about how much it moves, for the credit. ``fn`` may make
        several collectives; nothing overtakes it once it has begun.
        """
        held = [
            each for each in (hold if isinstance(hold, (list, tuple)) else [hold]) if isinstance(each, torch.Tensor)
        ]
        if any(tensor.is_cuda for tensor in held):
            return self._submit_cuda(lambda: fn(self._lanes[0].group), held)
        return self._submit([lambda lane, _: fn(lane)], priority, nbytes, hold, getattr(fn, "__name__", "submitted"))

    def _submit(
        self,
        segments: Sequence[_Segment],
        priority: int,
        segment_bytes: int,
        hold: Any,
        what: str,
        result: Any = None,
        description: object = None,
        has_state: bool = False,
    ) -> Work:
        """``has_state``: it leaves something behind in its lane's group (a residual), so its lane is the first one."""
        with self._changed:
            if self._is_closed:
                raise TransportError(f"stream {self.name!r} is closed on rank {self.group.rank}; make a new one")
            number = self._scheduler.submitted + 1
            work = StreamWork(f"{what} (item {number} of stream {self.name!r} on rank {self.group.rank})", self._watch)
            self._scheduler.add(Item(segments, priority, segment_bytes, _Under(work, hold, result, has_state)))
            self._agreement.add((priority, description))
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"pycomm-stream-{self.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def _submit_cuda(self, call: Callable[[], Any], hold: Sequence[torch.Tensor]) -> Work:
        self.group.check_open()
        if self._cuda is None:
            self._cuda = CudaLane(f"a call of stream {self.name!r} on rank {self.group.rank}")
        return self._cuda.submit(call, hold)

    # -- waiting, reporting, ending ----------------------------------------------------------------------------------

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Blocks this thread until every item is complete or has failed; False if ``timeout_s`` ran out before."""
        start_s = time.perf_counter()
        with self._changed:
            is_idle = self._changed.wait_for(lambda: self._pending == 0, timeout_s)
        self._watch.waited(time.perf_counter() - start_s)
        return is_idle

    def step(self) -> OverlapReport:
        """Ends a step: returns how much communication was hidden, and how much exposed, since the last one."""
        return self._watch.lap()

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
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        shorten_slice()
        while self._has_more(lambda: self._is_closed):
            with quick_switches():
                while self._has_more(lambda: self._pending == 0):
                    self._move_some()
        for lane in self._lanes:
            lane.stop()

    def _has_more(self, is_over: Callable[[], bool]) -> bool:
        """Waits for something to move, or until ``is_over()``; says whether there is something."""
        with self._changed:
            self._changed.wait_for(lambda: self._scheduler.has_work or is_over())
            return self._scheduler.has_work

    def _move_some(self) -> None:
        """One agreement, and what it grants."""
        with self._changed:
            self._agreement.fill(self._scheduler.submitted, self._bytes_per_s)
        try:
            agreed = self._agreement.run()
        except BaseException as error:  # the group is broken: nothing that was submitted can be moved
            self._fail_all(error)
            return
        with self._changed:
            chosen = self._scheduler.grant(agreed.submitted, agreed.bytes_per_s)
        for item, segment in chosen:
            lane = self._lanes[0 if item.context.has_state else self._turn % len(self._lanes)]
            lane.start(partial(self._move, item, segment, lane.group, item.number <= agreed.compared))
            self._turn += 1
        self._lanes[self._turn % len(self._lanes)].wait()  # agreed on as late as can be: others may become urgent

    def _move(self, item: Item, segment: _Segment, group: Group, is_agreed: bool) -> None:
        """Moves one segment, in the thread of a lane."""
        start_s = time.perf_counter()
        answer: Any = None
        error: BaseException | None = None
        try:
            if item.context.error is None:
                answer = segment(group, is_agreed)
            if isinstance(answer, Work):
                answer, error = None, answer.future.exception()
        except BaseException as raised:  # goes to whoever waits for the item
            error = raised
        self._ended(item, start_s, answer, error)

    def _ended(self, item: Item, start_s: float, answer: Any, error: BaseException | None) -> None:
        """A segment is complete, or has failed; called in the thread that moved it."""
        under: _Under = item.context
        with self._changed:
            now_s = time.perf_counter()
            elapsed_s = now_s - max(start_s, self._last_end_s)  # what the lanes move at one time counts once
            self._last_end_s = now_s
            self._watch.moved(elapsed_s, item.segment_bytes)
            if item.segment_bytes >= self._segment_bytes // 2 and elapsed_s > 0:
                self._bytes_per_s += _WEIGHT * (item.segment_bytes / elapsed_s - self._bytes_per_s)
            under.error = under.error or error
            under.moved += 1
            is_last = under.moved == (item.done if under.is_given_up else len(item.segments))
        if is_last:
            self._finish(item, answer)

    def _finish(self, item: Item, answer: Any) -> None:
        under: _Under = item.context
        result, under.hold, under.result = under.result if answer is None else answer, None, None
        if under.error is not None:
            under.work.set_exception(under.error)
        else:
            under.work.set_result(result)
        with self._changed:
            self._pending -= 1
            if self._pending == 0:
                self._changed.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            items = self._scheduler.give_up()
            for item in items:
                item.context.error = item.context.error or error
                item.context.is_given_up = True
            idle = [item for item in items if item.context.moved == item.done]
        for item in idle:  # the others are finished by their segments that are under way
            self._finish(item, None)


class _Under:
    """What the stream keeps of an item until it is complete: its handle, and what must live as long."""

    def __init__(self, work: StreamWork, hold: Any, result: Any, has_state: bool) -> None:
        self.work = work
        self.has_state = has_state
        self.hold = hold
        self.result = result  # unless the call returns something
        self.error: BaseException | None = None
        self.moved = 0  # segments
        self.is_given_up = False  # no further ones will come


def _same_ranks(parent: Group, name: str) -> Group:
    made = parent.subgroup(list(range(parent.world_size)), name)
    assert made is not None, "every rank of the parent is a member"
    return made
