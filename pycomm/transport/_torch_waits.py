"""What waits inside torch: who waits for a message, threads that do so for others, and collectives that were given up.

[Note: the end of the interpreter]
A thread that comes back from torch when the interpreter is being ended finds no Python: it is ended in the middle of
C++, and that ends the process ("terminate called"). Ranks end together, so connections break at just that time. So at
exit, after ``finalize``, what still waits is made to come back first: a receive that is out of time at once makes gloo
end all waits of its group, and waits that can be left are not begun again. A thread that lets go of one of torch's
groups or handles comes back from torch, too; so neither errors (``errors.forget_locals``) nor messages that are
complete keep them.

[Note: collectives that were given up]
gloo runs a collective in a thread of the group's, and who destroys the group waits for it. A call that is out of time,
or interrupted, or whose peer is lost, leaves it there: it may wait on for a peer that lives, or, as gloo forgets the
receive that is under way when a connection breaks, for the rest of a message that will never come. So the group of such
a call is kept here until gloo is done with it.

[Note: slices that end too soon]
Who leaves a wait does so by a flag, which gloo looks at before it looks whether the message is there. If the slice is
over before the thread has got to its wait, as another one has its core, gloo says no whatever has come. After a long
slice the next one tells. But who finds the group broken, or its time over, asks for the last time, and what it then
takes for missing is lost: so it asks several times, and never for less than the clock's tick. Measured on one busy
core, of messages that had come one question in 14 was answered by no; with a tick, one in 300.

[Note: ends that come first]
A thread that waits in gloo looks whether the connection has ended before it looks whether the message is there. If it
is kept from its core meanwhile, it finds both: what a rank sent, or took, before it closed the group would be an error.
Who asks anew is told of the message: then gloo looks for that first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .._native import GlooMessage
    from ._torch_messages import Posted

__all__ = [
    "LAST_LOOK_S",
    "NEVER_SENT_TAG",
    "end_waits",
    "given_up",
    "has_come_after_all",
    "helpers",
    "wait_for_a_slice",
]

NEVER_SENT_TAG = (1 << 29) + 3  # see EXCHANGE_TAG of _torch_messages.py
_LOOK_S, _LOOKS = 5e-3, 3
LAST_LOOK_S = _LOOK_S * _LOOKS  # what who asks for the last time leaves to another thread that waits
_AT_ONCE = timedelta(milliseconds=1)
_MOST_IDLE = 8
_CLOSE_S = 0.5
_EXIT_S = 5.0


class _Helpers:
    """Threads that wait inside torch where who wants a message cannot: such a wait cannot be polled, a message may have
    several parts, and where torch has changed no wait can be left without an end to gloo's connections. A thread that
    is done takes the next wait.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._waiting: set[Posted] = set()
        self.is_ending = False

    def complete(self, posted: Posted) -> None:
        """Completes ``posted`` in a thread that is free, or a new one."""
        with self._lock:
            self._waiting.add(posted)
            is_one_idle = self._idle > 0
            self._idle -= is_one_idle
        if not is_one_idle:
            threading.Thread(target=self._work, name="pycomm-message", daemon=True).start()
        self._jobs.put(posted)

    @property
    def is_idle(self) -> bool:
        """Whether no thread is inside torch."""
        return not self._waiting

    def groups(self) -> list[Any]:
        """Returns the gloo groups of the messages that are waited for."""
        with self._lock:
            return [posted.gloo for posted in self._waiting if posted.gloo is not None]

    def _work(self) -> None:
        while True:
            posted = self._jobs.get()
            posted.complete()
            with self._lock:
                self._waiting.discard(posted)
                if self._idle >= _MOST_IDLE:
                    return
                self._idle += 1
            del posted  # and the memory that it keeps


_waiting: set[int] = set()  # the threads that are in ``wait_for_a_slice``


def wait_for_a_slice(message: GlooMessage, longest: timedelta, slice_s: float) -> bool:
    """Waits until ``message`` is complete, or for a slice; says whether it is. In torch, unless the process ends.

    With a slice of 0 it asks whether the message is complete now, which takes some milliseconds if it is not: [Note:
    slices that end too soon].
    """
    _waiting.add(threading.get_ident())
    try:
        if not helpers.is_ending:
            if slice_s > 0:
                return message.wait(longest, slice_s)
            for _ in range(_LOOKS):  # no generator: it is a closure, which an error keeps with the message
                if message.wait(longest, _LOOK_S):
                    return True
            return False
    except RuntimeError:
        if not has_come_after_all(message.wait, _LOOK_S):
            raise
        return True
    finally:
        _waiting.discard(threading.get_ident())
    time.sleep(slice_s)
    return message.is_complete


def has_come_after_all(wait: Callable[..., bool], *slice_s: float) -> bool:
    """Says whether a message is complete though ``wait(timeout)`` for it has raised: [Note: ends that come first]."""
    for _ in range(_LOOKS):
        with contextlib.suppress(RuntimeError):
            if wait(_AT_ONCE, *slice_s):
                return True
    return False


class _Call(NamedTuple):
    """A collective of torch's, and the group that runs it."""

    work: Any
    group: Any


class _GivenUp:
    """The collectives that were given up; see the note on top of this file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Call] = []

    def keep(self, work: Any, group: Any) -> None:
        """Takes over a collective whose caller gives it up, if it has not ended."""
        if not work.is_completed():
            with self._lock:
                self._calls.append(_Call(work, group))

    def groups(self) -> list[Any]:
        """Returns the groups that are kept; lets go of those that have ended."""
        with self._lock:
            ended = [call for call in self._calls if call.work.is_completed()]
            self._calls = [call for call in self._calls if call not in ended]
            return [call.group for call in self._calls]

    def end(self, group: Any) -> None:
        """Makes gloo end those of ``group``, if it can be brought to it; the group has no calls after this."""
        if group in self.groups():
            end_waits(group)
            deadline = time.monotonic() + _CLOSE_S
            while group in self.groups() and time.monotonic() < deadline:
                time.sleep(1e-3)


def end_waits(group: Any) -> None:
    """Makes gloo end all waits of ``group``: breaks its connections."""
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # always: that connection is broken, or now all are
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


@atexit.register
def _end_all() -> None:
    """Makes all threads come back from torch, and leaves to the process's end what does not."""
    helpers.is_ending = True
    for group in {id(group): group for group in helpers.groups() + given_up.groups()}.values():
        end_waits(group)
    deadline = time.monotonic() + _EXIT_S
    while not (helpers.is_idle and not _waiting and not given_up.groups()) and time.monotonic() < deadline:
        time.sleep(1e-3)
    for group in given_up.groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # to destroy it would take as long as its call


helpers = _Helpers()
given_up = _GivenUp()
