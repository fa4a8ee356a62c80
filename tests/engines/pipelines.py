"""Pipelines that no person would write: models, meshes, schedules and steps drawn at random.

    python tests/engines/pipelines.py --ranks 4 --seed 4711 --trainings 200

All ranks draw the same numbers. Beside the pipeline every rank trains the model in one process on everybody's rows:
after each step losses, gradients and parameters are the same, whatever the schedule, wherever the model is cut, and
whatever came before: evaluations, batches that were refused, gradients that were kept.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pycomm
from engines import trainings
from engines.cases import Doubles, Twice
from pycomm.engines.pipeline.schedules import SCHEDULES

WORDS, OUTPUTS = 11, 3
MOST_STAGES = 2  # of a rank, so that every model has enough layers
BOUND = 2e-4  # of the largest element: some layers hand on float32

# -- layers ------------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(x).tanh())


class Ignores(nn.Module):
    """Has a parameter that takes no part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


# What a stage hands on: of another shape, order in memory or dtype, its own input, a view; or no way for gradients.
WITHOUT_PARAMETERS: dict[str, Sequence[Callable[[torch.Tensor], torch.Tensor]]] = {
    "folded": (lambda x: x.unflatten(1, (2, -1)), torch.tanh, lambda x: x.flatten(1)),
    "transposed": (lambda x: x.t().contiguous().t(),),
    "same": (lambda x: x,),
    "viewed": (lambda x: x.view_as(x),),
    "cast": (lambda x: x.float(), lambda x: x.double()),
    "expanded": (lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1]),),
    "detached": (lambda x: x.detach() + 0.0,),
}


