"""How much faster an all_reduce is with compression: every compressor beside none, in turns, in one run.

A job that any launcher starts. Between two hosts on this machine (as root), and on shared memory:

    python benchmarks/two_hosts.py --rate 1gbit -- python benchmarks/compression.py
    python benchmarks/two_hosts.py --rate 100mbit -- python benchmarks/compression.py --rounds 1
    pycomm run -n 2 benchmarks/compression.py --compressions none auto

``x none`` is the median over rounds of none's time over the compressor's, both of the slowest rank. The input is normal
noise; error feedback has the tensor's name.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

import pycomm
from pycomm.collectives.auto_compression import TRIAL_CALLS, WARM_UP_CALLS

COMPRESSIONS = ("none", "bf16", "int8", "int4+ef", "topk:0.01+ef", "sign+ef", "auto")


def timed(compression: str, flat: torch.Tensor, given: torch.Tensor, group: pycomm.Group) -> float:
    """Returns the seconds of one call on the slowest rank."""
    flat.copy_(given)
    pycomm.barrier(group)
    start_s = time.perf_counter()
    pycomm.all_reduce(flat, group=group, compression=compression, name="bucket")
    taken = torch.tensor([time.perf_counter() - start_s])
    pycomm.all_reduce(taken, pycomm.ReduceOp.MAX, group)
    return float(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressions", nargs="+", default=list(COMPRESSIONS), help="none must be among them")
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with pycomm.init() as world:
        generator = torch.Generator().manual_seed(pycomm.rank())
        given = torch.randn(int(arguments.mib * 2**20) // 4, generator=generator)
        flat = torch.empty_like(given)
        for compression in arguments.compressions:
            for _ in range(WARM_UP_CALLS + TRIAL_CALLS if compression == "auto" else 1):
                timed(compression, flat, given, world)
        rows: dict[str, list[float]] = {compression: [] for compression in arguments.compressions}
        shares = {}
        for _ in range(arguments.rounds):
            for compression, times in rows.items():
                before = world.compression.total.wire_bytes
                times.append(timed(compression, flat, given, world))
                shares[compression] = world.compression.total.wire_bytes - before
        if pycomm.rank() == 0:
            print(f"{world!r}, {arguments.mib:g} MiB of float32, {arguments.rounds} rounds")
            print(f"{'compression':16} {'ms':>9} {'x none':>7} {'MiB sent by rank 0':>19}")
            for compression, times in rows.items():
                faster = median(none / own for none, own in zip(rows["none"], times, strict=True))
                sent = f"{shares[compression] / 2**20:.2f}" if shares[compression] else "-"
                print(f"{compression:16} {median(times) * 1e3:9.1f} {faster:7.2f} {sent:>19}")
            for decision in world.compression.decisions:
                print(decision)


if __name__ == "__main__":
    main()
