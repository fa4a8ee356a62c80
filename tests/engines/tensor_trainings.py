"""Trainings of models that are cut over ranks, drawn at random: which layers, how, and what the steps do.

    python tests/engines/tensor_trainings.py --ranks 4 --seed 4711 --trainings 200

As trainings.py, beside one process on everybody's rows: after each step every parameter is the ordinary model's, or
this rank's part of it, and a norm that gradients are clipped by is the norm of the whole. With four ranks the model may
also be replicated or sharded, two by two.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pycomm
from engines.cases import OPTIMIZERS, part_of
from engines.trainings import main
from pycomm.engines.tensor import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelEmbedding,
    cut_same,
    parallelize,
)

WIDTH, HEAD_WIDTH, VOCABULARY, LENGTH, ROWS = 12, 1, 24, 12, 2  # 2, 3 and 4 ranks divide what they cut
ACTIVATIONS = [torch.tanh, functional.gelu, torch.sin]


# -- models: ``self.kinds`` says what becomes of each layer ------------------------------------------------------------


class Pair(nn.Module):
    """Two layers, with a third beside the first if it is ``gated``."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        hidden, self.activation = dice.choice([12, 24, 36]), dice.choice(ACTIVATIONS)
        self.up, self.down = (
            nn.Linear(WIDTH, hidden, dice.random() < 0.7),
            nn.Linear(hidden, WIDTH, dice.random() < 0.7),
        )
        self.gate = nn.Linear(WIDTH, hidden, dice.random() < 0.5) if dice.random() < 0.4 else None
        self.kinds = {"up": "column", "down": "row"} | ({"gate": "column"} if self.gate is not None else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))


class Attention(nn.Module):
    """It counts its heads by what its layers give."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, dice.random() < 0.7), nn.Linear(WIDTH, WIDTH)
        self.is_causal = dice.random() < 0.5
        self.kinds = {"qkv": "qkv", "out": "row"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[0], LENGTH
        q, k, v = self.qkv(x).view(batch, length, 3, -1, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class Gathered(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH, dice.random() < 0.7), dice.choice(ACTIVATIONS)
        self.kinds = {"linear": "column, gathered"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


class Whole(nn.Module):
    """What every rank computes alike."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))
        self.kinds: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x).tanh()


class Block(nn.Module):
    def __init__(self, inner: nn.Module, norm: nn.Module, is_checkpointed: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.is_checkpointed = inner, norm, is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_checkpointed or not torch.is_grad_enabled():
            return x + self.inner(self.norm(x))
        return x + checkpoint(lambda y: self.inner(self.norm(y)), x, use_reentrant=False)


class Model(nn.Module):
    """A small language model; ``sequence`` is the group over which its activations are cut along the sequence."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dice = random.Random(seed)
        self.is_sequence_cut = dice.random() < 0.35
        self.sequence: Any = None
        padding = dice.choice([None, 0, 7, VOCABULARY - 1])
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        kinds = [Pair, Pair, Attention] + ([] if self.is_sequence_cut else [Gathered, Whole])
        blocks: list[Block] = []
        for _ in range(dice.randint(1, 4)):
            if blocks and dice.random() < 0.2:
                blocks.append(dice.choice(blocks))  # in two places
                continue
            affine = dice.random() < 0.7
            norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)
            blocks.append(Block(dice.choice(kinds)(dice), norm, dice.random() < 0.25))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, dice.random() < 0.3)
        is_tied = dice.random() < 0.4
        if is_tied:
            self.head.weight = self.embedding.weight
        self.loss: nn.Module | None = None
        self.ignore_index = dice.choice([-100, 3])
        whole = not is_tied and not self.is_sequence_cut
        self.kinds = {
            "embedding": "vocabulary" if is_tied or dice.random() < 0.7 else "",
            "head": dice.choice(["column", "column", "column, gathered", ""] if whole else ["column"]),
        }
        for parameter in self.parameters():
            parameter.requires_grad_(dice.random() < 0.85)
        self.double()

    def plan(self) -> dict[str, str]:
        """Returns what becomes of each layer, by its name."""
        plan = {name: kind for name, kind in self.kinds.items() if kind}
        for number, block in enumerate(self.blocks):
            plan |= {f"blocks.{number}.inner.{name}": kind for name, kind in block.inner.kinds.items()}
        return plan

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and what was looked up."""
        looked_up = self.embedding(tokens)
        x = looked_up if self.sequence is None else cut_same(looked_up, self.sequence, 1)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        if self.loss is not None:
            return self.loss(scores, targets), looked_up
        return functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=self.ignore_index
        ), looked_up


def cut(model: Model, group: pycomm.Group) -> None:
    """Makes ``model`` this rank's part of itself."""
    if model.is_sequence_cut:
        model.sequence = group
        cut_sequence(model, group)
    else:
        parallelize(model, model.plan(), group)
    if model.kinds["head"] == "column":
        model.loss = ParallelCrossEntropy(group, ignore_index=model.ignore_index)


