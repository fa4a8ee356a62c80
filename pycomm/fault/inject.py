"""Faults as data: which rank fails in which collective, when, and how.

    with pycomm.init(), inject(fail_at(2, 10, "kill")):
        train()        # rank 2 dies as it begins its 10th collective; what do the others do?

A fault is attached to a group by its hooks; the data path knows nothing of it. Every rank may be given the same faults:
each takes those of its own rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..collectives.context import resolve
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..collectives.group import Group
    from ..collectives.hooks import CollectiveRecord
    from ..transport import Transport

__all__ = ["HOWS", "MOMENTS", "Fault", "InjectedFault", "Injection", "fail_at", "inject"]

HOWS = ("kill", "segv", "exit", "stop", "slow", "raise", "drop_connection")
MOMENTS = ("before", "inside", "after")

EXIT_CODE = 86  # of "exit": one that nothing else uses

_OF_THE_THREAD = frozenset({"slow", "raise"})  # happen where the rank's own code runs: never inside a collective
_OF_A_PROCESS = frozenset({"kill", "segv", "exit", "stop"})


class InjectedFault(RuntimeError):
    """What ``raise`` raises: an exception in the rank's own code, which is not pycomm's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, checked; see ``fail_at``."""

    rank: int
    op_number: int
    how: str
    moment: str = "before"
    delay_s: float = 0.0
    lasts_s: float = 3.0

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ConfigError(f"fault: unknown how {self.how!r}; known: {', '.join(HOWS)}")
        if self.moment not in MOMENTS:
            raise ConfigError(f"fault: unknown moment {self.moment!r}; known: {', '.join(MOMENTS)}")
        if self.rank < 0 or self.op_number < 1 or self.delay_s < 0 or self.lasts_s < 0:
            raise ConfigError(f"fault: expected rank >= 0, op_number >= 1 and times >= 0, got {self}")
        if self.moment == "inside" and self.how in _OF_THE_THREAD:
            raise ConfigError(
                f"fault: {self.how!r} happens in the rank's own code, which waits while a collective runs; "
                f"expected moment 'before' or 'after', got 'inside'"
            )


def fail_at(
    rank: int, op_number: int, how: str, *, moment: str = "before", delay_s: float = 0.0, lasts_s: float = 3.0
) -> Fault:
    """Returns the fault that strikes ``rank`` (of the group) at its ``op_number``th collective, counted from 1.

    ``how``: "kill" (SIGKILL), "segv" (SIGSEGV), "exit" (at once, with code 86), "stop" (SIGSTOP; SIGCONT after
    ``lasts_s`` seconds), "slow" (sleeps ``lasts_s``), "raise" (InjectedFault), "drop_connection" (shuts the TCP
    connections of the transport). ``moment``: "before" the rank takes part, "after" it is done, or "inside":
    ``delay_s`` seconds after it began, from another thread; a collective that has ended by then is struck all the same.
    Raises ConfigError.
    """
    return Fault(rank=rank, op_number=op_number, how=how, moment=moment, delay_s=delay_s, lasts_s=lasts_s)


def inject(*faults: Fault, group: Any = None) -> Injection:
    """Attaches ``faults`` to ``group``, by default that of ``init``; returns the handle to detach them by.

    Also a context manager. Collectives are counted from here on. While attached, no call takes the transport's short
    cut. Raises ConfigError for a rank that the group lacks, and for a fault that its transport cannot suffer.
    """
    return Injection(resolve(group), faults)


class Injection:
    """The faults of this rank, attached to a group. ``op_number`` counts the collectives begun so far."""

    def __init__(self, group: Group, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            _check(group, fault)
        self.op_number = 0
        self._group = group
        self._faults = tuple(fault for fault in faults if fault.rank == group.rank)
        self._is_attached = True
        self._timers: list[threading.Timer] = []
        group.add_start_hook(self._on_start)
        group.add_hook(self._on_end)

    def detach(self) -> None:
        """Takes the faults away, once one that is on its way has struck. Does nothing the second time."""
        if self._is_attached:
            self._is_attached = False
            self._group.remove_start_hook(self._on_start)
            self._group.remove_hook(self._on_end)
            for timer in self._timers:
                timer.join()

    def __enter__(self) -> Injection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.detach()

    def _on_start(self, _verb: str, _seq: int) -> None:
        self.op_number += 1
        for fault in self._due("inside"):
            timer = threading.Timer(fault.delay_s, strike, (fault, self._group.transport))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
        for fault in self._due("before"):
            strike(fault, self._group.transport)

    def _on_end(self, _record: CollectiveRecord) -> None:
        for fault in self._due("after"):
            strike(fault, self._group.transport)

    def _due(self, moment: str) -> list[Fault]:
        return [fault for fault in self._faults if (fault.op_number, fault.moment) == (self.op_number, moment)]


def strike(fault: Fault, transport: Transport) -> None:
    """Makes ``fault`` happen to this process, now."""
    match fault.how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            # Not caught by a handler, as of faulthandler: the process ends as after a wild pointer.
            with contextlib.suppress(ValueError):  # only the main thread may; a handler then runs first
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(EXIT_CODE)
        case "stop":
            # Who wakes it must be another process, and must have stopped it too, lest it wakes it before that: a shell
            # and the shell's child, in a session of its own, which init reaps.
            pid = os.getpid()
            wake = f"kill -STOP {pid}; (sleep {fault.lasts_s}; kill -CONT {pid}) </dev/null >/dev/null 2>&1 &"
            subprocess.run(["sh", "-c", wake], start_new_session=True, check=True)
        case "slow":
            time.sleep(fault.lasts_s)
        case "raise":
            raise InjectedFault(f"injected into rank {fault.rank} at collective {fault.op_number}")
        case _:
            _drop_connections(transport)


def _check(group: Group, fault: Fault) -> None:
    if fault.rank >= group.world_size:
        raise ConfigError(f"fault: group {group.name!r} has ranks 0..{group.world_size - 1}, got {fault.rank}")
    name = group.transport.name
    if name == "local" and fault.how in _OF_A_PROCESS:
        raise ConfigError(
            f"fault {fault.how!r} ends or stops a process, and the ranks of transport 'local' are threads of one; "
            f"use {', '.join(how for how in HOWS if how not in _OF_A_PROCESS)}, or another transport"
        )
    if name in ("shm", "mpi") and fault.how == "drop_connection":
        raise ConfigError(f"fault 'drop_connection': transport {name!r} has no connection of its own to drop; use kill")


def _drop_connections(transport: Any) -> None:
    """Shuts the TCP connections of this process, but for those to its store."""
    if transport.name == "local":
        transport.fail("its connection was dropped")
        return
    store: Any = getattr(transport, "_store", None)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    store_port = getattr(store, "port", None)
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with connection, contextlib.suppress(OSError):  # listening, or shut already
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and store_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                connection.shutdown(socket.SHUT_RDWR)
