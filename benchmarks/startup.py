"""How long a world takes to start, reduce and end: ``python benchmarks/startup.py 64``.

The ranks are processes forked from one that has torch and pycomm loaded, so importing them is not counted: the time
runs from the moment when every process stands ready to the moment when the last one has left ``finalize``. The ranks
meet in a file: torch's TCPStore looks up the name of every client's address, which takes seconds where the resolver
does not answer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm
from pycomm.ops import native
from pycomm.transport import TRANSPORTS

SIZES = (1, 1000, 100_000)


def load() -> None:
    """Imports all that a rank will call; pycomm's names load on first use."""
    native()
    TRANSPORTS.load("shm")
    for name in pycomm.__all__:
        getattr(pycomm, name)


def rank_main(rank: int, world_size: int, meeting: str, ready: Barrier, done: Barrier) -> None:
    """One rank: init, an all_reduce of each size, barrier, finalize."""
    torch.set_num_threads(1)
    ready.wait()
    marks = [time.perf_counter()]
    store = dist.FileStore(meeting, world_size)
    pycomm.init("shm", rank=rank, world_size=world_size, store=store)
    marks.append(time.perf_counter())
    for numel in SIZES:
        tensor = torch.ones(numel)
        pycomm.all_reduce(tensor)
        assert (tensor == world_size).all(), "wrong sum"
        marks.append(time.perf_counter())
    pycomm.barrier()
    pycomm.finalize()
    marks.append(time.perf_counter())
    done.wait()
    if rank == 0:
        spans = ", ".join(f"{after - before:.2f}" for before, after in itertools.pairwise(marks))
        print(f"rank 0: init, all_reduces of {SIZES} elements, the end, in s: {spans}", flush=True)


def main() -> int:
    """Runs the worlds and prints their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_size", type=int, nargs="?", default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load()
    context = multiprocessing.get_context("fork")
    for _ in range(options.rounds):
        meeting = tempfile.mktemp(prefix="pycomm-startup-")
        ready, done = context.Barrier(options.world_size + 1), context.Barrier(options.world_size + 1)
        ranks = [
            context.Process(target=rank_main, args=(rank, options.world_size, meeting, ready, done), daemon=True)
            for rank in range(options.world_size)
        ]
        for process in ranks:
            process.start()
        ready.wait()
        begin = time.perf_counter()
        done.wait()
        spent_s = time.perf_counter() - begin
        print(f"{options.world_size} ranks: init, {len(SIZES)} all_reduces, barrier, finalize: {spent_s:.2f} s")
        for process in ranks:
            process.join()
        Path(meeting).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
