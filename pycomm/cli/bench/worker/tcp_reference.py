"""No library but the cable itself: what TCP carries between two hosts while the libraries are measured."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from .cases import Case
from .library import Buffer, Call, UnsupportedCaseError
from .torch_library import GlooLibrary

__all__ = ["TcpReference"]

_PIECE_BYTES = 1 << 20


class TcpReference(GlooLibrary):
    """Stands beside libraries that all_reduce between two hosts, as the limit of this machine in this minute.

    Each of the L ranks of a host streams its L-th of the buffer to its like on the other host and receives as much: the
    fewest bytes with which a sum can be learnt, by one connection each, and nothing is added up. gloo is its barrier.
    """

    def __init__(self, rendezvous_file: str) -> None:
        super().__init__(rendezvous_file)
        self.version = "plain TCP, the same bytes; nothing is added up"
        ranks_of_host = self.world_size // 2
        is_first = self.rank < ranks_of_host
        addresses: list[Any] = [None] * self.world_size
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) if is_first else socket.socket() as own:
            self.module.all_gather_object(addresses, own.getsockname() if is_first else None)
            like = (self.rank + ranks_of_host) % self.world_size
            self._connection = own.accept()[0] if is_first else socket.create_connection(addresses[like])
        self._share = ranks_of_host

    def bind(self, case: Case, output: Buffer, input: Buffer, root: int) -> Call:
        """Has a call for all_reduce in place, where ranks have equal shares."""
        content = output.bits.view("u1").data
        if case.verb != "all_reduce" or case.place != "in" or len(content) % self._share:
            raise UnsupportedCaseError("plain TCP streams the bytes of an all_reduce in place, and no others")
        part = len(content) // self._share
        return self._stream, (content[:part], bytearray(min(part, _PIECE_BYTES)))

    def _stream(self, sent: memoryview, received: bytearray) -> None:
        sender = threading.Thread(target=self._connection.sendall, args=(sent,))
        sender.start()
        left = len(sent)
        while left:
            nbytes = self._connection.recv_into(received, min(left, len(received)))
            if nbytes == 0:
                raise ConnectionError("the like on the other host is gone")
            left -= nbytes
        sender.join()

    def close(self) -> None:
        """Closes the connection, then as gloo."""
        self._connection.close()
        super().close()
