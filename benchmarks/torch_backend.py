"""DDP and FSDP2 of torch over the backend "pycomm" and over gloo, in turns in one run; and a 4-byte all_reduce.

    torchrun --nproc-per-node 2 benchmarks/torch_backend.py
    torchrun --nproc-per-node 2 benchmarks/torch_backend.py --what latency

A step is forward, backward and SGD of an MLP; the script is the same, only the name of the backend changes. "exposed"
is the step's time beyond that of the same step without communication: ``no_sync`` for DDP, the plain model for FSDP2.
Every figure is the median of all rounds; the slowest rank's. Compare the ratios, never microseconds of two runs. Below
the table stands what torch itself takes: a call of its backend "fake", which is C++ and does nothing, and a step of DDP
whose hook communicates nothing, and so only copies gradients into its buckets and back. Both backends pay these.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm.torch_backend

BACKENDS = ("pycomm", "gloo")


def slowest(seconds: float) -> float:
    """Returns the largest of the ranks' times."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def timed(step: Callable[[], None]) -> float:
    """Returns the seconds of one step that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return slowest(time.perf_counter() - start)


def latency(groups: dict[str, Any], rounds: int) -> dict[str, float]:
    """Returns the median microseconds of dist.all_reduce of 4 bytes.

    Each backend has a turn of some 100 ms a round, of which the first half is not counted: for milliseconds after calls
    of gloo's, whose threads sleep and wake, whatever comes next takes half as long again.
    """
    tensor, found = torch.zeros(1), {name: [] for name in groups}  # type: dict[str, list[float]]
    turns = {}
    for name, group in groups.items():
        for _ in range(2):  # the first time it connects
            start = time.perf_counter()
            for _ in range(100):
                dist.all_reduce(tensor, group=group)
            turns[name] = max(100, int(0.1 / slowest((time.perf_counter() - start) / 100)))
    for _ in range(rounds):
        for name, group in groups.items():
            for call in range(turns[name]):
                start_ns = time.perf_counter_ns()
                dist.all_reduce(tensor, group=group)
                if 2 * call >= turns[name]:
                    found[name].append((time.perf_counter_ns() - start_ns) / 1000)
    return {name: slowest(median(times)) for name, times in found.items()}


def network(width: int, depth: int) -> nn.Sequential:
    """An MLP of ``depth`` square layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())))


def stepper(model: nn.Module, batch: torch.Tensor, quiet: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """Returns a function that makes one training step, inside ``quiet()``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        with quiet():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def say_nothing(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and wants no strings
    """A hook of DDP that leaves each bucket as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def training(what: str, groups: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the median seconds of a step over each backend, of one "alone", without communication, and for DDP of one
    that makes its "copies" only.
    """
    batch = torch.randn(arguments.batch, arguments.width)
    steps: dict[str, Callable[[], None]] = {}
    for name, group in groups.items():
        model: nn.Module = network(arguments.width, arguments.depth)
        if what == "ddp":
            model = DistributedDataParallel(model, process_group=group)
            steps.setdefault("alone", stepper(model, batch, model.no_sync))
            silent = DistributedDataParallel(network(arguments.width, arguments.depth), process_group=group)
            silent.register_comm_hook(None, say_nothing)
            steps.setdefault("copies", stepper(silent, batch))
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            steps.setdefault("alone", stepper(network(arguments.width, arguments.depth), batch))
        steps[name] = stepper(model, batch)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(arguments.rounds + 2):
        for name, step in steps.items():
            spent_s = timed(step)
            if round_ >= 2:
                found[name].append(spent_s)
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="latency,ddp,fsdp2", help="some of latency, ddp, fsdp2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pycomm.torch_backend.register()
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    idle = dist.new_group(backend="fake")
    numel = sum(parameter.numel() for parameter in network(arguments.width, arguments.depth).parameters())
    table = Table(
        title=f"{dist.get_world_size()} ranks; a model of {numel * 4 / 1e6:.0f} MB, torch {torch.__version__}"
    )
    for column in ("what", "unit", *BACKENDS, "pycomm / gloo"):
        table.add_column(column, justify="left" if column == "what" else "right")
    notes: list[str] = []
    for what in arguments.what.split(","):
        if what == "latency":
            found = latency({**groups, "fake": idle}, arguments.rounds)
            notes.append(f"an all_reduce that does nothing, through torch to C++ and back: {found['fake']:.2f} us")
            rows = [("all_reduce of 4 B", "us", found)]
        else:
            steps = training(what, groups, arguments)
            alone_s = steps.pop("alone")
            if "copies" in steps:
                copies_ms = (steps.pop("copies") - alone_s) * 1e3
                notes.append(f"what DDP exposes by its own copies, communicating nothing: {copies_ms:.2f} ms")
            exposed = {name: (seconds - alone_s) * 1e3 for name, seconds in steps.items()}
            rows = [(f"{what} step", "ms", {name: seconds * 1e3 for name, seconds in steps.items()})]
            rows += [(f"{what} exposed communication ({alone_s * 1e3:.1f} ms without)", "ms", exposed)]
        for label, unit, values in rows:
            cells = [f"{values[name]:.2f}" for name in BACKENDS]
            table.add_row(label, unit, *cells, f"{values['pycomm'] / values['gloo']:.2f}")
    if dist.get_rank() == 0:
        table.caption = "\n".join(notes)
        Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
