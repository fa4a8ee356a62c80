"""Bytes of parameters, gradients and optimizer at the peak, measured, beside ZeRO's formula, for every strategy.

    pycomm run -n 2 benchmarks/fsdp_memory.py
    pycomm run -n 4 benchmarks/fsdp_memory.py --layers 24

Three AdamW steps of a GPT. With P bytes of float32 parameters on n ranks the formula says 4 P for no_shard (parameters,
gradients, two moments), 2 P + 2 P / n for shard_optimizer, P + 3 P / n for shard_grad_op, 4 P / n for full_shard
(Rajbhandari et al. 2020, section 3). What is above it are the units at work: a gathered block, its gradients.
The last two rows keep states in the host's memory; on a machine without a GPU that is the same memory, and the columns
say what a GPU would be rid of.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from engine_models import GPT, Block
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import pycomm

COPIES = {  # parameters, gradients and two moments: those that a rank has in full, and those of which it has a part
    "no_shard": (4, 0),
    "shard_optimizer": (2, 2),
    "shard_grad_op": (1, 3),
    "full_shard": (0, 4),
}


def measure(layers: int, **options: Any) -> tuple[pycomm.FullyShardedDataParallel, int]:
    """Returns an engine that has made three steps, and the bytes of its model's parameters."""
    torch.manual_seed(0)
    gpt = GPT(width=192, layers=layers)
    nbytes = sum(p.nbytes for p in gpt.parameters())
    model = pycomm.FullyShardedDataParallel(gpt, wrap=Block, measures_activations=True, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (2, 33))
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = pycomm.init()
    console = Console(quiet=world.rank != 0, width=120)
    columns = "parameters", "gradients", "optimizer", "activations", "together", "formula", "ratio", "host"
    title = f"MiB at the peak of rank 0 of {world.world_size}, GPT of {options.layers} layers"
    table = Table("strategy", *columns, title=title)
    cases: list[dict[str, Any]] = [{"strategy": strategy} for strategy in COPIES]
    cases += [{"strategy": "full_shard", "offload": each} for each in ("optimizer", "parameters")]
    for case in cases:
        model, nbytes = measure(options.layers, **case)
        stats = model.memory_stats()
        whole, parts = COPIES[case["strategy"]]
        formula = nbytes * (whole + parts / world.world_size)
        row = [stats.parameters, stats.gradients, stats.optimizer, stats.activations, stats.states]
        cells = [f"{each.device_peak / 2**20:.2f}" for each in row]
        if "offload" in case:
            cells += ["", ""]
        else:
            cells += [f"{formula / 2**20:.2f}", f"{stats.states.device_peak / formula:.3f}"]
        name = case["strategy"] + (f", offload {case['offload']}" if "offload" in case else "")
        table.add_row(name, *cells, f"{stats.states.host_peak / 2**20:.2f}")
    console.print(table)
    pycomm.finalize()


if __name__ == "__main__":
    main()
