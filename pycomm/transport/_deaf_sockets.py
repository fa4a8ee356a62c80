"""Sockets that have heard all that they are to hear.

gloo listens for as long as a group lives, though its ranks are all connected once it is made; and it keeps whatever
connects. It has no way to stop. So the kernel is told to drop what comes to such a socket from then on: by a packet
filter that lets nothing pass. Connections that exist have sockets of their own and do not notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Listener", "deafen", "listening_sockets"]

_SO_ATTACH_FILTER = 26  # of Linux; the module socket has no name for it
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of the packet


class Listener(NamedTuple):
    """A listening TCP socket of this process; ``inode`` tells it from a later one of the same descriptor."""

    fd: int
    inode: int


def listening_sockets() -> list[Listener]:
    """Returns those of this process; none where there is no /proc."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    with _borrowed(int(name)) as each:
                        is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                        if is_tcp and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            found.append(Listener(int(name), status.st_ino))
    return found


def deafen(listeners: Iterable[Listener]) -> None:
    """Lets no new connection reach them. A kernel that refuses leaves them as they are."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    for fd, inode in listeners:
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                with _borrowed(fd) as each:
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _borrowed(fd: int) -> socket.socket:
    """Returns the socket with a descriptor of its own, to be closed."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
