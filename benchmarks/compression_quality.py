"""What compression costs in quality: two models trained on real data, with each compressor beside no compression.

    pycomm run -n 2 benchmarks/compression_quality.py --task digits
    pycomm run -n 4 benchmarks/compression_quality.py --task gpt --json results.jsonl

``digits``: a small convolutional net on scikit-learn's handwritten digits, with SGD and smoothed labels: without them a
handful of images makes the loss, and runs that differ in one bit end a tenth apart. ``gpt``: a byte-level transformer
on the sources of Python's standard library, with AdamW. All runs of a seed start from the same parameters and see the
same batches; the ranks split each batch. The loss is that of held-out data after the last step. The table shows it
relative to that of the uncompressed run; a row of more than +2 % says MISS.

With ``m=0.9`` the compressor has the momentum in place of the optimizer, whose own is off for the tensors that are
compressed.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_models import Block
from torch import nn
from torch.nn import functional

import pycomm

COMPRESSIONS = (
    "none",
    "int8+ef",
    "int4+ef",
    "sign:128+ef+policy",
    "sign:128+ef21:m=0.9+policy",
    "powersgd:4+ef",
    "powersgd:4+ef21:m=0.9+policy",
    "topk:0.01+ef",
    "topk:0.01+dgc:m=0.0,warmup={warmup}+policy",
    "topk:0.01+dgc:m=0.9,warmup={warmup}+policy",
)
ALLOWED = 0.02
WARM_UP = 0.2  # of the steps
MOMENTUM = 0.9
MIN_NUMEL, MIN_DIM = 2048, 2  # policy's: what is smaller is not compressed


class Task(NamedTuple):
    """A model, its data, and how it is trained: ``batches`` yields (inputs, targets) of the whole world."""

    model: nn.Module
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    held_out: list[tuple[torch.Tensor, torch.Tensor]]
    is_adam: bool
    smoothing: float = 0.0

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a batch."""
        return functional.cross_entropy(self.model(inputs), targets.flatten(), label_smoothing=self.smoothing)

    def optimizer(self, compression: str) -> torch.optim.Optimizer:
        """Returns the optimizer; with ``m=0.9`` the compressor has the momentum of what it compresses."""
        is_corrected, is_all = f"m={MOMENTUM}" in compression, "policy" not in compression
        is_large = [is_all or (p.numel() >= MIN_NUMEL and p.dim() >= MIN_DIM) for p in self.model.parameters()]
        groups: list[dict[str, Any]] = []
        for large in (False, True):
            is_off = large and is_corrected
            momentum = 0.0 if is_off else MOMENTUM
            group: dict[str, Any] = {
                "params": [p for p, its in zip(self.model.parameters(), is_large, strict=True) if its == large]
            }
            if self.is_adam:
                group["betas"] = (momentum, 0.95)
            else:  # ef21 averages, where SGD's momentum adds up
                group |= {
                    "momentum": momentum,
                    "lr": 0.02 / (1 - MOMENTUM) if is_off and "ef21" in compression else 0.02,
                }
            groups += [group] if group["params"] else []
        return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.01) if self.is_adam else torch.optim.SGD(groups)


