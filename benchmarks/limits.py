"""How close an all_reduce and a broadcast of private buffers are to what the memory allows.

    pycomm run -n 2 benchmarks/limits.py [--max-bytes 64MiB]

The least that any all_reduce in place must do to a rank's buffer is to read it once and to write it once. So in
turns, on the same buffers and in the same rounds, this takes the times of ``pycomm.all_reduce`` and of one pass in
place (``tensor.neg_()``) by all ranks at once; and of ``pycomm.broadcast`` and of one copy to another buffer, by one
rank alone, past the caches from 4 MiB on (``pack_``). As in ``pycomm bench``, buffers take turns, so that those of a
megabyte and more come from memory and not from a cache. No library's all_reduce can be faster than the pass, and a
broadcast only where the cores of both ranks copy. A bar below the share of a peer's time that these take is out of
reach here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import pycomm
from pycomm.ops.pack import pack_
from pycomm.sizes import format_bytes, parse_bytes

Call = Callable[[torch.Tensor], object]
SETS_BYTES = 128 << 20
MAX_SETS = 16
ROUNDS = 7
ROUND_S = 0.02


def time_us(call: Call, buffers: list[torch.Tensor], calls: int) -> float:
    """Returns the median time of one call, in us, every call on the next buffer."""
    times_ns = []
    pycomm.barrier()
    for index in range(calls):
        start_ns = time.perf_counter_ns()
        call(buffers[index % len(buffers)])
        times_ns.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times_ns) / 1000


def measure(nbytes: int) -> list[float]:
    """Returns the medians over rounds of an all_reduce, a pass, a broadcast and a copy, in us, of the slowest rank."""
    num_sets = max(2, min(MAX_SETS, SETS_BYTES // nbytes))
    buffers = [torch.zeros(nbytes // 4) for _ in range(num_sets)]
    targets = {buffer.data_ptr(): torch.zeros(nbytes // 4) for buffer in buffers}
    is_last = pycomm.rank() == pycomm.world_size() - 1

    def copy_alone(buffer: torch.Tensor) -> None:
        if is_last:
            pack_(targets[buffer.data_ptr()], [buffer])

    measured: list[Call] = [
        pycomm.all_reduce,
        torch.Tensor.neg_,
        lambda buffer: pycomm.broadcast(buffer, 0),
        copy_alone,
    ]
    first_us = torch.tensor(time_us(pycomm.all_reduce, buffers, num_sets))
    pycomm.all_reduce(first_us, pycomm.ReduceOp.MAX)  # all ranks make as many calls
    calls = max(num_sets, int(ROUND_S * 1e6 / float(first_us)))
    rounds = torch.tensor([[time_us(call, buffers, calls) for call in measured] for _ in range(ROUNDS)])
    pycomm.all_reduce(rounds, pycomm.ReduceOp.MAX)
    return [float(us) for us in rounds.median(dim=0).values]


def main() -> None:
    """Measures and prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-bytes", default="64MiB", type=parse_bytes, help="largest buffer, such as 64MiB")
    largest = parser.parse_args().max_bytes
    torch.set_num_threads(1)
    pycomm.init()
    table = Table(title=f"private buffers, {pycomm.world_size()} ranks, us a call")
    for column in ("bytes", "all_reduce", "one pass in place", "ratio", "broadcast", "one copy, one rank", "ratio"):
        table.add_column(column, justify="right")
    nbytes = 64 << 10
    while nbytes <= largest:
        reduce_us, pass_us, broadcast_us, copy_us = measure(nbytes)
        cells = [f"{reduce_us:.1f}", f"{pass_us:.1f}", f"{reduce_us / pass_us:.2f}"]
        table.add_row(
            format_bytes(nbytes), *cells, f"{broadcast_us:.1f}", f"{copy_us:.1f}", f"{broadcast_us / copy_us:.2f}"
        )
        nbytes *= 4
    if pycomm.rank() == 0:
        Console().print(table)
    pycomm.finalize()


if __name__ == "__main__":
    main()
