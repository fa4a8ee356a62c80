"""How close an all_reduce and a broadcast come to what the caches, the memory and Python allow.

    pycomm run -n 2 benchmarks/limits.py [--max-bytes 64MiB]

Of short messages: ``pycomm.all_reduce`` beside a call of a C function that does nothing but the loads and stores of one
(``bare_exchange.cpp``: no checks, no errors, no timeout, no tensor to read). Private buffers are reduced back to back;
shared ones are written anew before each call, which counts from the last rank's entry to the last one's exit.

Of long ones: the least that an all_reduce in place must do to a rank's buffer is to read it once and to write it once.
So in turns, on the same buffers and in the same rounds, it takes the times of ``pycomm.all_reduce`` and of one pass in
place (``tensor.neg_()``) by all ranks at once; and of ``pycomm.broadcast`` and of one copy to another buffer, by one
rank alone, past the caches from 4 MiB on (``pack_``). No library's all_reduce can be faster than the pass, and a
broadcast only where the cores of both ranks copy.

As in ``pycomm bench``, 2 to 16 buffers take turns, so that those of a megabyte and more come from memory and not from a
cache. A bar below the share of a peer's time that these limits take is out of reach here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.cpp_extension import load

import pycomm
from pycomm.cli.bench.worker.timing import back_to_back, sampled
from pycomm.ops.pack import pack_
from pycomm.sizes import format_bytes, parse_bytes

Call = Callable[..., object]
SETS_BYTES = 128 << 20
MAX_SETS = 16
ROUNDS = 7
ROUND_S = 0.02
SHORT = [4, 1 << 10, 4 << 10, 16 << 10, 64 << 10]
CHUNKS, CHUNK_CALLS, FRESH_CALLS = 20, 500, 2000
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def of_slowest(clock_ns: list[int]) -> torch.Tensor:
    """Returns the readings of the rank that came last."""
    latest = torch.tensor(clock_ns)
    pycomm.all_reduce(latest, pycomm.ReduceOp.MAX)
    return latest


# -- short messages: beside a bare exchange ----------------------------------------------------------------------------


def time_back_to_back(call: Call, arguments: list[tuple[Any, ...]]) -> float:
    """Returns the time of a call, in us, on each of ``arguments`` in turn: the median over chunks of calls."""
    pycomm.barrier()
    marks = back_to_back(call, arguments, CHUNKS, CHUNK_CALLS)
    return float(of_slowest(marks).diff().median()) / CHUNK_CALLS / 1000


def time_fresh(call: Call, arguments: list[tuple[Any, ...]], buffers: list[torch.Tensor]) -> float:
    """Returns the time of a call, in us, whose buffer is written anew: from the last rank's entry to the last exit."""
    source = torch.ones_like(buffers[0])

    def write(buffer: torch.Tensor) -> None:
        buffer.copy_(source)
        pycomm.barrier()

    starts, ends = sampled(call, arguments, FRESH_CALLS, [partial(write, buffer) for buffer in buffers])
    return float((of_slowest(ends) - of_slowest(starts)).median()) / 1000


