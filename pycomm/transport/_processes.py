"""The processes of a job's ranks: which they are, whether they live, and how they ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from ..errors import NativeUnavailableError
from ..ops import native
from ..topology import host_id
from ._wording import NO_STATUS

__all__ = ["GONE", "Process", "Processes"]

_OUT_OF_SIGHT = -1
GONE = -2  # had ended before it could be looked up


class Process(NamedTuple):
    """A rank's process. ``start`` tells it from a later one of the same pid; ``fd`` is its pidfd, or ``GONE``, or
    another negative number where it cannot be seen from here.
    """

    pid: int
    start: str
    place: str  # host and pid namespace
    fd: int = _OUT_OF_SIGHT

    @classmethod
    def described(cls, text: str) -> Self:
        """Returns the one that its own ``description`` describes, not looked up yet."""
        pid, start, place = json.loads(text)
        return cls(int(pid), str(start), str(place))

    @staticmethod
    def description() -> str:
        """Returns what tells this process to others."""
        return json.dumps([os.getpid(), _start_of(os.getpid()), _place()])

    def look_up(self) -> Self:
        """Returns it with its pidfd, if it is of this host and not this process itself."""
        if self.place != _place() or self.pid == os.getpid():
            return self
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self._replace(fd=GONE)
        except OSError:  # the kernel is older than 5.3, or out of descriptors
            return self
        if _start_of(self.pid) == self.start:
            return self._replace(fd=fd)
        os.close(fd)  # another process has its pid by now
        return self._replace(fd=GONE)

    def is_dying(self) -> bool:
        """Whether it has ended, or is being ended (csrc/shm/process.h)."""
        try:
            return self.fd >= 0 and native().is_dead(self.fd, self.pid)
        except NativeUnavailableError:
            return False

    def exit_status(self) -> int:
        """Returns how it ended, as ``os.waitpid`` encodes it, or ``NO_STATUS``."""
        try:
            return native().exit_status(self.fd, self.pid) if self.fd >= 0 else NO_STATUS
        except NativeUnavailableError:
            return NO_STATUS


class Processes:
    """Those of the ranks of ``init``; groups made from it share them. Closes the pidfds with the last."""

    def __init__(self, members: Sequence[Process]) -> None:
        """Takes over the pidfds."""
        self.members = tuple(members)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit modules may be gone before this
        for member in self.members:
            if member.fd >= 0:
                close(member.fd)


def _place() -> str:
    namespace = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"{host_id()}/{namespace}"


def _start_of(pid: int) -> str:
    """Returns when a process was started, in clock ticks since boot; "" if it is not there."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
