"""The line between the conductor and a rank: one JSON object a line over a Unix socket."""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["Channel", "connect"]


class Channel:
    """A blocking, line-wise JSON channel. A rank that waits in ``receive`` sleeps in the kernel and burns no core."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one object; raises OSError if the other side is gone."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for one object; raises EOFError if the other side closed, TimeoutError if ``timeout_s`` ran out."""
        self.sock.settimeout(timeout_s)
        scanned = 0
        while (end := self._pending.find(b"\n", scanned)) < 0:
            scanned = len(self._pending)
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError("the other side closed the channel")
            self._pending += data
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def connect(path: str) -> Channel:
    """Connects to the conductor that listens at ``path``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    return Channel(sock)
