"""Trainings that no person would write: models drawn at random, wrapped and trained by steps drawn at random.

    python tests/engines/trainings.py --ranks 4 --seed 4711 --trainings 200

All ranks draw the same numbers, so they build the same model and take the same steps; each has rows of its own. Beside
it every rank trains the model in one process on everybody's rows: after each step all parameters are the same, whatever
the engine, its units and its options, and whatever came before: passes inside and outside of ``no_sync``, several
forward passes before a backward one, accumulated gradients, an engine of another strategy that goes on from a
checkpoint.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pycomm
from engines.cases import OPTIMIZERS
from engines.drawn_models import FEATURES, WIDTH, Branch, Dense, Narrow, Residual, build
from engines.fsdp_cases import STRATEGIES

ROWS = 4


# -- steps -------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One microbatch of all ranks; ``ways`` are the branches that each of them takes."""

    kind: str
    ways: tuple[str, ...]
    is_synced: bool


class Step(NamedTuple):
    passes: list[Pass]
    is_synced_at_end: bool  # by sync_gradients(), after passes that are all inside no_sync
    zero: str | None  # how gradients are dropped first
    max_norm: float | None
    changes: bool  # to another engine, by a checkpoint


PASSES = (
    "plain",
    "plain",
    "plain",
    "two forward",
    "two forward, two backward",
    "input's gradient",
    "evaluated",
    "again",
)


def draw_steps(dice: random.Random, engine: str, world_size: int, has_branches: bool) -> list[Step]:
    is_optimizer = engine == "optimizer"
    kinds = [each for each in PASSES if not is_optimizer or each not in ("two forward, two backward", "again")]
    constant = dice.randint(1, 3)
    steps = []
    for _ in range(dice.randint(2, 5)):
        passes = []
        for _ in range(constant if is_optimizer else dice.choice([1, 1, 2, 3])):
            common = dice.choice(["a", "b", "ab"]) if has_branches else "ab"
            own = [dice.choice(["a", "b", "ab"]) for _ in range(world_size)]  # sharded parameters need all ranks
            ways = own if has_branches and engine != "fsdp" and dice.random() < 0.5 else [common] * world_size
            passes.append(Pass(dice.choice(kinds), tuple(ways), dice.random() < 0.4))
        at_end = not is_optimizer and dice.random() < 0.2
        zero = dice.choice(["engine", "none", "zeros", None])
        steps.append(Step(passes, at_end, zero, dice.choice([None, None, 0.5, 0.05]), dice.random() < 0.3))
    return steps


def run_pass(call: Any, model: nn.Module, each: Pass, rank: int, place: int, scale: float = 1.0) -> None:
    """Forward and backward of rank ``rank``'s rows."""
    for module in model.modules():
        if isinstance(module, Branch):
            module.way = each.ways[rank]

    def loss(number: int = 0, *, with_gradient: bool = False) -> torch.Tensor:
        draw = torch.Generator().manual_seed(place * 64 + rank * 2 + number)
        inputs, targets = torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64)
        found: torch.Tensor = scale * (call(inputs.requires_grad_(with_gradient)) - targets).square().mean()
        if with_gradient:
            torch.autograd.grad(found, inputs, retain_graph=True)
        return found

    if each.kind == "two forward":
        (loss(0) + 2 * loss(1)).backward()
    elif each.kind == "two forward, two backward":
        first, second = loss(0), loss(1)
        first.backward()
        second.backward()
    elif each.kind == "again":
        found = loss()
        found.backward(retain_graph=True)
        found.backward()
    else:
        if each.kind == "evaluated":
            with torch.no_grad():
                loss(1)
        loss(with_gradient=each.kind == "input's gradient").backward()


# -- a training --------------------------------------------------------------------------------------------------------


