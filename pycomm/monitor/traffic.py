"""What this process's TCP connections move, as the kernel counts it: which link keeps a collective waiting.

[Note: a full link]
In a ring all links carry equally much, those that could carry more too. The slow one is told at its sender: bytes are
on their way there, or wait to be, whenever one looks; at the others all has arrived most of the time. A connection is
named by its two addresses, which both of its ends know; so what the ends say together tells which ranks it joins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["Flow", "Link", "Traffic", "full_links", "measure_traffic"]

_LOOKS = 20
_FULL_LOOKS = 16  # of them: between two parts of a collective even a slow link is empty for a moment
_PAUSE_S = 0.03
_MOST_FLOWS = 64  # an answer has to fit a message of the store

_SIOCOUTQ = 0x5411  # bytes that the other end has not acknowledged
_ACKED_AT = 120  # tcpi_bytes_acked, of struct tcp_info in linux/tcp.h


class Flow(NamedTuple):
    """What one end of a connection sent; ``remote`` is the other end, "host:port"."""

    remote: str
    bytes_per_s: float
    is_full: bool


class Traffic(NamedTuple):
    """This process's ends of its connections, and what left them, if anything did."""

    ends: tuple[str, ...] = ()
    flows: tuple[Flow, ...] = ()


class Link(NamedTuple):
    """A link between two ranks, in one direction, whose sender nearly always has bytes that have not arrived."""

    sender: int
    receiver: int
    bytes_per_s: float


def measure_traffic() -> Traffic:
    """Watches this process's TCP connections for about 0.6 s: what is acknowledged comes in bursts."""
    with contextlib.ExitStack() as stack:
        connections = [(stack.enter_context(each), local, remote) for each, local, remote in _connections()]
        start_s = time.monotonic()
        looks = [[_look(each) for each, _, _ in connections]]
        for _ in range(_LOOKS - 1):
            time.sleep(_PAUSE_S)
            looks.append([_look(each) for each, _, _ in connections])
        elapsed_s = time.monotonic() - start_s
    flows = []
    for index, (_, _, remote) in enumerate(connections):
        seen = [row[index] for row in looks]
        is_full = sum(unacknowledged > 0 for _, unacknowledged in seen) >= _FULL_LOOKS
        flows.append(Flow(remote, (seen[-1][0] - seen[0][0]) / elapsed_s, is_full))
    busy = sorted((each for each in flows if each.is_full or each.bytes_per_s), key=lambda each: -each.bytes_per_s)
    return Traffic(tuple(local for _, local, _ in connections), tuple(busy[:_MOST_FLOWS]))


def full_links(traffic: Mapping[int, Traffic]) -> list[Link]:
    """Returns the full links between ranks, the slowest first, by the traffic of each rank that told it."""
    owner = {end: rank for rank, each in traffic.items() for end in each.ends}
    rates: dict[tuple[int, int], float] = {}  # of all connections between two ranks
    full: set[tuple[int, int]] = set()
    for rank, each in traffic.items():
        for flow in each.flows:
            pair = rank, owner.get(flow.remote, rank)
            rates[pair] = rates.get(pair, 0.0) + flow.bytes_per_s
            if flow.is_full and pair[0] != pair[1]:
                full.add(pair)
    return sorted((Link(*pair, rates[pair]) for pair in full), key=lambda link: link.bytes_per_s)


def _connections() -> Iterator[tuple[socket.socket, str, str]]:
    """Yields copies of this process's connected TCP sockets, with the addresses of their ends."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        with contextlib.suppress(OSError):  # it listens
            if is_tcp:
                ends = _address(found.getsockname()), _address(found.getpeername())
                yield found, *ends
                continue
        found.close()


def _address(name: tuple[str, int]) -> str:
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"


def _look(connection: socket.socket) -> tuple[int, int]:
    """Returns how many bytes have arrived at the other end so far, and how many are still to."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
    if len(info) < _ACKED_AT + 8:  # an older Linux
        return 0, 0
    left = struct.unpack("i", fcntl.ioctl(connection.fileno(), _SIOCOUTQ, b"\0" * 4))[0]
    return struct.unpack_from("<Q", info, _ACKED_AT)[0], left
