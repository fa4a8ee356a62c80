"""The bubble of every pipeline schedule: simulated from measured times, and measured.

    pycomm run -n 2 benchmarks/pipeline.py
    pycomm run -n 4 benchmarks/pipeline.py --microbatches 8 --svg docs/pipeline_zbv.svg zbv

Every schedule trains the same GPT, cut by measured time. The measured bubble is the share of the slowest rank's step in
which the ranks did not compute. Simulated is what the schedule alone makes them wait: with the time that each F, B, I
and W took in the same step, and messages that take no time. Ahead is the same with the means of each stage in the step
before: what could be known beforehand, on a machine whose times vary. All are medians over steps, the ratio that of
measured to simulated, paired. Ranks should have a core each.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from engine_models import GPT
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import pycomm
from pycomm.engines.pipeline.draw import to_svg, to_text
from pycomm.engines.pipeline.schedules import SCHEDULES, make
from pycomm.engines.pipeline.simulate import simulate


class Front(nn.Module):
    """Embedding and positions of a GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.embedding, self.position = gpt.embedding, gpt.position

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens (batch, length)`` to ``(batch, length, width)``."""
        return self.embedding(tokens) + self.position[: tokens.shape[1]]


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of ``scores (batch, length, vocabulary)``."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Found(NamedTuple):
    """Of one schedule: medians over steps, of seconds and bubbles, and the activations simulated and held."""

    wall_s: float
    ahead: float
    simulated: float
    measured: float
    ratio: float
    simulated_activations: int
    activations: int


def measure(name: str, options: argparse.Namespace) -> Found:
    """Trains by schedule ``name`` and returns what was found."""
    torch.manual_seed(0)
    gpt = GPT(layers=options.layers)
    layers = [Front(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.head)]
    tokens = torch.randint(256, (options.microbatches * options.rows, 65))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    sample = inputs[: options.rows]
    pipeline = pycomm.Pipeline(layers, loss_of, options.microbatches, schedule=name, split="time", sample=sample)
    for _ in range(options.warm_up):
        pipeline.step(inputs, targets)
    walls, ahead, simulated, measured, peak = [], [], [], [], 0
    times = pipeline.measured_times()
    for _ in range(options.steps):
        pycomm.barrier()
        pipeline.step(inputs, targets)
        report = pipeline.report
        assert report is not None
        told = torch.tensor([report.wall_s, report.peak_activations], dtype=torch.float64)
        pycomm.all_reduce(told, pycomm.ReduceOp.MAX)
        computed = torch.tensor([report.compute_s], dtype=torch.float64)
        pycomm.all_reduce(computed)
        walls.append(told[0].item())
        measured.append(1 - computed.item() / (walls[-1] * pycomm.world_size()))
        peak = int(told[1])
        ahead.append(simulate(pipeline.schedule, times).bubble)
        simulated.append(simulate(pipeline.schedule, pipeline.measured_actions()).bubble)
        times = pipeline.measured_times()
    held = max(simulate(pipeline.schedule, times).peak_activations)
    ratio = median(real / paper for real, paper in zip(measured, simulated, strict=True))
    return Found(median(walls), median(ahead), median(simulated), median(measured), ratio, held, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES.names()))
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="of a microbatch (default: 2)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--svg", default=None, help="draw the first schedule, with equal times, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = pycomm.init()
    console = Console(quiet=group.rank != 0, width=110)
    table = Table(
        "schedule", "step, ms", "bubble ahead", "simulated", "measured", "ratio", "activations simulated", "held"
    )
    for name in options.schedules:
        found = measure(name, options)
        row = [f"{1e3 * found.wall_s:.0f}", f"{found.ahead:.1%}", f"{found.simulated:.1%}", f"{found.measured:.1%}"]
        table.add_row(name, *row, f"{found.ratio:.2f}", str(found.simulated_activations), str(found.activations))
    console.print(table)
    if options.svg and group.rank == 0:
        schedule = make(options.schedules[0], group.world_size, options.microbatches)
        Path(options.svg).write_text(to_svg(schedule, simulate(schedule)))
        console.print(to_text(schedule, simulate(schedule)))
    pycomm.finalize()


if __name__ == "__main__":
    main()
