"""What strangers do to the store that rank 0 serves by TCP, which is torch's: ``python benchmarks/hostile.py``.

``pycomm run`` on one host has no such store, and shared memory no such socket. Each kind of message goes over a
connection of its own; then the store must still answer. Printed is by how much the memory of the process that serves it
grew. What a stranger stores who speaks its language is kept as any rank's is; that is not tried here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

MESSAGES = 2000  # of each kind
_HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)  # what torch's clients begin with
_SET, _ADD = b"\1", b"\3"
_LENGTHS = (1 << 20, 1 << 33, 1 << 40, 1 << 63, (1 << 64) - 1)


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def truncated(dice: random.Random) -> bytes:
    whole = _HELLO + _SET + text(b"key") + text(dice.randbytes(100))
    return whole[: dice.randrange(len(_HELLO), len(whole))]


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "random": lambda dice: dice.randbytes(dice.randrange(1, 300)),
    "random after a hello": lambda dice: _HELLO + dice.randbytes(dice.randrange(1, 300)),
    "truncated": truncated,
    "oversized": lambda dice: _HELLO + _SET + struct.pack("<Q", dice.choice(_LENGTHS)) + bytes(100),
    "replayed": lambda _: _HELLO + _ADD + text(b"count") + struct.pack("<q", 1),
}


def main() -> int:
    """Prints a line for each kind."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    dice = random.Random(1)
    print("| messages | memory grew by | a message |")
    print("| --- | --- | --- |")
    for name, make in KINDS.items():
        before = resident_bytes()
        for _ in range(MESSAGES):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(make(dice))
        store.set("alive", name)
        assert store.get("alive") == name.encode()
        time.sleep(0.3)
        grew = resident_bytes() - before
        print(f"| {MESSAGES} {name} | {grew / 2**20:.1f} MiB | {grew / MESSAGES / 1024:.1f} KiB |", flush=True)
    return 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    sys.exit(main())