class BareExchange:
    """The calls of ``bare_exchange.cpp``, over memory that both ranks map."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("bare_exchange.cpp")
        self.module: Any = load("bare_exchange", [str(source)], extra_cflags=["-O3", "-march=native", *WARNINGS])
        self.stride = SHORT[-1]
        self.memory = map_of_all(self.module.size + 2 * MAX_SETS * self.stride)
        self.module.join(self.memory.ctypes.data, pycomm.rank())

    def shared_buffer(self, rank: int, index: int, nbytes: int) -> torch.Tensor:
        """Returns buffer ``index`` of ``rank``."""
        start = self.module.size + (MAX_SETS * rank + index) * self.stride
        return torch.from_numpy(self.memory[start : start + nbytes].view(np.float32))


def map_of_all(nbytes: int) -> Any:
    """Returns ``nbytes`` zeros, on a page of their own, that all ranks of this host map; nothing of it stays behind."""
    names: list[Any] = [f"/dev/shm/limits-{time.time_ns()}"]
    pycomm.broadcast_object_list(names, 0)
    if pycomm.rank() == 0:
        with open(names[0], "xb") as file:
            file.truncate(nbytes)
    pycomm.barrier()
    memory = np.memmap(names[0], np.uint8, "r+")
    pycomm.barrier()
    if pycomm.rank() == 0:
        Path(names[0]).unlink()
    memory[:] = 0
    pycomm.barrier()
    return memory


def measure_short(bare: BareExchange, nbytes: int) -> list[float]:
    """Returns the medians over rounds, in us, of an all_reduce and of the bare exchange: private, then shared."""
    numel, me = nbytes // 4, pycomm.rank()
    private = [torch.zeros(numel) for _ in range(MAX_SETS)]
    shared = [pycomm.zeros(numel, shared=True) for _ in range(MAX_SETS)]
    own, others = ([bare.shared_buffer(rank, i, nbytes) for i in range(MAX_SETS)] for rank in (me, 1 - me))
    pairs = [(mine.data_ptr(), other.data_ptr(), numel) for mine, other in zip(own, others, strict=True)]
    rounds = [
        (
            time_back_to_back(pycomm.all_reduce, [(buffer,) for buffer in private]),
            time_back_to_back(bare.module.reduce_private, [(buffer.data_ptr(), numel) for buffer in private]),
            time_fresh(pycomm.all_reduce, [(buffer,) for buffer in shared], shared),
            time_fresh(bare.module.reduce_shared, pairs, own),
        )
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def show_short(console: Console) -> None:
    """Measures and prints the table of short messages on rank 0."""
    bare = BareExchange()
    table = Table(title="all_reduce of short messages, 2 ranks, us a call")
    for column in ("bytes", "private", "bare exchange", "ratio", "shared, written anew", "bare exchange", "ratio"):
        table.add_column(column, justify="right")
    for nbytes in SHORT:
        private_us, bare_us, shared_us, bare_shared_us = measure_short(bare, nbytes)
        cells = [f"{private_us:.2f}", f"{bare_us:.2f}", f"{private_us / bare_us:.2f}"]
        cells += [f"{shared_us:.2f}", f"{bare_shared_us:.2f}", f"{shared_us / bare_shared_us:.2f}"]
        table.add_row(format_bytes(nbytes), *cells)
    if pycomm.rank() == 0:
        console.print(table)


# -- long messages: beside a pass over memory and a copy ---------------------------------------------------------------


def time_us(call: Call, buffers: list[torch.Tensor], calls: int) -> float:
    """Returns the median time of one call, in us, every call on the next buffer."""
    times_ns = []
    pycomm.barrier()
    for index in range(calls):
        start_ns = time.perf_counter_ns()
        call(buffers[index % len(buffers)])
        times_ns.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times_ns) / 1000


def measure_long(nbytes: int) -> list[float]:
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


def show_long(console: Console, largest: int) -> None:
    """Measures and prints the table of long messages on rank 0."""
    table = Table(title=f"private buffers, {pycomm.world_size()} ranks, us a call")
    for column in ("bytes", "all_reduce", "one pass in place", "ratio", "broadcast", "one copy, one rank", "ratio"):
        table.add_column(column, justify="right")
    nbytes = 64 << 10
    while nbytes <= largest:
        reduce_us, pass_us, broadcast_us, copy_us = measure_long(nbytes)
        cells = [f"{reduce_us:.1f}", f"{pass_us:.1f}", f"{reduce_us / pass_us:.2f}"]
        table.add_row(
            format_bytes(nbytes), *cells, f"{broadcast_us:.1f}", f"{copy_us:.1f}", f"{broadcast_us / copy_us:.2f}"
        )
        nbytes *= 4
    if pycomm.rank() == 0:
        console.print(table)


def main() -> None:
    """Measures and prints both tables; the first one between two ranks only."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-bytes", default="64MiB", type=parse_bytes, help="largest buffer, such as 64MiB")
    largest = parser.parse_args().max_bytes
    torch.set_num_threads(1)
    console = Console()
    with pycomm.init():
        if pycomm.world_size() == 2:
            show_short(console)
        show_long(console, largest)


if __name__ == "__main__":
    main()
