"""Pipeline x data parallelism: a byte-level GPT on the sources of Python's standard library.

The ranks are a mesh of pp x dp. Along pp each holds some layers; along dp they have the same layers for other batches,
and average their gradients. Embedding and head share one parameter, though they stand on different ranks.

    pycomm run -n 4 examples/train_gpt_pipeline.py                          2 x 2
    pycomm run -n 2 examples/train_gpt_pipeline.py --schedule zbv           2 x 1
    mpirun -n 4 python examples/train_gpt_pipeline.py --plot gpt.png
    torchrun --nproc-per-node 4 examples/train_gpt_pipeline.py
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys

import torch
from bytes_gpt import draw, load_bytes, loss_of, make_layers, save_picture, single_byte_loss
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pycomm


def train(pipeline: pycomm.Pipeline, data: torch.Tensor, options: argparse.Namespace, turn: int, progress: Progress):
    """Makes ``options.steps`` steps on pieces that only ranks of data-parallel coordinate ``turn`` see.

    Returns the losses.
    """
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    generator = torch.Generator().manual_seed(options.seed + turn)
    task = progress.add_task("training", total=options.steps, loss=float("nan"))
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(*draw(data, options.batch, generator)).item())
        optimizer.step()
        schedule.step()
        progress.update(task, advance=1, loss=losses[-1])
    return losses


def main() -> int:
    """Trains, evaluates and reports; returns 1 if the held-out loss is not below a model of single bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="pieces a step and data-parallel rank (default: 16)")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--pp", type=int, default=2, help="ranks along the pipeline (default: 2)")
    parser.add_argument("--schedule", default="zero_bubble")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="save the loss curve, for example as gpt.png")
    options = parser.parse_args()
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")

    torch.set_num_threads(1)
    world = pycomm.init()
    mesh = pycomm.Mesh(pp=options.pp, dp=-1)
    console = Console(quiet=world.rank != 0)
    torch.manual_seed(options.seed)
    training, held_out = load_bytes()
    pipeline = pycomm.Pipeline(
        make_layers(),
        loss_of,
        options.microbatches,
        mesh.group("pp"),
        schedule=options.schedule,
        data_group=mesh.group("dp"),
    )
    console.print(f"{mesh}; {len(training) / 1e6:.1f} MB to learn from, transport {world.transport.name}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        losses = train(pipeline, training, options, mesh["dp"], progress)

    generator = torch.Generator().manual_seed(options.seed)
    rounds = [pipeline.evaluate(*draw(held_out, 64, generator)).item() for _ in range(4)]
    held_out_loss = sum(rounds) / len(rounds)
    single_bytes = single_byte_loss(training, held_out)
    console.print(pycomm.monitor.table("collectives of rank 0"))
    if options.plot is not None and world.rank == 0:
        shape = " x ".join(f"{axis}={length}" for axis, length in mesh.shape.items())
        save_picture(losses, options.plot, f"{options.schedule}, {shape}")
        console.print(f"loss curve: {options.plot}")
    assert pipeline.report is not None
    console.print(f"bubble of rank 0 in the last step: {pipeline.report.bubble:.0%}")
    console.print(
        f"held-out loss: {held_out_loss:.3f} nats a byte ({held_out_loss / math.log(2):.2f} bits); by the bytes' "
        f"frequencies alone: {single_bytes:.3f}",
        soft_wrap=True,
    )
    pycomm.finalize()
    return 0 if held_out_loss < single_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
