"""A Group: the ranks that communicate, the order of their calls, and who watches them."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..algorithms.executor import Collective, choose_algorithm, execute, meet
from ..config import seconds
from ..errors import ConfigError, PycommError, TransportError
from ..transport.base import Transport
from ..types import ReduceOp
from .hooks import CollectiveRecord, Hook, make_record, not_now, observed
from .work import Work

__all__ = ["Call", "CollectiveRecord", "Group"]

_log = logging.getLogger("pycomm")
_CLOSE_TIMEOUT_S = 10.0


class Call(NamedTuple):
    """One call of a verb, ready to run.

    First its ``collectives``, in order, then ``finishes``; ``result`` is what its handle returns.
    """

    verb: str
    collectives: Sequence[Collective]
    finishes: Sequence[Callable[[], None] | None] = ()
    algorithm: str | None = None
    timeout_s: float | None = None
    result: Any = None


class Group:
    """Ranks that communicate. Made by ``pycomm.init``, ``new_group`` and ``split``; one thread at a time uses it.

    Calls run in the order in which they were made: a collective with ``async_op=True`` runs on the group's own worker
    thread, and a later call waits for it first. As a context manager it closes itself at the end.

    The ``fast_*`` attributes are the transport's short cuts, taken by the verbs directly; they are ``not_now`` while
    asynchronous calls are outstanding, all_reduces are being coalesced, or the group is closed.
    """

    __slots__ = (
        "__weakref__",
        "_children",
        "_hooks",
        "_is_closed",
        "_jobs",
        "_last_async",
        "_on_close",
        "_pending",
        "_ranks",
        "_seq",
        "_splits",
        "_worker",
        "fast_all_gather_single",
        "fast_all_reduce",
        "fast_barrier",
        "fast_broadcast",
        "fast_reduce_scatter_single",
        "name",
        "timeout_s",
        "transport",
    )

    def __init__(
        self,
        transport: Transport,
        name: str,
        ranks: Sequence[int] | None = None,
        on_close: Callable[[Group], None] | None = None,
    ) -> None:
        """Wraps a connected ``transport``; ``ranks`` are the global ranks of its members (default 0, 1, ...)."""
        self.transport = transport
        self.name = name
        self.timeout_s = transport.timeout_s
        self._ranks = tuple(range(transport.world_size)) if ranks is None else tuple(ranks)
        self._on_close = on_close
        self._hooks: tuple[Hook, ...] = ()
        self._pending: Any = None  # the coalescing context that is open, see coalescing.py
        self._last_async: concurrent.futures.Future[Any] | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._worker: threading.Thread | None = None
        self._seq = 0
        self._splits = 0
        self._children: weakref.WeakSet[Group] = weakref.WeakSet()
        self._is_closed = False
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
    def control_device(self) -> torch.device:
        """Where small tensors of our own go: host memory, or this process's GPU if the transport has nothing else."""
        return (
            torch.device("cpu")
            if "cpu" in self.transport.devices
            else torch.device("cuda", torch.cuda.current_device())
        )

    def size(self) -> int:
        """Returns ``world_size``, as torch's ProcessGroup spells it."""
        return self.transport.world_size

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
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, transport {self.transport.name!r})"

    # -- running calls --------------------------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Work | None:
        """Numbers ``call`` and runs it: here and now (returns None), or on the worker thread (returns its Work)."""
        self.check_open()
        algorithms = [choose_algorithm(self.transport, each, call.algorithm) for each in call.collectives]
        if not async_op:
            self.settle()
        self._seq += 1
        seq = self._seq
        if not async_op:
            self._perform(call, algorithms, seq)
            return None
        work = Work(f"{call.verb} (call {seq} of group {self.name!r} on rank {self.rank} of {self.world_size})")

        def job() -> None:
            try:
                self._perform(call, algorithms, seq)
            except BaseException as error:  # goes to whoever waits on the Work
                work.set_exception(error)
            else:
                work.set_result(call.result)

        self._submit(job, work)
        return work

    def settle(self) -> None:
        """Waits until no asynchronous call, each bounded by its timeout, is outstanding: the turn of the next one."""
        last = self._last_async
        if last is None:
            return
        if threading.current_thread() is self._worker:
            raise ConfigError(
                f"a callback of Work.then called group {self.name!r} on its worker thread, which would wait for "
                f"itself; use another group there, or call after wait()"
            )
        concurrent.futures.wait([last])
        self._last_async = None
        self._refresh_fast()

    def check_open(self) -> None:
        """Raises TransportError if this group has been closed."""
        if self._is_closed:
            raise TransportError(f"group {self.name!r} is closed on rank {self.rank}; make a new one")

    def scope(self, verb: str, seq: int | None = None) -> Scope:
        """Returns the context that a call runs in."""
        return Scope(self, verb, seq)

    def _perform(self, call: Call, algorithms: Sequence[str], seq: int) -> None:
        start_ns = time.perf_counter_ns()
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        with self.scope(call.verb, seq):
            for collective, algorithm in zip(call.collectives, algorithms, strict=True):
                execute(self.transport, collective, algorithm, timeout_s)
            for finish in call.finishes:
                if finish is not None:
                    finish()
        if self._hooks:
            end_ns = time.perf_counter_ns()
            first = call.collectives[0]
            numel = sum(_whole_numel(each, self.world_size) for each in call.collectives)
            self._tell(call.verb, algorithms[0], first.dtype, first.op, numel, seq, start_ns, end_ns)

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
    ) -> None:
        """Tells the hooks of one finished collective; ``seq`` None numbers it, as short cuts are not otherwise."""
        if seq is None:
            self._seq += 1
            seq = self._seq
        names = self.name, self.transport.name
        record = make_record(verb, names, algorithm, dtype, op, numel, seq, start_ns, end_ns)
        for hook in self._hooks:
            hook(record)

    def _submit(self, job: Callable[[], None], work: Work) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._worker = threading.Thread(
                target=_work_off, args=(self._jobs,), name=f"pycomm-{self.name}", daemon=True
            )
            self._worker.start()
        self._last_async = work.future
        self._refresh_fast()
        self._jobs.put(job)

    def _refresh_fast(self) -> None:
        """Sets the ``fast_*`` attributes to the transport's short cuts if they may be taken now."""
        is_free = self._last_async is None and self._pending is None and not self._is_closed
        fast: Mapping[str, Callable[..., bool]] = self.transport.fast if is_free else {}
        if self._hooks:
            fast = {verb: observed(verb, each, self._tell) for verb, each in fast.items()}
        self.fast_all_reduce = fast.get("all_reduce", not_now)
        self.fast_broadcast = fast.get("broadcast", not_now)
        self.fast_all_gather_single = fast.get("all_gather_single", not_now)
        self.fast_reduce_scatter_single = fast.get("reduce_scatter_single", not_now)
        self.fast_barrier = fast.get("barrier", not_now)

    # -- observers --------------------------------------------------------------------------------------------------

    def add_hook(self, hook: Hook) -> None:
        """Calls ``hook(record)`` after every collective of this group from now on, in the thread that ran it."""
        self._hooks = (*self._hooks, hook)
        self._refresh_fast()

    def remove_hook(self, hook: Hook) -> None:
        """Stops calling ``hook``. Raises ConfigError if it is not attached."""
        if hook not in self._hooks:
            raise ConfigError(f"this hook is not attached to group {self.name!r}: {hook!r}")
        hooks = list(self._hooks)
        hooks.remove(hook)
        self._hooks = tuple(hooks)
        self._refresh_fast()

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

    def subgroup(self, group_ranks: Sequence[int] | None, name: str | None, timeout: Any = None) -> Group | None:
        """Makes a group of members of this one, given by their ranks in it, in that order; None on ranks outside.

        Called by every rank of this group; those that are not members may pass None, or another group's list.
        """
        self.check_open()
        self.settle()
        self._splits += 1
        with self.scope("new_group"):
            transport = self.transport.split(group_ranks, self._splits)
            if transport is None or group_ranks is None:
                return None
            if timeout is not None:
                transport.timeout_s = seconds(timeout)
            meet(transport)
        ranks = [self._ranks[rank] for rank in group_ranks]
        child = Group(transport, name or f"{self.name}.{self._splits}", ranks)
        self._children.add(child)
        return child

    def close(self) -> None:
        """Gives back the resources of the group and of those made from it, after their outstanding calls.

        Peers that still wait for this rank get an error. Does nothing the second time.
        """
        if self._is_closed:
            return
        for child in list(self._children):
            child.close()
        self._is_closed = True
        self._refresh_fast()
        is_idle = True
        if self._last_async is not None and threading.current_thread() is not self._worker:
            is_idle = bool(concurrent.futures.wait([self._last_async], _CLOSE_TIMEOUT_S).done)
        if self._jobs is not None:
            self._jobs.put(None)
        if is_idle:
            self.transport.close()
        else:  # pulling memory from under a call that runs would end the process
            _log.warning("%r closed while a call was still under way after %g s", self, _CLOSE_TIMEOUT_S)
        if self._on_close is not None:
            self._on_close(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Scope(AbstractContextManager[None]):
    """What every call runs in: pycomm's errors say where they happened, once, and tensors made here are ordinary.

    Ordinary also under the caller's ``torch.inference_mode()``: other threads may have to write them.
    """

    __slots__ = ("_group", "_mode", "_seq", "_verb")

    def __init__(self, group: Group, verb: str, seq: int | None) -> None:
        self._group = group
        self._verb = verb
        self._seq = seq
        self._mode: torch.inference_mode | None = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._mode = torch.inference_mode(False)
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, tb)
            self._mode = None
        if not isinstance(error, PycommError) or getattr(error, "_is_located", False):
            return
        group = self._group
        call = "" if self._seq is None else f", call {self._seq}"
        where = f"[{self._verb}{call}, group {group.name!r}, rank {group.rank} of {group.world_size}]"
        error.args = (f"{where} {error.args[0] if error.args else ''}", *error.args[1:])
        error._is_located = True  # type: ignore[attr-defined]


def _work_off(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """The worker thread of a group: runs its jobs in order. Holds the queue alone, so that groups can be collected."""
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors are not kept until the next one comes


def _whole_numel(collective: Collective, world_size: int) -> int:
    """Returns the elements of the collective's whole buffer on one rank, also where this rank has only a part of it."""
    numels = [tensor.numel() for tensor in (collective.input, collective.output) if tensor is not None]
    if collective.verb in ("gather", "scatter"):
        return min(numels) * world_size
    return max(numels, default=0)


def _shorten(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} of them)"
