"""A Group: the ranks that communicate, the order of their calls, and who watches them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..algorithms._agreement import count_call
from ..algorithms.engine import Engine
from ..algorithms.selection import Choice, Selector
from ..errors import ConfigError, TransportError
from ..transport._wording import as_member
from ..transport.base import Request, Transport
from ..types import ReduceOp
from .agreement import agree_on_selector
from .board import Recorder
from .call import Call
from .hooks import make_record
from .observed import Observed
from .scope import Scope, Turn, Turns
from .short_cuts import ONCE_IDLE, SHORT_CUT_MESSAGES, SHORT_CUT_STARTS, SHORT_CUT_VERBS, as_chosen, not_now, observed
from .short_frames import short_cuts_by_frames
from .subgroups import Subgroups
from .work import Work
from .worker import Worker

if TYPE_CHECKING:
    from .compression_wire import CompressionReport
    from .futures import Tellers
    from .group_compression import GroupCompression

__all__ = ["Group"]

_log = logging.getLogger("pycomm")
_CLOSE_TIMEOUT_S = 10.0
_BREAK_OFF_TIMEOUT_S = 5.0  # a waiting call sees within milliseconds that it is to end


class Group(Observed):
    """Ranks that communicate. Made by ``pycomm.init``, ``new_group`` and ``split``; one thread at a time uses it.

    Calls run in the order in which they were made: a collective with ``async_op=True`` is started by a short cut, or
    runs on the group's own worker thread, and a later call waits for it first. As a context manager it closes itself at
    the end.
    """

    __slots__ = (
        "__weakref__",
        "_by_frames",
        "_closers",
        "_compression",
        "_engine",
        "_is_closed",
        "_on_close",
        "_pending",
        "_ranks",
        "_recorder",
        "_seq",
        "_subgroups",
        "_turns",
        "_worker",
        "name",
        "orphans",
        "timeout_s",
        "transport",
    )

    def __init__(
        self,
        transport: Transport,
        name: str,
        ranks: Sequence[int] | None = None,
        on_close: Callable[[Group], None] | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Wraps a connected ``transport``; ``ranks`` are the global ranks of its members (default 0, 1, ...).

        Without a ``selector`` the ranks make one out with each other at their first collective.
        """
        super().__init__()
        self.transport = transport
        transport.group_name = name
        transport.global_ranks = tuple(ranks or ())
        self._engine = None if selector is None else Engine(transport, selector)
        self.name = name
        self.timeout_s = transport.timeout_s
        self._ranks = tuple(range(transport.world_size)) if ranks is None else tuple(ranks)
        self._on_close = on_close
        self._compression: GroupCompression | None = None
        self._pending: Any = None  # the coalescing context that is open, see coalescing.py
        self._worker = Worker(f"pycomm-{name}")
        self._seq = 0
        self._subgroups = Subgroups()
        self.orphans: list[Request] = []  # messages under way whose handles were dropped
        self._closers: list[Callable[[], bool]] = []
        self._is_closed = False
        self._recorder = Recorder.of(self)
        self._turns = Turns(transport)
        self._by_frames: dict[str, Callable[..., bool]] | None = None
        self._refresh_fast()

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """The number of members."""
        return self.transport.world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks: their ranks in the group that ``init`` returned."""
        return self._ranks

    @property
    def engine(self) -> Engine:
        """What chooses and runs algorithms. The first use is collective where ``__init__`` was given no selector."""
        if self._engine is None:
            self.settle()
            self._engine = Engine(self.transport, agree_on_selector(self.transport))
            self._refresh_fast()
        return self._engine

    @property
    def control_device(self) -> torch.device:
        """Where small tensors of our own go: host memory, or this process's GPU if the transport has nothing else."""
        return (
            torch.device("cpu")
            if "cpu" in self.transport.devices
            else torch.device("cuda", torch.cuda.current_device())
        )

    @property
    def compression(self) -> GroupCompression:
        """What this group's compressed calls moved and took, and the state of their compressors."""
        if self._compression is None:
            from .group_compression import GroupCompression

            self._compression = GroupCompression(self)
        return self._compression

    @property
    def tellers(self) -> Tellers:
        """What runs the callbacks of the futures of this group's handles."""
        return self._worker.tellers

    def size(self) -> int:
        """Returns ``world_size``, as torch's ProcessGroup spells it."""
        return self.transport.world_size

    @property
    def member(self) -> str:
        """This rank in words: ``rank 1 of 2 (global rank 3)``."""
        return as_member(self.rank, self.world_size, self._ranks[self.rank])

    def group_rank(self, global_rank: int) -> int:
        """Returns the index in this group of a global rank. Raises ConfigError if it is not a member."""
        try:
            return self._ranks.index(global_rank)
        except ValueError:
            raise ConfigError(
                f"rank {global_rank!r} is not in group {self.name!r}; "
                f"expected one of its global ranks {_shorten(self._ranks)}"
            ) from None

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {self.member}, transport {self.transport.name!r})"

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"{self!r} cannot be copied or pickled: it is this process's place among the others; keep the object that "
            f"holds it from copying it, or make a new group there"
        )

    # -- running calls --------------------------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Work | None:
        """Numbers ``call`` and runs it: here and now (returns None), or on the worker thread (returns its Work)."""
        self.check_open()
        with self.scope(call.verb):
            engine = self.engine
            compressed = None if call.compression is None else self.compression.prepare(call)
            if compressed is None:
                choices = [engine.choose(each, call.algorithm) for each in call.collectives]
            else:
                choices = [Choice("compressed", None)]
        if not async_op:
            self.settle()
        self._seq += 1
        seq = self._seq
        if not async_op:
            self._perform(call, choices, seq, compressed)
            return None
        where = f"(call {seq} of group {self.name!r} on {self.member})"
        work = Work(f"{call.verb} {where}", self.tellers)

        def job() -> None:
            try:
                self._perform(call, choices, seq, compressed)
            except BaseException as error:  # goes to whoever waits on the Work
                work.set_exception(error)
            else:
                work.set_result(call.result)

        if not self.hand_over(job, work.future):
            self.check_open()  # which another thread has closed since
        return work

    def hand_over(self, job: Callable[[], None], done: Future[Any]) -> bool:
        """Has the worker thread run ``job``, which completes ``done``, after what it was given before.

        Returns False where the group has been closed.
        """
        is_taken = self._worker.submit(job, done)
        self._refresh_fast()
        return is_taken

    def exchanger(self, nbytes: int) -> Callable[[torch.Tensor, str], torch.Tensor]:
        """Returns what swaps frames ``(nbytes,)``, bytes in host memory, with all ranks: ``(world_size, nbytes)``.

        For the library: a collective that compares nothing, the shortest way through Python. The next swap may
        overwrite the result. Called by every rank, at most once a group.
        """
        exchange = self.transport.exchanger(nbytes)

        def run(frame: torch.Tensor, verb: str) -> torch.Tensor:
            self.check_open()
            self.settle()
            turn = self.turn(verb)
            with turn, self.scope(verb), self.on_board(verb, nbytes):
                turn.begin()
                count_call(self.transport, verb)
                return exchange(frame, verb, self.timeout_s)

        return run

    def settle(self) -> None:
        """Waits until no asynchronous call, each bounded by its timeout, is outstanding: the turn of the next one."""
        if self._worker.is_free:
            return
        self.transport.check_not_forked("a call")
        if self._worker.is_this_thread and not self._worker.is_idle:
            raise ConfigError(
                f"a callback of Work.then called group {self.name!r} on its worker thread, which would wait for "
                f"itself; use get_future().then or another group there, or call after wait()"
            )
        self._worker.wait()
        self._refresh_fast()

    @property
    def is_idle(self) -> bool:
        """Whether no asynchronous call is outstanding, so that ``settle`` would not block."""
        if self._worker.is_free:
            return True
        if not self._worker.is_idle:
            return False
        self.settle()
        return True

    def check_open(self) -> None:
        """Raises TransportError if this group has been closed."""
        if self._is_closed:
            raise TransportError(f"group {self.name!r} is closed on rank {self.rank}; make a new one")

    def scope(self, verb: str, seq: int | None = None) -> Scope:
        """Returns the context that a call runs in."""
        return Scope(self, verb, seq)

    def turn(self, verb: str) -> Turn:
        """Returns the context in which one thread is inside a collective."""
        return Turn(self._turns, verb)

    def _perform(
        self, call: Call, choices: Sequence[Choice], seq: int, compressed: Callable[[float], CompressionReport] | None
    ) -> None:
        with self._told_of(call.verb, seq) if self._start_hooks else contextlib.nullcontext():
            start_ns = time.perf_counter_ns()
            timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
            turn = self.turn(call.verb)
            with turn, self.scope(call.verb, seq):
                report = self._move(call, choices, timeout_s, turn, compressed)
                for finish in call.finishes:
                    if finish is not None:
                        finish()
        if self._hooks:
            end_ns = time.perf_counter_ns()
            first = call.collectives[0]
            numel = sum(each.whole_numel(self.world_size) for each in call.collectives)
            self._tell(call.verb, choices[0].name, first.dtype, first.op, numel, seq, start_ns, end_ns, report)

    def _move(
        self,
        call: Call,
        choices: Sequence[Choice],
        timeout_s: float,
        turn: Turn,
        compressed: Callable[[float], CompressionReport] | None,
    ) -> CompressionReport | None:
        """Runs the collectives of ``call``, on the board if there is one."""
        recorder, report, is_done = self._recorder, None, False
        if recorder is not None:
            recorder.begin(call, choices[0].name)
        try:
            self._show_data(call, False)
            turn.begin()
            if compressed is not None:
                report = compressed(timeout_s)
            else:
                for collective, choice in zip(call.collectives, choices, strict=True):
                    self.engine.run(collective, choice, timeout_s, call.is_agreed)
            if call.follow_up is not None:
                call.follow_up(timeout_s)
            turn.end()
            self._show_data(call, True)
            is_done = True
        finally:
            if recorder is not None:
                recorder.end(report, has_failed=not is_done)
        return report

    def on_board(self, verb: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """The span of an exchange of ``nbytes``, on the board if there is one."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.exchange(verb, nbytes)

    def _tell(
        self,
        verb: str,
        algorithm: str,
        dtype: torch.dtype,
        op: ReduceOp | None,
        numel: int,
        seq: int | None,
        start_ns: int,
        end_ns: int,
        report: CompressionReport | None = None,
    ) -> None:
        """Tells the hooks of one finished collective; ``seq`` None numbers it, as short cuts are not otherwise."""
        if seq is None:
            self._seq += 1
            seq = self._seq
        names = self.name, self.transport.name
        record = make_record(verb, names, algorithm, dtype, op, numel, seq, start_ns, end_ns, report)
        for hook in self._hooks:
            hook(record)

    def _refresh_fast(self) -> None:
        """Takes the transport's short cuts if that may be now."""
        fast: dict[str, Callable[..., Any]] = {}
        is_free = self._worker.is_free and not self._is_closed
        starts = {} if is_free or self._is_closed else ONCE_IDLE
        is_plain = self._pending is None and not self._start_hooks and not self._data_hooks
        if is_free and is_plain and self._engine is not None:
            selector, offered = self._engine.selector, self.transport.fast
            fast = {
                verb: offered[verb]
                for verb in SHORT_CUT_VERBS
                if verb in offered and selector.is_always_native(as_chosen(verb))
            }
            if not self._hooks:
                starts = {verb: offered.get(f"start_{verb}", not_now) for verb in SHORT_CUT_STARTS if verb in fast}
            if not fast and not self._hooks:  # which are told of the algorithm
                if self._by_frames is None:
                    self._by_frames = short_cuts_by_frames(self, self._recorder)
                fast = dict(self._by_frames)
        if self._hooks:
            fast = {verb: observed(verb, each, self._tell, self.world_size) for verb, each in fast.items()}
        if is_free:
            fast |= {verb: each for verb, each in self.transport.fast.items() if verb in SHORT_CUT_MESSAGES}
        self._take(fast, starts)

    # -- coalescing, see coalescing.py --------------------------------------------------------------------------------

    @property
    def pending(self) -> Any:
        """The open coalescing context, or None."""
        return self._pending

    @pending.setter
    def pending(self, context: Any) -> None:
        self._pending = context
        self._refresh_fast()

    # -- other groups, and the end ------------------------------------------------------------------------------------

    def subgroup(
        self, group_ranks: Sequence[int] | None, name: str | None, timeout: Any = None, *, with_all: bool = False
    ) -> Group | None:
        """Makes a group of members of this one, given by their ranks in it, in that order; None on ranks outside.

        Called by every rank of this group; those that are not members may pass None, or another group's list.
        ``with_all``: as a part of what all ranks do, so that it fails on all once one of them is lost; otherwise those
        who live may make it of themselves.
        """
        self.check_open()
        self.settle()
        transport = self._subgroups.join(self, group_ranks, name, timeout, with_all=with_all)
        if transport is None or group_ranks is None:
            return None
        selector = self.engine.selector.within(transport, group_ranks)
        child = Group(transport, transport.group_name, transport.global_ranks, selector=selector)
        self._subgroups.add(child)
        return child

    def add_closer(self, closer: Callable[[], bool]) -> None:
        """Calls ``closer()`` as the group closes, before its transport does; it says whether nothing uses that any
        more.
        """
        self._closers.append(closer)

    def close(self) -> None:
        """Gives back the resources of the group and of those made from it, after their outstanding calls.

        Peers that still wait for this rank get an error. A call that is not complete within ten seconds, because a peer
        has not come to it, is broken off. Does nothing the second time, and in a forked child, as it is the parent's.
        """
        self._close(time.monotonic() + _CLOSE_TIMEOUT_S)

    def _close(self, deadline: float) -> None:
        if self._is_closed or self.transport.is_inherited:
            return
        are_done = [closer() for closer in self._closers]
        for child in self._subgroups.all:
            child._close(deadline)
        self._is_closed = True
        self._worker.refuse()
        self._by_frames = None  # which hold the group
        self._refresh_fast()
        is_idle = self._is_idle_by(deadline)
        if not is_idle:
            _log.warning("%r: closed while a call is under way, which is broken off", self)
            self.transport.abandon()
            is_idle = self._is_idle_by(time.monotonic() + _BREAK_OFF_TIMEOUT_S)
        self._worker.stop()
        if self._compression is not None:
            self._compression.close()
        self.transport.leave()
        if is_idle and all(are_done):  # else: pulling memory from under a call that runs would end the process
            if self._engine is not None:
                self._engine.close()
            if self._turns.is_moving:  # the others may not have heard of it: a second Ctrl-C can end the telling
                self.transport.calls -= 1
            self.transport.close()
        if self._recorder is not None:
            self._recorder.log.close()
        if self._on_close is not None:
            self._on_close(self)

    def _is_idle_by(self, deadline: float) -> bool:
        """Waits until no other thread is inside a call of this group; returns False if ``deadline`` passes before."""
        if not (self._worker.is_this_thread or self._worker.wait(max(deadline - time.monotonic(), 0.0))):
            return False
        if not self.transport.drain(max(deadline - time.monotonic(), 0.0)):
            return False
        if self._turns.holder != threading.get_ident():  # else: a signal handler closes it in the middle of a call
            if not self._turns.lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                return False
            self._turns.lock.release()
        return True

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _shorten(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} of them)"
