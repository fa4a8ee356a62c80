"""Ranks that end while calls are under way: ``exits.py TRANSPORT FOLDER HOW...``, as tests/faults/test_exits.py does.

This process forks two ranks for each HOW; over mpi it is one of two, which mpirun started. A rank does it and runs off
the end of this file, as a program does: so the interpreter ends as it always does. Prints ``HOW rank status seconds``
for each that it forked.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm
from pycomm.ops import native
from pycomm.topology import detect_launch
from pycomm.transport import TRANSPORTS

RANKS = 2
NUMEL = 1 << 18
_kept = torch.ones(NUMEL)  # a thread in which torch frees a tensor while Python ends is ended there, by std::terminate
PATIENCE_S = 500.0


def main(transport: str, folder: str, *ways: str) -> tuple[str, int, str] | None:
    """Returns what a rank is to do, in its own process, and where the ranks meet; None in the parent, at the end."""
    if transport == "mpi":
        return ways[0], detect_launch().rank, ""
    native()
    TRANSPORTS.load(transport)
    for name in ("init", "all_reduce", "isend", "irecv", "CommStream"):  # loaded once, and nothing else: it would be
        getattr(pycomm, name)  # taken apart at the end of every rank
    for how in ways:
        ranks = {}
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                return how, rank, f"{folder}/{how}"
            ranks[pid] = rank
        watch(how, ranks)
    return None


def watch(how: str, ranks: dict[int, int]) -> None:
    """Waits for the ranks, and says how each ended."""
    begin = time.monotonic()
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        took_s = time.monotonic() - begin
        if pid:
            print(how, ranks.pop(pid), os.waitstatus_to_exitcode(status), round(took_s, 2), flush=True)
        elif took_s > PATIENCE_S:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def run_off(how: str, rank: int) -> None:
    """Leaves calls under way."""
    if how == "dropped":
        pycomm.isend(torch.ones(NUMEL), 1 - rank)
        pycomm.irecv(torch.ones(NUMEL), 1 - rank)
        pycomm.irecv(torch.ones(3), 1 - rank, tag=9)  # which nobody sends
        for _ in range(10):  # after them: once these are done, the other rank may leave
            pycomm.all_reduce(torch.ones(NUMEL), async_op=True)
    elif how == "stream":  # of the last item the other rank knows nothing
        stream = pycomm.CommStream("gradients")
        works.extend(stream.all_reduce(torch.ones(10 * NUMEL)) for _ in range(10 + (rank == 0)))
    elif how == "alone":  # the other rank does not make the call; it closes the group
        if rank == 0:
            works.append(pycomm.all_reduce(torch.ones(NUMEL), async_op=True))
    elif how.startswith("stuck"):  # nor does it close the group, before this rank has broken its call off
        said = Path(sys.argv[2], f"{how}: broken off")
        stream = pycomm.CommStream("gradients")
        if rank == 0:
            tensor = torch.ones(NUMEL)
            is_call = how == "stuck"
            works.append(pycomm.all_reduce(tensor, async_op=True) if is_call else stream.all_reduce(tensor))
            watcher = logging.Handler(logging.WARNING)
            watcher.emit = lambda record: said.touch() if "broken off" in record.msg else None  # type: ignore[method-assign]
            logging.getLogger("pycomm").addHandler(watcher)
        while rank == 1 and not said.exists():
            time.sleep(0.01)
    elif how == "thread":  # in the middle of a synchronous call, which nobody ends
        threading.Thread(target=reduce_for_ever, daemon=True).start()
        time.sleep(0.1)
    else:
        works.extend(pycomm.all_reduce(torch.ones(NUMEL), async_op=True) for _ in range(10))
        if how == "exit":
            sys.exit(3)
        if how == "raise" and rank == 1:
            raise ValueError("a bug")


def reduce_for_ever() -> None:
    while True:
        pycomm.all_reduce(_kept)


works: list[pycomm.Work] = []  # kept to the very end
if (part := main(*sys.argv[1:])) is not None:
    its_way, its_rank, meeting = part
    torch.set_num_threads(1)
    met = {"rank": its_rank, "world_size": RANKS, "store": dist.FileStore(meeting, RANKS)} if meeting else {}
    pycomm.init(sys.argv[1], **met)
    pycomm.all_reduce(torch.ones(1))
    run_off(its_way, its_rank)
