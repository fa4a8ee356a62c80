"""How long a world takes to start, reduce and end: ``python benchmarks/startup.py 64``.

The ranks are processes forked from one that has torch and pycomm loaded, so importing them is not counted: the time runs
from the moment when every process stands ready to the moment when the last one has left ``finalize``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist

import pycomm
from pycomm.transport import shm as _shm  # noqa: F401  what init would import

SIZES = (1, 1000, 100_000)


def rank_main(rank: int, world_size: int, port: int, ready: Barrier, done: Barrier) -> None:
    """One rank: init, an all_reduce of each size, barrier, finalize."""
    torch.set_num_threads(1)
    ready.wait()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    pycomm.init("shm", rank=rank, world_size=world_size, store=store)
    for numel in SIZES:
        tensor = torch.ones(numel)
        pycomm.all_reduce(tensor)
        assert (tensor == world_size).all(), "wrong sum"
    pycomm.barrier()
    pycomm.finalize()
    done.wait()


def main() -> int:
    """Runs the worlds and prints their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_size", type=int, nargs="?", default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    for _ in range(options.rounds):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ready, done = context.Barrier(options.world_size + 1), context.Barrier(options.world_size + 1)
        ranks = [
            context.Process(target=rank_main, args=(rank, options.world_size, store.port, ready, done), daemon=True)
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