def cut_sequence(model: Model, group: pycomm.Group) -> None:
    """``parallelize`` leaves the sequence whole; here it is cut between the pairs."""
    tied = model.head.weight is model.embedding.weight
    for block in model.blocks:
        if isinstance(block.norm, SequenceParallelLayerNorm):
            continue  # a block in two places
        norm = SequenceParallelLayerNorm(WIDTH, group, elementwise_affine=block.norm.elementwise_affine).double()
        norm.load_state_dict(block.norm.state_dict())
        for new, old in zip(norm.parameters(), block.norm.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        block.norm = norm
        for name, kind in block.inner.kinds.items():
            layer = getattr(block.inner, name)
            options: dict[str, Any] = {"blocks": 3} if kind == "qkv" else {}
            make = RowParallelLinear if kind == "row" else ColumnParallelLinear
            setattr(block.inner, name, make.of(layer, group, is_sequence_parallel=True, **options))
    if model.kinds["embedding"]:
        model.embedding = VocabParallelEmbedding.of(model.embedding, group)
    model.head = ColumnParallelLinear.of(model.head, group, is_sequence_parallel=True)
    if tied:
        model.head.weight = model.embedding.weight


# -- trainings ---------------------------------------------------------------------------------------------------------


class Training:
    """One rank's part of the training ``seed``."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed = seed
        self.dice = dice = random.Random(seed + 1)
        self.axis = dice.choice(["none", "dp", "fsdp"]) if world_size == 4 else "none"
        self.shares = 2 if self.axis != "none" else 1
        if self.axis == "none":
            self.tp, self.share = pycomm.get_group(), 0
        else:
            self.mesh = pycomm.Mesh(**{self.axis: 2, "tp": 2})
            self.tp, self.share = self.mesh.group("tp"), self.mesh[self.axis]
        self.alone, self.model = Model(seed), Model(seed)
        self.plan = self.alone.plan()
        cut(self.model, self.tp)
        self.wrapped: Any = self.model
        if self.axis == "dp":
            self.wrapped = pycomm.DistributedDataParallel(self.model, self.mesh.group("dp"), bucket_bytes=1000)
        if self.axis == "fsdp":
            self.wrapped = pycomm.FullyShardedDataParallel(
                self.model,
                self.mesh.group("fsdp"),
                wrap=dice.choice([None, Block]),
                strategy=dice.choice(["full_shard", "shard_grad_op", "no_shard"]),
            )
        make = OPTIMIZERS[dice.choice(list(OPTIMIZERS))]
        self.has_any = any(parameter.requires_grad for parameter in self.alone.parameters())
        self.optimizers = [make(each.parameters()) for each in (self.alone, self.wrapped)]

    def run(self) -> None:
        try:
            for step in range(self.dice.randint(2, 4)):
                self.step(step)
        finally:
            if self.axis != "none":
                self.mesh.close()

    def step(self, step: int) -> None:
        if not self.has_any:
            return
        kinds = ["plain", "plain", "evaluated", "two forward"] + (["penalty"] if self.axis == "none" else [])
        passes = [self.dice.choice(kinds) for _ in range(self.dice.choice([1, 1, 2]))]
        max_norm, norm_type = self.dice.choice([None, 0.5, 0.05]), self.dice.choice([2.0, 1.0, float("inf")])
        what = f"seed {self.seed}, {self.axis}, step {step}: {passes}, max_norm {max_norm}, {self.plan}"
        if self.dice.random() < 0.8:
            for each in self.optimizers:
                each.zero_grad()
        for index, kind in enumerate(passes):
            place = (self.seed * 16 + step) * 4 + index
            losses = [self.passed(self.alone, kind, place, share) / self.shares for share in range(self.shares)]
            sum(losses).backward()  # type: ignore[union-attr]
            loss = self.passed(self.wrapped, kind, place, self.share)
            assert loss.allclose(losses[self.share] * self.shares, rtol=1e-9, atol=1e-12), what
            loss.backward()
        if max_norm is not None:
            self.clip(max_norm, norm_type, what)
        for each in self.optimizers:
            each.step()
        self.compare(what)

    def passed(self, call: Callable[..., Any], kind: str, place: int, share: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(place * 2 + share)
        tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=draw)
        if kind == "evaluated":
            with torch.no_grad():
                call(targets, tokens)
        loss, looked_up = call(tokens, targets)
        if kind == "two forward":
            loss = loss + 2 * call(targets, tokens)[0]
        if kind == "penalty" and looked_up.requires_grad:
            [gradient] = torch.autograd.grad(loss, looked_up, create_graph=True)
            loss = loss + gradient.square().sum()
        return loss

    def clip(self, max_norm: float, norm_type: float, what: str) -> None:
        expected = nn.utils.clip_grad_norm_(self.alone.parameters(), max_norm, norm_type)
        shards = {"shards": self.mesh.group("fsdp")} if self.axis == "fsdp" else {}
        found = pycomm.clip_grad_norm_(self.wrapped.parameters(), max_norm, norm_type, tensor=self.tp, **shards)
        assert found.double().allclose(expected.double(), rtol=1e-6), f"{what}: norm {found}, expected {expected}"

    def compare(self, what: str) -> None:
        with self.wrapped.full_parameters() if self.axis == "fsdp" else nullcontext():
            found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        expected = dict(self.alone.named_parameters())
        assert list(found) == list(expected), what
        for name, parameter in found.items():
            whole = part_of(self.plan.get(name.rpartition(".")[0], ""), name, expected[name], self.tp)
            assert parameter.shape == whole.shape, f"{what}, {name}: {parameter.shape} in place of {whole.shape}"
            difference = (parameter - whole).abs()
            assert (difference <= 1e-8 + 1e-6 * whole.abs()).all(), f"{what}, {name}: {difference.max()} off"


def trainings(rank: int, seeds: Iterable[int]) -> None:
    """Runs this rank's part of the trainings ``seeds``."""
    for seed in seeds:
        Training(seed, rank, pycomm.world_size()).run()


if __name__ == "__main__":
    import engines.tensor_trainings  # so that the ranks find this module by its name

    main(__doc__, engines.tensor_trainings.trainings)
