"""Sharded data parallelism: a byte-level GPT on the sources of Python's standard library.

Each rank keeps a part of parameters, gradients and optimizer state, and trains on pieces of its own. A block's
parameters are gathered before it runs and freed after it. Embedding and head share one parameter.

    pycomm run -n 2 examples/train_gpt.py
    pycomm run -n 2 examples/train_gpt.py --strategy shard_grad_op --compression int8+ef --plot gpt.png
    torchrun --nproc-per-node 2 examples/train_gpt.py
    mpirun -n 2 python examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys

import torch
from bytes_gpt import Block, draw, load_bytes, loss_of, make_layers, save_picture, single_byte_loss
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import pycomm


def mean_over_ranks(value: torch.Tensor) -> float:
    """Returns the mean of the ranks' scalars."""
    mean = value.detach().clone()
    pycomm.all_reduce_mean(mean)
    return mean.item()


def train(model: pycomm.FullyShardedDataParallel, data: torch.Tensor, options: argparse.Namespace, progress: Progress):
    """Makes ``options.steps`` steps on pieces that only this rank sees; returns the losses, the mean of the ranks'."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    generator = torch.Generator().manual_seed(options.seed + pycomm.rank())
    task = progress.add_task("training", total=options.steps, loss=float("nan"))
    losses = []
    for _ in range(options.steps):
        inputs, targets = draw(data, options.batch, generator)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        losses.append(mean_over_ranks(loss))
        progress.update(task, advance=1, loss=losses[-1])
    return losses


def evaluate(model: nn.Module, data: torch.Tensor, seed: int, rounds: int = 4) -> float:
    """Returns the loss on random pieces of ``data``, the mean over the ranks."""
    generator = torch.Generator().manual_seed(seed + pycomm.rank())
    model.eval()
    with torch.no_grad():
        total = sum(loss_of(model(x), y) for x, y in (draw(data, 32, generator) for _ in range(rounds)))
    return mean_over_ranks(total / rounds)


def memory_table(model: pycomm.FullyShardedDataParallel) -> Table:
    """Returns this rank's bytes by class."""
    table = Table("class", "MiB now", "MiB at the peak", title="memory of rank 0")
    for name, each in model.memory_stats()._asdict().items():
        table.add_row(name, f"{each.device / 2**20:.2f}", f"{each.device_peak / 2**20:.2f}")
    return table


def main() -> int:
    """Trains, evaluates and reports; returns 1 if the held-out loss is not below a model of single bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="pieces a step and rank (default: 16)")
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--compression", help="of gradients, for example int8+ef")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="save the loss curve, for example as gpt.png")
    options = parser.parse_args()
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")

    torch.set_num_threads(1)
    world = pycomm.init()
    console = Console(quiet=world.rank != 0)
    torch.manual_seed(options.seed)
    training, held_out = load_bytes()
    model = pycomm.FullyShardedDataParallel(
        nn.Sequential(*make_layers()),
        strategy=options.strategy,
        wrap=Block,
        compression=options.compression,
        measures_activations=True,
    )
    numel = sum(unit.numel for unit in model.units)
    console.print(
        f"{numel / 1e6:.2f} M parameters, {len(model.units)} units, {options.strategy} over {world.world_size} ranks, "
        f"{len(training) / 1e6:.1f} MB to learn from"
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        losses = train(model, training, options, progress)

    held_out_loss = evaluate(model, held_out, options.seed)
    single_bytes = single_byte_loss(training, held_out)
    console.print(memory_table(model))
    console.print(pycomm.monitor.table("collectives of rank 0"))
    if options.plot is not None and world.rank == 0:
        save_picture(losses, options.plot, f"{options.strategy}, {world.world_size} ranks")
        console.print(f"loss curve: {options.plot}")
    console.print(
        f"held-out loss: {held_out_loss:.3f} nats a byte ({held_out_loss / math.log(2):.2f} bits); by the bytes' "
        f"frequencies alone: {single_bytes:.3f}"
    )
    pycomm.finalize()
    return 0 if held_out_loss < single_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
