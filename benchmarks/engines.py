"""What communication costs a training step: the engines of pycomm beside torch's over gloo, and none.

    pycomm run -n 2 benchmarks/engines.py                            # one host, DistributedDataParallel
    pycomm run -n 2 benchmarks/engines.py --engine fsdp              # beside torch's FSDP2; the same modules are units
    pycomm run -n 2 benchmarks/engines.py --variants overlap=True bucket_bytes=4MiB      # a row more for each
    python benchmarks/two_hosts.py --rate 1gbit -- python benchmarks/engines.py --variants compression=auto    # as root
    ... --tasks gpt --batch 1 --length 8 --warm-up 12 --variants compression=auto  # where the wire dominates

A round makes one step of each kind, in turns, on the same inputs, each after a barrier; the time of a step is that of
the slowest rank. Exposed communication is the median of step - the step without communication, paired by round; the
ratio is that of pycomm to torch. Compare ratios, not milliseconds of two runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from engine_models import GPT, Block, ConvNet
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import pycomm

Step = Callable[[], None]
UNITS = {"gpt": Block, "conv": nn.Conv2d}


def make_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    """Returns one optimizer step of ``model`` on a fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def make_task(name: str, batch: int, length: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns a model, inputs and targets of one rank; ``length`` counts the tokens of a sample of text."""
    if name == "gpt":
        tokens = torch.randint(256, (batch, length + 1))
        return GPT(), tokens[:, :-1], tokens[:, 1:]
    return ConvNet(), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def with_torch(engine: str, task: str, model: nn.Module) -> nn.Module:
    """Returns ``model`` trained by torch's engine over gloo."""
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [each for each in model.modules() if isinstance(each, UNITS[task])]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def with_pycomm(engine: str, task: str, model: nn.Module, variant: str | None = None) -> nn.Module:
    """Returns ``model`` trained by pycomm's engine, with a variant's argument."""
    name, _, value = (variant or "").partition("=")
    argument = {name: {"True": True, "False": False}.get(value, value)} if variant else {}
    if engine == "ddp":
        return pycomm.DistributedDataParallel(model, **argument)
    return pycomm.FullyShardedDataParallel(model, **{"wrap": UNITS[task], **argument})


def measure(steps: dict[str, Step], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round, those of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(warm_up + rounds):
        for name, step in steps.items():
            pycomm.barrier()
            start = time.perf_counter()
            step()
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            pycomm.all_reduce(taken, pycomm.ReduceOp.MAX)
            if index >= warm_up:
                times[name].append(taken.item())
    return times


def report(task: str, model: nn.Module, times: dict[str, list[float]], console: Console, log: str | None) -> None:
    """Prints medians, exposed communication and ratios; appends them to ``log`` as a line of JSON."""
    exposed = {
        name: median(step - none for step, none in zip(each, times["none"], strict=True))
        for name, each in times.items()
    }
    numel = sum(p.numel() for p in model.parameters())
    title = f"{task}, {numel / 1e6:.1f} M parameters, {pycomm.world_size()} ranks, {pycomm.get_group().transport.name}"
    table = Table("step", "ms", "exposed ms", "exposed / torch", "step / torch", title=title)
    for name, each in times.items():
        to_torch = exposed[name] / exposed["torch"], median(a / b for a, b in zip(each, times["torch"], strict=True))
        row = [f"{1e3 * median(each):.1f}", f"{1e3 * exposed[name]:.2f}", *(f"{ratio:.2f}" for ratio in to_torch)]
        table.add_row(name, *(row if name != "none" else [row[0], "", "", row[3]]))
    console.print(table)
    if log is not None and pycomm.rank() == 0:
        with open(log, "a") as file:
            medians = {name: median(each) for name, each in times.items()}
            file.write(json.dumps({"task": task, "median_s": medians, "exposed_s": exposed}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--tasks", default="gpt,conv")
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank (default: 4)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample of gpt, at most 64 (default: 64)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5, help="rounds before them (default: 5)")
    parser.add_argument("--variants", nargs="*", default=[], help="arguments of the engine, NAME=VALUE")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = pycomm.init()
    dist.init_process_group("gloo")
    console = Console(quiet=group.rank != 0)
    for task in options.tasks.split(","):
        torch.manual_seed(0)
        model, _, _ = make_task(task, 1, options.length)
        torch.manual_seed(group.rank)
        _, inputs, targets = make_task(task, options.batch, options.length)
        wrapped: dict[str, nn.Module] = {
            "none": copy.deepcopy(model),
            "torch": with_torch(options.engine, task, copy.deepcopy(model)),
            "pycomm": with_pycomm(options.engine, task, copy.deepcopy(model)),
        }
        for variant in options.variants:
            wrapped[variant] = with_pycomm(options.engine, task, copy.deepcopy(model), variant)
        steps = {name: make_step(each, inputs, targets) for name, each in wrapped.items()}
        times = measure(steps, options.rounds, options.warm_up)
        report(task, model, times, console, options.json)
        for name, each in wrapped.items():
            if isinstance(each, pycomm.DistributedDataParallel):
                sizes = [f"{bucket.flat.nbytes / 2**20:.1f}" for bucket in each.reducer.buckets]
                console.print(f"{name}: buckets of {', '.join(sizes)} MiB")
    dist.destroy_process_group()
    pycomm.finalize()


if __name__ == "__main__":
    main()
