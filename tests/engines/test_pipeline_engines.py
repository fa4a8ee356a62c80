"""Pipelines whose layers are engines of their own: sharded or averaged layer by layer, beside one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pycomm
from engines.cases import relative_error
from harness import run_ranks

BOUND = 1e-5
STEPS = 2


def layers() -> list[nn.Module]:
    """Returns eight layers, equal each time; the last one is as large as all others, and its halves are not alike."""
    torch.manual_seed(3)
    inner = (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(6))
    return [nn.Embedding(11, 6), *inner, nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 11))]


def loss_of_words(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (16, 5)), torch.randint(11, (16, 5))


def trained_alone() -> dict[str, torch.Tensor]:
    """Returns the parameters after ``STEPS`` steps of two batches each, clipped."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in (words(), words()):
            loss_of_words(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.named_parameters())


def error_of(mesh: pycomm.Mesh, expected: dict[str, torch.Tensor], kind: str, **options: Any) -> float:
    """Trains as ``trained_alone`` does, each layer made an engine as ``KINDS`` says; returns the largest error."""
    parts, dp = layers(), mesh.group("dp")
    engines = [KINDS[kind](layer, dp) for layer in parts]
    parts = parts if kind == "in place" else engines
    pipeline = pycomm.Pipeline(parts, loss_of_words, 4, mesh.group("pp"), **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    is_sharded = kind != "averaged"
    torch.manual_seed(5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in (words(), words()):
            pipeline.step(inputs.chunk(2)[mesh["dp"]], targets.chunk(2)[mesh["dp"]])
        shards = dp if is_sharded else None
        pycomm.clip_grad_norm_(pipeline.parameters(), 0.5, stages=mesh.group("pp"), shards=shards)
        optimizer.step()
    own = {layer for stage in pipeline.stages.values() for layer in stage.module}
    got = {}
    for index, (engine, part) in enumerate(zip(engines, parts)):
        if part in own:
            state = engine.full_state_dict() if is_sharded else engine.state_dict()
            got.update({f"{index}.{name}": value for name, value in state.items()})
    return relative_error(got, {name: expected[name] for name in got})


KINDS = {
    "sharded": pycomm.FullyShardedDataParallel,
    "sharded gradients": partial(pycomm.FullyShardedDataParallel, strategy="shard_grad_op"),
    "in place": pycomm.fully_shard,  # the pipeline is given the layers, not the engines
    "averaged": pycomm.DistributedDataParallel,
}


def equality_job(rank: int) -> dict[str, float]:
    mesh, expected = pycomm.Mesh(pp=2, dp=2), trained_alone()
    return {
        f"{kind}, {options}": error_of(mesh, expected, kind, **options)
        for kind, options in (
            ("sharded", {"schedule": "one_f_one_b"}),
            ("sharded", {"schedule": "zero_bubble"}),
            ("sharded gradients", {"schedule": "zbv"}),
            ("in place", {"schedule": "zero_bubble", "is_checkpointed": True}),
            ("averaged", {"schedule": "zbv"}),
        )
    }


def test_layers_that_are_engines_equal_one_process() -> None:
    """By schedules of all kinds: where weights' gradients come later, they are reduced once all have come."""
    for errors in run_ranks(4, equality_job):
        assert {what: error for what, error in errors.items() if not error <= BOUND} == {}
