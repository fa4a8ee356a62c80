"""A free port for a store that a rank is to serve a little later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 20000, 65535  # of those to choose from; many services have one below
_TRIES = 64


def free_port(port: int = 0) -> int:
    """Returns ``port``, or one that is free if that is 0. Raises OSError if it is taken, at whichever address.

    The store listens seconds later, once rank 0 has imported torch. Until then the kernel may give a port of its own
    range (ip(7), ip_local_port_range) to any program that connects to something, so the port is one outside of that
    range, drawn by chance. And torch's store listens at every address: a port that is free on loopback alone is none.
    """
    if port:
        return _bound(port)
    first, last = (int(number) for number in _KERNELS.read_text(encoding="ascii").split())
    outside = [*range(_FIRST, first), *range(last + 1, _LAST + 1)]
    for candidate in random.Random().sample(outside, min(_TRIES, len(outside))):
        with contextlib.suppress(OSError):
            return _bound(candidate)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return int(probe.getsockname()[1])