def build(seed: int) -> tuple[list[nn.Module], int | None]:
    """Returns the layers of model ``seed``, equal each time, and the width of its rows; None if it takes words."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    width = dice.choice([2, 4, 6])
    takes = None if dice.random() < 0.3 else width
    layers: list[nn.Module] = [nn.Embedding(WORDS, width)] if takes is None else [nn.Linear(width, width)]
    plain: list[nn.Linear] = []
    while len(layers) < 8 or dice.random() < 0.8:
        kinds = ["linear", "linear", "in place", "other width", "twice", "residual", "ignores", *WITHOUT_PARAMETERS]
        kind = dice.choice(kinds)
        if kind == "linear":
            plain.append(nn.Linear(width, width, bias=dice.random() < 0.7))
            layers.append(nn.Sequential(plain[-1], nn.Tanh()))
        elif kind == "in place":
            changes = nn.ReLU(inplace=True) if dice.random() < 0.5 else Doubles()
            layers += [nn.Linear(width, width), changes, nn.Linear(width, width)]
        elif kind == "other width":
            before, width = width, dice.choice([2, 4, 6])
            layers.append(nn.Linear(before, width))
        elif kind in WITHOUT_PARAMETERS:
            layers += map(Apply, WITHOUT_PARAMETERS[kind])
        else:
            layers.append({"twice": Twice, "residual": Residual, "ignores": Ignores}[kind](width))
    layers.append(nn.Linear(width, OUTPUTS))
    for layer in plain[1:]:
        if layer.weight.shape == plain[0].weight.shape and dice.random() < 0.3:
            layer.weight = plain[0].weight
    for parameter in nn.Sequential(*layers[:-1]).parameters():
        parameter.requires_grad_(dice.random() < 0.85)
    return [layer.double() for layer in layers], takes


# -- a training --------------------------------------------------------------------------------------------------------


class Training:
    """One rank's part of the training ``seed``."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        dice = self.dice
        layers, self.takes = build(seed)
        self.alone = nn.Sequential(*build(seed)[0])
        self.names = dict(self.alone.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for parameter in nn.Sequential(*layers).parameters():
                parameter.add_(rank)  # all start from rank 0's
        self.shares = dice.choice([each for each in (1, 2) if world_size % each == 0])
        ranks = world_size // self.shares
        mesh = pycomm.Mesh(pp=ranks, dp=self.shares)
        self.share = mesh["dp"]
        schedule = dice.choice(SCHEDULES.names())
        is_interleaved = schedule == "interleaved_one_f_one_b"
        self.options = {"schedule": schedule, "is_checkpointed": dice.random() < 0.3}
        if is_interleaved or schedule == "gpipe":
            self.options["stages_per_rank"] = dice.randint(1, MOST_STAGES)
        self.microbatches = dice.choice([1, 2, 3]) * ranks if is_interleaved else dice.choice([1, 2, 3, 4, 6])
        self.pipeline = pycomm.Pipeline(
            layers,
            functional.mse_loss,
            self.microbatches,
            mesh.group("pp"),
            data_group=mesh.group("dp"),
            **self.options,
        )
        placement = self.pipeline.schedule.placement
        self.is_first, self.is_last = (self.pipeline.group.rank == placement[at] for at in (0, -1))
        models = [list(model.parameters()) for model in (self.pipeline, self.alone)]
        self.optimizers = [torch.optim.SGD(each, lr=0.05, momentum=0.9) for each in models if each]

    def run(self) -> None:
        for number in range(self.dice.randint(2, 4)):
            kind = self.dice.choice(["step", "step", "step", "evaluate", "refused"])
            self.what = f"seed {self.seed}, step {number}: {kind}, {self.shares} shares, {self.options}"
            batch = self.batch(number)
            mine = [each.chunk(self.shares)[self.share] for each in batch]
            given: list[Any] = list(mine)
            if self.dice.random() < 0.4:  # each rank what it needs, and no more
                given = [mine[0] if self.is_first else None, mine[1] if self.is_last else None]
            if kind == "step":
                self.step(batch, mine, given)
            elif kind == "evaluate":
                self.compare(self.pipeline.evaluate(*given), self.loss_alone(mine), "loss")
            else:
                self.refuse(mine)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed * 64 + number)
        rows = self.microbatches * self.shares * self.dice.choice([1, 2, 3])
        if self.takes is None:
            inputs = torch.randint(WORDS, (rows,), generator=draw)
        else:
            inputs = torch.randn(rows, self.takes, generator=draw, dtype=torch.float64)
        return inputs, torch.randn(rows, OUTPUTS, generator=draw, dtype=torch.float64)

    def step(self, batch: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], given: Sequence[Any]) -> None:
        zero = self.dice.choice(["none", "zeros", None])
        if zero is not None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=zero == "none")
        expected = self.loss_alone(mine)
        functional.mse_loss(self.alone(batch[0]), batch[1]).backward()
        self.compare(self.pipeline.step(*given), expected, "loss")
        for name, parameter in self.pipeline.named_parameters():
            self.compare(parameter.grad, self.names[name].grad, f"{name}.grad")
        for optimizer in self.optimizers:
            optimizer.step()
        for name, parameter in self.pipeline.named_parameters():
            self.compare(parameter.detach(), self.names[name].detach(), name)

    def refuse(self, mine: Sequence[torch.Tensor]) -> None:
        """A batch that the microbatches do not divide, or none; nothing is computed."""
        inputs = mine[0][:-1] if self.microbatches > 1 else None
        try:
            self.pipeline.step(inputs, mine[1])
        except pycomm.ConfigError:
            return
        raise AssertionError(f"{self.what}: no error")

    @torch.no_grad()
    def loss_alone(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(self.alone(batch[0]), batch[1])

    def compare(self, found: torch.Tensor | None, expected: torch.Tensor | None, name: str) -> None:
        """None and zeros are alike as gradients: a stage does not know of the others' ways."""
        if found is None or expected is None:
            other = expected if found is None else found
            assert other is None or not other.any(), f"{self.what}, {name}: got {found}, expected {expected}"
            return
        error = (found - expected).abs().max() / (1e-6 + expected.abs().max())
        assert error < BOUND, f"{self.what}, {name}: {error} off"


def pipelines(rank: int, seeds: Iterable[int]) -> None:
    """Runs this rank's part of the trainings ``seeds``."""
    for seed in seeds:
        Training(seed, rank, pycomm.world_size()).run()


if __name__ == "__main__":
    import engines.pipelines  # so that the ranks find this module by its name

    trainings.main(__doc__, engines.pipelines.pipelines)
