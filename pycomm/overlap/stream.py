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
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..collectives.context import resolve
from ..collectives.group import Group
from ..collectives.verbs import all_reduce
from ..collectives.work import Work
from ..errors import ConfigError, TransportError
from ..types import ReduceOp
from .cuda import CudaLane
from .report import OverlapReport, Stopwatch
from .scheduler import Item, Scheduler
from .slices import quick_switches, short_slices, shorten_slice

__all__ = ["CommStream", "StreamWork"]

SEGMENT_BYTES = 2 << 20
_CLOSE_TIMEOUT_S = 10.0
_FIRST_BYTES_PER_S = 1e9  # before anything was measured
_WEIGHT = 0.25  # of the last segment in the bandwidth
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
            self._lanes = [_same_ranks(self.group, f"{self.group.name}.{lane}") for lane in range(lanes)]
        self._turn = 0
        self._outstanding: deque[Work] = deque()
        self._pending = 0  # items that are not complete
        self._last_end_s = 0.0
        self._segment_bytes = segment_bytes
        self._scheduler = Scheduler()
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

        def run(part: torch.Tensor, lane: Group) -> Work | None:
            return all_reduce(part, op, lane, async_op=not part.is_cuda, **options)

        if tensor.is_cuda:
            return self._submit_cuda(lambda: run(tensor, self._lanes[0]), [tensor])
        parts: Sequence[torch.Tensor] = [tensor]
        if tensor.is_contiguous() and tensor.nbytes > self._segment_bytes and options.get("compression") is None:
            parts = (
                tensor.detach()
                .view(-1)
                .split(  # type: ignore[no-untyped-call]
                    max(1, self._segment_bytes // tensor.itemsize)
                )
            )
        segments = [partial(run, part) for part in parts]
        return self._submit(segments, priority, parts[0].nbytes, tensor, "all_reduce", tensor)

    def submit(self, fn: Callable[[Group], Any], *, priority: int = 0, hold: Any = None, nbytes: int = 0) -> Work:
        """Calls ``fn(group)`` on the stream, where ``group`` is one of the stream's own; the Work has what it returns.

        ``hold`` is kept alive until then. ``nbytes`` says about how much it moves, for the credit. ``fn`` may make
        several collectives; nothing overtakes it once it has begun.
        """
        held = [
            each for each in (hold if isinstance(hold, (list, tuple)) else [hold]) if isinstance(each, torch.Tensor)
        ]
        if any(tensor.is_cuda for tensor in held):
            return self._submit_cuda(lambda: fn(self._lanes[0]), held)
        return self._submit([fn], priority, nbytes, hold, getattr(fn, "__name__", "submitted"))

    def _submit(
        self,
        segments: Sequence[Callable[[Group], Any]],
        priority: int,
        segment_bytes: int,
        hold: Any,
        what: str,
        result: Any = None,
    ) -> Work:
        with self._changed:
            if self._is_closed:
                raise TransportError(f"stream {self.name!r} is closed on rank {self.group.rank}; make a new one")
            number = self._scheduler.submitted + 1
            work = StreamWork(f"{what} (item {number} of stream {self.name!r} on rank {self.group.rank})", self._watch)
            self._scheduler.add(Item(segments, priority, segment_bytes, _Under(work, hold, result)))
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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scheduler.has_work or self._is_closed)
                if not self._scheduler.has_work:
                    break
            with quick_switches():
                while self._has_more():
                    self._move_some()
                self._keep_outstanding(0)

    def _has_more(self) -> bool:
        return self._scheduler.has_work

    def _move_some(self) -> None:
        """One agreement, and what it grants."""
        with self._changed:
            submitted = self._scheduler.submitted
        try:
            agreed, bytes_per_s = self._agree(submitted)
        except BaseException as error:  # the group is broken: nothing that was submitted can be moved
            self._fail_all(error)
            return
        with self._changed:
            chosen = self._scheduler.grant(agreed, bytes_per_s)
        for item, segment in chosen:
            self._start(item, segment)

    def _agree(self, submitted: int) -> tuple[int, float]:
        """Returns how many items all ranks have submitted, and the least bandwidth that any of them measured."""
        mine = torch.tensor([submitted, round(self._bytes_per_s)], dtype=torch.int64, device=self.group.control_device)
        all_reduce(mine, ReduceOp.MIN, group=self.group)
        agreed, bytes_per_s = mine.tolist()
        return agreed, float(bytes_per_s)

    def _start(self, item: Item, segment: Callable[[Group], Any]) -> None:
        """Starts one segment on the next lane; returns as soon as a lane is free for another one."""
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        start_s = time.perf_counter()
        try:
            answer = None if item.context.error is not None else segment(lane)
        except BaseException as error:
            self._ended(item, start_s, None, error)
            return
        if not isinstance(answer, Work):
            self._ended(item, start_s, answer, None)
            return
        self._outstanding.append(answer)
        answer.then(lambda work: self._ended(item, start_s, None, work.exception()))
        self._keep_outstanding(len(self._lanes) - 1)

    def _keep_outstanding(self, most: int) -> None:
        while len(self._outstanding) > most:
            self._outstanding.popleft().future.exception()  # waits; what went wrong, the item has been told

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

    def __init__(self, work: StreamWork, hold: Any, result: Any) -> None:
        self.work = work
        self.hold = hold
        self.result = result  # unless the call returns something
        self.error: BaseException | None = None
        self.moved = 0  # segments
        self.is_given_up = False  # no further ones will come


def _same_ranks(parent: Group, name: str) -> Group:
    made = parent.subgroup(list(range(parent.world_size)), name)
    assert made is not None, "every rank of the parent is a member"
    return made