class Training:
    """One rank's part of the training ``seed``."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.dice = dice = random.Random(seed)
        self.engine = dice.choice(["ddp", "ddp", "fsdp", "fsdp", "fsdp", "optimizer"])
        self.features = {each for each in FEATURES if dice.random() < 0.4}
        self.make_optimizer = OPTIMIZERS[dice.choice(list(OPTIMIZERS))]
        self.steps = draw_steps(dice, self.engine, world_size, "branches" in self.features)
        self.model = build(seed, self.features)
        self.options = self.draw_options()
        self.alone = build(seed, self.features)
        self.alone_optimizer = self.make_optimizer(self.alone.parameters())
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(rank)  # an engine starts from rank 0's
        self.wrap(self.options)

    def draw_options(self) -> dict[str, Any]:
        dice = self.dice
        options: dict[str, Any] = {
            "overlap": dice.choice([None, True, False]),
            "buffers": dice.choice(["broadcast", "average", None]),
            "find_unused_parameters": "branches" in self.features or dice.random() < 0.2,
        }
        if self.engine == "ddp":
            sizes = {
                "bucket_bytes": dice.choice([64, 1000, "auto"]),
                "first_bucket_bytes": dice.choice([8, 300, 1 << 20]),
            }
            return {**options, **sizes}
        names = [name for name, _ in self.model.named_modules() if name]
        some = dice.sample(names, dice.randint(1, len(names)))
        return {
            **options,
            "strategy": dice.choice([*STRATEGIES, "full_shard"] + ["hybrid_shard"] * (self.world_size == 4)),
            "wrap": dice.choice(
                [None, Dense, (Dense, Narrow, Residual), some, some, lambda name, _: name in some, 1, 40]
            ),
            "reshard_after_forward": dice.random() < 0.7,
            "prefetch": dice.randint(0, 3),
            "offload": dice.choice([None, None, "optimizer"]),
        }

    def wrap(self, options: dict[str, Any]) -> None:
        if self.engine == "optimizer":
            pycomm.broadcast_parameters(self.model)
            self.wrapped: Any = self.model
            self.optimizer = pycomm.DistributedOptimizer(
                self.make_optimizer(self.model.parameters()),
                self.model.named_parameters(),
                backward_passes_per_step=len(self.steps[0].passes),
            )
            return
        if self.engine == "ddp":
            self.wrapped = pycomm.DistributedDataParallel(self.model, **options)
        else:
            mesh = [pycomm.Mesh(dp=2, fsdp=2)] if options["strategy"] == "hybrid_shard" else []
            self.wrapped = pycomm.FullyShardedDataParallel(self.model, *mesh, **options)
        self.optimizer = self.make_optimizer(self.wrapped.parameters())

    def change(self) -> None:
        """Goes on in another engine, whose model starts from other values, by whole states."""
        model = self.wrapped.full_state_dict()
        optimizer = self.wrapped.optimizer_state_dict(self.optimizer, full=True)
        self.model = build(self.seed, self.features)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(self.rank + 2)
        is_hybrid = self.options["strategy"] == "hybrid_shard"
        strategy = "hybrid_shard" if is_hybrid else self.dice.choice(STRATEGIES)
        self.wrap({**self.options, "strategy": strategy, "wrap": self.dice.choice([None, self.options["wrap"]])})
        self.wrapped.load_state_dict(model)
        self.wrapped.load_optimizer_state_dict(self.optimizer, optimizer)

    def run(self) -> None:
        for number, step in enumerate(self.steps):
            # Gradients that are kept, also as zeros, stay with the engine that has them.
            if step.changes and number > 0 and self.engine == "fsdp" and step.zero in ("engine", "none"):
                self.change()
            self.take_alone(number, step)
            self.take(number, step)
            self.compare(f"seed {self.seed}, step {number}: {step}")

    def take_alone(self, number: int, step: Step) -> None:
        if step.zero is not None:
            self.alone_optimizer.zero_grad(set_to_none=step.zero != "zeros")
        for index, each in enumerate(step.passes):
            for rank in range(self.world_size):
                run_pass(self.alone, self.alone, each, rank, self.place(number, index), 1 / self.world_size)
        if step.max_norm is not None:
            nn.utils.clip_grad_norm_(self.alone.parameters(), step.max_norm)
        self.alone_optimizer.step()

    def take(self, number: int, step: Step) -> None:
        is_optimizer = self.engine == "optimizer"
        if step.zero == "engine" and not is_optimizer:
            self.wrapped.zero_grad()
        elif step.zero is not None:
            self.optimizer.zero_grad(set_to_none=step.zero != "zeros")
        for index, each in enumerate(step.passes):
            is_last = index + 1 == len(step.passes)
            is_synced = is_optimizer or (each.is_synced or is_last) and not step.is_synced_at_end
            context: AbstractContextManager[Any] = nullcontext() if is_synced else self.wrapped.no_sync()
            with context:
                run_pass(self.wrapped, self.model, each, self.rank, self.place(number, index))
        if step.is_synced_at_end:
            self.wrapped.sync_gradients()
        if step.max_norm is not None and is_optimizer:
            self.optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), step.max_norm)
        elif step.max_norm is not None:
            self.wrapped.clip_grad_norm_(step.max_norm)
        self.optimizer.step()

    def compare(self, what: str) -> None:
        expected = dict(self.alone.named_parameters())
        with self.wrapped.full_parameters() if self.engine == "fsdp" else nullcontext():
            found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        assert list(found) == list(expected), what
        rtol, atol = (2e-4, 2e-5) if "single" in self.features else (1e-6, 1e-8)
        for name, parameter in found.items():
            difference = (parameter - expected[name]).abs()
            assert (difference <= atol + rtol * expected[name].abs()).all(), f"{what}, {name}: {difference.max()} off"

    def place(self, step: int, index: int) -> int:
        return (self.seed * 64 + step) * 8 + index


def trainings(rank: int, seeds: Iterable[int]) -> None:
    """Runs this rank's part of the trainings ``seeds``."""
    for seed in seeds:
        Training(seed, rank, pycomm.world_size()).run()


def main(about: str | None, job: Callable[[int, Iterable[int]], None]) -> None:
    """The command line of a file whose ``job`` runs a rank's part of some trainings."""
    from harness import run_ranks

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 24))
    parser.add_argument("--trainings", type=int, default=100)
    options = parser.parse_args()

    begin = time.monotonic()
    seeds = range(options.seed, options.seed + options.trainings)
    print(f"seeds {seeds.start} to {seeds.stop - 1}", end=" ", flush=True)
    run_ranks(options.ranks, job, seeds, transport=options.transport)
    print(f"{time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    import engines.trainings  # so that the ranks find this module by its name

    main(__doc__, engines.trainings.trainings)
