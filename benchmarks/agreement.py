"""What it costs that ranks compare what they call: ``python benchmarks/agreement.py``.

In one job, in turns: an all_reduce by the library's bare call (``MPI_Allreduce`` by mpi4py, torch's ``allreduce``), by
the transport's own, which adds timeouts and Ctrl-C but compares nothing, and by ``pycomm.all_reduce``. The ratio is the
median over rounds of pycomm's time over the transport's in one round; the difference is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

import pycomm
from pycomm.cli.bench.session import own_mpirun
from pycomm.cli.tune.measure import time_in_turns
from pycomm.collectives.context import resolve
from pycomm.launch.run import run_job
from pycomm.sizes import format_bytes, parse_bytes
from pycomm.topology import detect_launch


def main() -> int:
    """Starts one job after the other, or is a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--transport", default="torch,mpi", help="default: %(default)s; torch is gloo")
    parser.add_argument("--sizes", default="4B,256KiB,4MiB", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--round-ms", type=float, default=30)
    options = parser.parse_args()
    if detect_launch().launcher != "none":
        torch.set_num_threads(1)
        return run(options)
    print("| transport | ranks | bytes | library | alone | pycomm | difference | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for transport in options.transport.split(","):
        for ranks in options.n.split(","):
            command = [*sys.argv, "--transport", transport]
            if transport == "mpi":
                status = subprocess.call([own_mpirun(), "-n", ranks, sys.executable, *command])
            else:
                status = run_job(["-n", ranks, *command])
            if status:
                return status
    return 0


def run(options: argparse.Namespace) -> int:
    """One rank: all sizes."""
    with pycomm.init(options.transport):
        group = resolve(None)
        for nbytes in map(parse_bytes, options.sizes.split(",")):
            tensor = torch.zeros(nbytes // 4)
            alone = partial(group.transport.all_reduce, tensor, tensor, pycomm.ReduceOp.SUM, 1.0, None)
            calls: dict[str, Callable[[], object]] = {"library": bare_call(group.transport, tensor), "alone": alone}
            calls["pycomm"] = partial(pycomm.all_reduce, tensor)
            times = time_in_turns(group, calls, options.rounds, options.round_ms)
            if group.rank == 0:
                name = "gloo" if options.transport == "torch" else options.transport
                print(f"| {name} | {group.world_size} | {format_bytes(nbytes)} | {cells(times)} |", flush=True)
    return 0


def bare_call(transport: Any, tensor: torch.Tensor) -> Callable[[], object]:
    """Returns the library's blocking all_reduce of ``tensor``, with everything prepared that can be."""
    if transport.name == "mpi":
        mpi = transport.mpi
        memory = [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.numel(), mpi.FLOAT]
        return partial(transport.communicator.Allreduce, mpi.IN_PLACE, memory, mpi.SUM)
    tensors = [tensor]
    return lambda: transport.group.allreduce(tensors).wait()


def cells(times: dict[str, list[float]]) -> str:
    """Returns one line's figures."""
    bare, alone, whole = (median(times[name]) * 1e6 for name in ("library", "alone", "pycomm"))
    ratio = median(a / b for a, b in zip(times["pycomm"], times["alone"], strict=True))
    return f"{bare:.0f} us | {alone:.0f} us | {whole:.0f} us | {whole - alone:+.0f} us | {ratio:.2f}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
