"""Pipelines whose layers are engines of their own: sharded or averaged layer by layer, beside one process."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pycomm
from engines.cases import relative_error
from harness import run_ranks
from pycomm.engines.pipeline import split

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


def overlapping(layer: nn.Module, dp: pycomm.Group) -> pycomm.FullyShardedDataParallel:
    """One whose calls are on a stream, with units that are fetched ahead."""
    has_units = any(isinstance(module, nn.Linear) for module in layer.modules())
    wrap = nn.Linear if has_units else None
    return pycomm.FullyShardedDataParallel(layer, dp, overlap=True, wrap=wrap, prefetch=2)


KINDS = {
    "sharded": pycomm.FullyShardedDataParallel,
    "sharded gradients": partial(pycomm.FullyShardedDataParallel, strategy="shard_grad_op"),
    "overlapping": overlapping,
    "in place": pycomm.fully_shard,  # the pipeline is given the layers, not the engines
    "averaged": pycomm.DistributedDataParallel,
}


def equality_job(rank: int) -> dict[str, float]:
    mesh, expected = pycomm.Mesh(pp=2, dp=2), trained_alone()
    return {
        f"{kind}, {options}": error_of(mesh, expected, kind, **options)
        for kind, options in (
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


class Fails(nn.Module):
    """Raises in forward or backward, at its second microbatch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.where, self.calls = layer, "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        output.register_hook(partial(self.count, "backward"))
        self.count("forward")
        return output

    def count(self, where: str, _gradient: torch.Tensor | None = None) -> None:
        self.calls += where == self.where
        if self.calls > 1:
            raise ZeroDivisionError(where)


def error_job(rank: int) -> None:
    """A rank raises; those of its pipeline, and of the one beside it, are told; gradients are then those of a new one.

    Beside each step with one that succeeds, whose layers are no engines.
    """
    mesh = pycomm.Mesh(pp=2, dp=2)
    pp, dp = mesh.group("pp"), mesh.group("dp")
    batch = words()
    for kind, schedule, where, number in (
        ("", "one_f_one_b", "forward", 0),
        ("", "zbv", "backward", 4),
        ("sharded", "zero_bubble", "backward", 7),
        ("sharded gradients", "one_f_one_b", "forward", 1),
        ("overlapping", "zero_bubble", "backward", 7),
        ("overlapping", "one_f_one_b", "forward", 3),
        ("overlapping", "zbv", "backward", 1),
        ("averaged", "one_f_one_b", "backward", 2),
        ("averaged", "zbv", "forward", 3),
    ):
        parts = layers()
        parts[number] = failing = Fails(parts[number])
        parts = [KINDS[kind](part, dp) for part in parts] if kind else parts
        beside = {} if kind else {"data_group": dp}
        pipeline = pycomm.Pipeline(parts, loss_of_words, 4, pp, schedule=schedule, **beside)
        failing.where = where if mesh["dp"] == 0 else ""
        has_it = any(module is failing for stage in pipeline.stages.values() for module in stage.module.modules())
        holder = has_it and failing.where
        with pytest.raises(ZeroDivisionError if holder else pycomm.PycommError) as raised:
            pipeline.step(*batch)
        told = "ranks with other batches raised" if mesh["dp"] else r"rank \d raised ZeroDivisionError: " + where
        assert holder or re.match(f"Pipeline.step, rank . of group 'pp': {told}", str(raised.value)), raised.value
        failing.where, failing.calls = "", 0
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(*batch)
        plain = pycomm.Pipeline(layers(), loss_of_words, 4, pp, schedule=schedule, data_group=dp)
        assert torch.equal(loss, plain.step(*batch)), (kind, schedule)
        shards = None if kind in ("", "averaged") else dp
        norms = [
            pycomm.clip_grad_norm_(each.parameters(), 1.0, stages=pp, shards=sharded)
            for each, sharded in ((pipeline, shards), (plain, None))
        ]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


def other_times_job(rank: int) -> None:
    """Each pipeline measures for itself, and finds other times."""
    mesh = pycomm.Mesh(pp=2, dp=2)
    pp, dp = mesh.group("pp"), mesh.group("dp")
    found, split.layer_times_s = split.layer_times_s, lambda layers, _sample: [9.0 if mesh["dp"] else 1.0, *[1.0] * 7]
    try:
        for parts, beside in (
            (layers(), {"data_group": dp}),
            ([pycomm.FullyShardedDataParallel(layer, dp) for layer in layers()], {}),
        ):
            pipeline = pycomm.Pipeline(parts, loss_of_words, 4, pp, split="time", sample=words()[0], **beside)
            assert [len(stage.module) for stage in pipeline.stages.values()] == [4]
            with pytest.raises(pycomm.ConfigError, match="microbatches divide" if mesh["dp"] else "with another batch"):
                pipeline.step(*(each[: 16 - mesh["dp"]] for each in words()))
            pipeline.step(*words())
    finally:
        split.layer_times_s = found


def newest_job(rank: int) -> None:
    """A parameter is what its newest engine says, and no pipeline's once that is gone; ties are not cut in silence."""
    mesh = pycomm.Mesh(pp=2, dp=2)
    pp, dp = mesh.group("pp"), mesh.group("dp")
    for wrap in (pycomm.DistributedDataParallel, partial(pycomm.fully_shard, strategy="no_shard"), None):
        whole = nn.Sequential(*layers())
        pipeline = pycomm.Pipeline(list(whole), loss_of_words, 4, pp, data_group=dp)
        with pytest.raises(pycomm.ConfigError, match="stages=: expected the group of ranks"):
            pycomm.clip_grad_norm_(whole.parameters(), 1.0)
        if wrap is None:
            del pipeline
        else:
            wrap(whole, dp)
        pycomm.clip_grad_norm_(whole.parameters(), 1.0)
    tied = layers()
    tied[7][0].weight = tied[1][0].weight
    pycomm.fully_shard(tied[1], dp)
    for engine in (pycomm.FullyShardedDataParallel, pycomm.DistributedDataParallel):
        with pytest.raises(pycomm.ConfigError, match="in a module which has been sharded, .*: 0.weight. Shard"):
            engine(tied[7], dp)
    with pytest.raises(pycomm.ConfigError, match="in a module which has been sharded, .*: 7.0.weight. Shard"):
        pycomm.Pipeline(tied, loss_of_words, 4, pp)


def mistakes_job(rank: int) -> None:
    error_job(rank)
    other_times_job(rank)
    newest_job(rank)


def test_a_step_that_raises_raises_on_every_rank_and_the_next_one_works() -> None:
    """And ranks with other batches are cut alike, and told of a batch that cannot be cut."""
    run_ranks(4, mistakes_job)
