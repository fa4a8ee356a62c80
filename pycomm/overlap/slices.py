"""Lets the threads of a stream run as soon as they are woken, beside a computation that keeps every core busy.

Linux gives a thread that computes a slice of about three milliseconds before one that wakes up gets its core; a
collective is a dozen wake-ups one after the other. Since Linux 6.12 a thread may ask for a shorter slice
(sched_setattr, sched_runtime), and then it need not wait for the other's to end. It gets no more of the core by that,
only sooner, so no privilege is needed. Older kernels take the call and do nothing. Threads inherit it from the one
that starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Iterator

__all__ = ["begin_quick_switches", "end_quick_switches", "short_slices", "shorten_slice"]

_SLICE_NS = 100_000  # the least that Linux takes
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
_ATTR = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_OTHER = 0
_SWITCH_S = 2e-4


def _read() -> tuple[int, ...] | None:
    if not _GET:
        return None
    buffer = ctypes.create_string_buffer(_ATTR.size)
    if ctypes.CDLL(None).syscall(_GET, 0, buffer, _ATTR.size, 0) != 0:
        return None
    found = _ATTR.unpack(buffer.raw)
    return found if found[1] == _OTHER else None  # whoever chose a policy meant it


def _write(attributes: tuple[int, ...]) -> None:
    ctypes.CDLL(None).syscall(_SET, 0, ctypes.create_string_buffer(_ATTR.pack(*attributes), _ATTR.size), 0)


def shorten_slice() -> None:
    """Gives this thread a short slice, and those that it starts."""
    found = _read()
    if found is not None:
        size, policy, flags, nice, priority, _runtime, deadline, period = found
        _write((size, policy, flags, nice, priority, _SLICE_NS, deadline, period))


@contextlib.contextmanager
def short_slices() -> Iterator[None]:
    """Gives a short slice to the threads that are started meanwhile, by libraries too; this one gets its own back."""
    found = _read()
    shorten_slice()
    try:
        yield
    finally:
        if found is not None:
            _write(found)


class _Switches:
    lock = threading.Lock()
    users = 0
    usual_s = 0.0


def begin_quick_switches() -> None:
    """Lets a thread that waits for Python's lock have it after 0.2 ms, not 5, until ``end_quick_switches``.

    A computation of short calls gives the lock up in each of them, and has it again before a thread on a busy core has
    woken up; so that thread waits for the whole interval. It is the process's setting: the last of those who began
    ends it.
    """
    with _Switches.lock:
        if _Switches.users == 0:
            _Switches.usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_S, _Switches.usual_s))
        _Switches.users += 1


def end_quick_switches() -> None:
    """Ends what one ``begin_quick_switches`` began."""
    with _Switches.lock:
        _Switches.users -= 1
        if _Switches.users == 0:
            sys.setswitchinterval(_Switches.usual_s)
