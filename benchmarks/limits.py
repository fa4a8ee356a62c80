"""How close an all_reduce and a broadcast come to what the caches, the memory and Python allow.

    pycomm run -n 2 benchmarks/limits.py --max-bytes 64MiB

Between two ranks, beside calls of C functions that do nothing but the loads and stores of a collective
(``bare_exchange.cpp``: no checks, no errors, no timeout, no tensor to read): all_reduces and broadcasts. Private
buffers follow each other back to back; shared ones are written anew before each call, which counts from the last
rank's entry to the last one's exit.

Of long messages also beside the least that must be done to the memory. An all_reduce in place must read each rank's
buffer once and write it once: so one pass in place (``tensor.neg_()``) by all ranks at once. A broadcast must be copied
to another buffer: so one copy, by one rank alone, past the caches from 4 MiB on (``pack_``). No library's all_reduce
can be faster than the pass, and a broadcast only where the cores of both ranks copy.

As in ``pycomm bench``, 2 to 16 buffers take turns, as does the root, so that buffers of a megabyte and more come from
memory and not from a cache. They hold random numbers: of zeros Zen 5 moves as many in 0.8 of the time. A bar below the
share of a peer's time that these limits take is out of reach here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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


def time_back_to_back(call: Call, arguments: list[tuple[Any, ...]], chunks: int, chunk_calls: int) -> float:
    """Returns the time of a call, in us, on each of ``arguments`` in turn: the median over chunks of calls."""
    pycomm.barrier()
    marks = back_to_back(call, arguments, chunks, chunk_calls)
    return float(of_slowest(marks).diff().median()) / chunk_calls / 1000


def time_fresh(call: Call, arguments: list[tuple[Any, ...]], buffers: list[torch.Tensor]) -> float:
    """Returns the time of a call, in us, whose buffer is written anew: from the last rank's entry to the last exit."""
    source = torch.ones_like(buffers[0])
    starts, ends = sampled(call, arguments, FRESH_CALLS, [partial(buffer.copy_, source) for buffer in buffers])
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
            time_back_to_back(pycomm.all_reduce, [(buffer,) for buffer in private], CHUNKS, CHUNK_CALLS),
            time_back_to_back(
                bare.module.reduce_private, [(buffer.data_ptr(), numel) for buffer in private], CHUNKS, CHUNK_CALLS
            ),
            time_fresh(pycomm.all_reduce, [(buffer,) for buffer in shared], shared),
            time_fresh(bare.module.reduce_shared, pairs, own),
        )
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def show_short(console: Console, bare: BareExchange) -> None:
    """Measures and prints the table of short messages on rank 0."""
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


# -- long messages: beside a pass over memory, a copy, and a bare broadcast --------------------------------------------


def measure_long(nbytes: int, bare: BareExchange | None) -> list[float]:
    """Returns medians over rounds, in us: an all_reduce, a pass, a broadcast, a copy; then what is bare, if any:
    an all_reduce and two broadcasts.
    """
    num_sets = max(2, min(MAX_SETS, SETS_BYTES // nbytes))
    buffers = [torch.randn(nbytes // 4) for _ in range(num_sets)]
    targets = [torch.randn(nbytes // 4) for _ in range(num_sets)]
    is_last = pycomm.rank() == pycomm.world_size() - 1
    roots = [index % pycomm.world_size() for index in range(num_sets)]
    alone = [(buffer,) for buffer in buffers]
    rooted = list(zip(buffers, roots, strict=True))
    copied = [(target, [buffer]) for target, buffer in zip(targets, buffers, strict=True)]
    measured: list[tuple[Call, list[tuple[Any, ...]]]] = [
        (pycomm.all_reduce, alone),
        (torch.Tensor.neg_, alone),
        (pycomm.broadcast, rooted),
        (pack_ if is_last else lambda target, sources: None, copied),
    ]
    if bare is not None:
        addressed = [(buffer.data_ptr(), nbytes, root) for buffer, root in rooted]
        measured += [(bare.module.reduce_swapped, [address[:2] for address in addressed])]
        measured += [(bare.module.broadcast_staged, addressed), (bare.module.broadcast_direct, addressed)]
    first_us = time_back_to_back(pycomm.all_reduce, alone, num_sets, 1)
    calls = max(num_sets, int(ROUND_S * 1e6 / first_us))
    rounds = []
    for _ in range(ROUNDS):
        for buffer in buffers:
            torch.nn.init.normal_(buffer)  # what is added up again and again grows beyond all bounds
        rounds.append([time_back_to_back(call, arguments, calls, 1) for call, arguments in measured])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def show_long(console: Console, largest: int, bare: BareExchange | None) -> None:
    """Measures and prints the table of long messages on rank 0."""
    table = Table(title=f"private buffers, {pycomm.world_size()} ranks, us a call")
    columns = ["bytes", "all_reduce", "one pass in place", "ratio", "bare exchange", "ratio"]
    columns += ["broadcast", "one copy, one rank", "ratio", "bare broadcast, staged", "direct", "ratio to the faster"]
    for column in columns:
        table.add_column(column, justify="right")
    nbytes = 64 << 10
    while nbytes <= largest:
        reduce_us, pass_us, broadcast_us, copy_us, *bare_us = measure_long(nbytes, bare)
        cells = [f"{reduce_us:.1f}", f"{pass_us:.1f}", f"{reduce_us / pass_us:.2f}"]
        cells += [f"{bare_us[0]:.1f}", f"{reduce_us / bare_us[0]:.2f}"] if bare_us else ["", ""]
        cells += [f"{broadcast_us:.1f}", f"{copy_us:.1f}", f"{broadcast_us / copy_us:.2f}"]
        if bare_us:
            cells += [*(f"{us:.1f}" for us in bare_us[1:]), f"{broadcast_us / min(bare_us[1:]):.2f}"]
        table.add_row(format_bytes(nbytes), *cells)
        nbytes *= 4
    if pycomm.rank() == 0:
        console.print(table)


def main() -> None:
    """Measures and prints both tables; what is bare between two ranks only."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-bytes", default="64MiB", type=parse_bytes, help="largest buffer, such as 64MiB")
    largest = parser.parse_args().max_bytes
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 230)
    with pycomm.init():
        bare = BareExchange() if pycomm.world_size() == 2 else None
        if bare is not None:
            show_short(console, bare)
        show_long(console, largest, bare)


if __name__ == "__main__":
    main()