class DigitNet(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.linear1 = nn.Linear(32 * 4 * 4, 64)
        self.linear2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images (batch, 1, 8, 8)`` to scores ``(batch, 10)``."""
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(images)))), 2)
        return self.linear2(functional.relu(self.linear1(x.flatten(1))))


class ByteGPT(nn.Module):
    """A transformer over bytes."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``text (batch, length)`` to scores of the next byte ``(batch * length, 256)``."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def digits_task(seed: int) -> Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    generator = torch.Generator().manual_seed(seed)
    held_out, training = torch.randperm(len(labels), generator=generator).split([360, len(labels) - 360])

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            chosen = training[torch.randint(len(training), (64,), generator=generator)]
            yield images[chosen], labels[chosen]

    torch.manual_seed(seed)
    model = DigitNet()
    return Task(model, batches(), [(images[held_out], labels[held_out])], is_adam=False, smoothing=0.1)


def gpt_task(seed: int, length: int = 64) -> Task:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(folder.glob("*.py"), key=lambda path: path.name)
    raw = torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:3_000_000]), dtype=torch.uint8)
    held_out_numel = len(raw) // 10
    generator = torch.Generator().manual_seed(seed)

    def cut(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        training = raw[:-held_out_numel]
        while True:
            yield cut(training, torch.randint(len(training) - length - 1, (32,), generator=generator))

    test = raw[-held_out_numel:]
    fixed = torch.linspace(0, len(test) - length - 2, 512).long()
    held_out = [cut(test, starts) for starts in fixed.split(64)]
    torch.manual_seed(seed)
    model = ByteGPT(length=length)
    return Task(model, batches(), held_out, is_adam=True)


TASKS = {"digits": (digits_task, 800), "gpt": (gpt_task, 1000)}


def train(task: Task, compression: str, steps: int) -> dict[str, Any]:
    """Trains, and returns the held-out loss and what the wire carried."""
    group = pycomm.new_group(range(pycomm.world_size()))
    rank, world_size = pycomm.rank(), pycomm.world_size()
    optimizer = task.optimizer(compression)
    base = [parameters["lr"] for parameters in optimizer.param_groups]
    start_s = time.perf_counter()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 20)
        for parameters, lr in zip(optimizer.param_groups, base, strict=True):
            parameters["lr"] = lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        inputs, targets = next(task.batches)
        own = slice(rank * len(inputs) // world_size, (rank + 1) * len(inputs) // world_size)
        loss = task.loss(inputs[own], targets[own])
        optimizer.zero_grad()
        loss.backward()
        with pycomm.coalescing(group):
            for name, parameter in task.model.named_parameters():
                pycomm.all_reduce(parameter.grad, pycomm.ReduceOp.AVG, group, compression=compression, name=name)
        optimizer.step()
    with torch.no_grad():
        losses = [task.loss(inputs, targets) for inputs, targets in task.held_out]
    report = group.compression.total
    return {
        "loss": float(torch.stack(losses).mean()),
        "ratio": round(report.ratio, 2),
        "seconds": round(time.perf_counter() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument(
        "--compressions", nargs="+", default=list(COMPRESSIONS), help="the first is what others are held to"
    )
    parser.add_argument("--steps", type=int, default=0, help="default: 800 for digits, 1000 for gpt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="append a line a run to this file")
    arguments = parser.parse_args()
    make, default_steps = TASKS[arguments.task]
    steps = arguments.steps or default_steps
    torch.set_num_threads(1)
    with pycomm.init():
        if pycomm.rank() == 0:
            print(f"{arguments.task}, {pycomm.world_size()} ranks, {steps} steps, torch {torch.__version__}")
            print(
                "| compression | bytes | " + " | ".join(f"loss, seed {seed}" for seed in arguments.seeds) + " | worst |"
            )
            print("|---|---|" + "---|" * (len(arguments.seeds) + 1))
        reference: dict[int, float] = {}
        for template in arguments.compressions:
            compression = template.format(warmup=round(WARM_UP * steps))
            runs = [(seed, train(make(seed), compression, steps)) for seed in arguments.seeds]
            if pycomm.rank() != 0:
                continue
            cells, worst = [], -1.0
            for seed, run in runs:
                more = run["loss"] / reference.setdefault(seed, run["loss"]) - 1
                worst = max(worst, more)
                cells.append(f"{run['loss']:.4f} ({more:+.1%})")
                if arguments.json:
                    row = {"task": arguments.task, "ranks": pycomm.world_size(), "steps": steps, "seed": seed}
                    with arguments.json.open("a") as file:
                        file.write(
                            json.dumps({**row, "compression": compression, **run, "relative": round(more, 5)}) + "\n"
                        )
            verdict = "" if worst <= ALLOWED else " MISS"
            print(
                f"| `{compression}` | 1/{runs[0][1]['ratio']:g} | {' | '.join(cells)} | {worst:+.1%}{verdict} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
