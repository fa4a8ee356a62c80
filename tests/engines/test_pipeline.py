"""A pipeline on n ranks equals one process on the whole batch, for every schedule; one job a world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pycomm
from engines.cases import LAYERED, OPTIMIZERS, batches, make, relative_error, train_alone
from harness import run_ranks
from pycomm.engines.pipeline.schedules import SCHEDULES
from pycomm.engines.pipeline.simulate import simulate

MICROBATCHES = {2: 4, 3: 6, 4: 4}  # they divide the 12 rows, and the ranks divide them
BOUND = {torch.float32: 2e-4, torch.bfloat16: 0.1}


def loss_of_scores(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), targets)


def train(
    name: str, optimizer_name: str, dtype: torch.dtype = torch.float32, mesh: Any = None, **options: Any
) -> pycomm.Pipeline:
    """Trains and returns this rank's pipeline; with a ``mesh``, on this coordinate's rows of axis dp."""
    model = make(name, dtype, LAYERED)
    with torch.no_grad():
        next(model.parameters()).add_(pycomm.rank())  # all start from rank 0's
    group = None
    if mesh is not None:
        group, options["data_group"] = mesh.group("pp"), mesh.group("dp")
    pipeline = pycomm.Pipeline(model, loss_of_scores, options.pop("microbatches"), group, **options)
    optimizer = OPTIMIZERS[optimizer_name](list(pipeline.parameters()))
    for inputs, targets in batches(name, dtype):
        if mesh is not None:
            inputs, targets = (each.chunk(mesh.shape["dp"])[mesh["dp"]] for each in (inputs, targets))
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        optimizer.step()
    return pipeline


def error_of(pipeline: pycomm.Pipeline, expected: dict[str, torch.Tensor]) -> float:
    own = dict(pipeline.named_parameters())
    return relative_error(own, {name: expected[name] for name in own})


def equality_job(rank: int) -> dict[str, float]:
    number = MICROBATCHES[pycomm.world_size()]
    alone = {name: train_alone(name, "sgd", shares=number, models=LAYERED) for name in LAYERED}
    errors = {}
    for schedule in SCHEDULES.names():
        pipeline = train("gpt", "sgd", schedule=schedule, microbatches=number)
        errors[f"gpt sgd {schedule}"] = error_of(pipeline, alone["gpt"]) / BOUND[torch.float32]
        assert pipeline.report is not None
        held = simulate(pipeline.schedule).peak_activations[rank]
        assert pipeline.report.peak_activations == held, schedule
        assert 0 <= pipeline.report.bubble < 1
    pipeline = train("conv", "sgd", schedule="zero_bubble", microbatches=number)
    errors["conv sgd"] = error_of(pipeline, alone["conv"]) / BOUND[torch.float32]
    for dtype, schedule in ((torch.float32, "zbv"), (torch.bfloat16, "one_f_one_b")):
        expected = train_alone("mlp", "adamw", dtype, models=LAYERED)
        pipeline = train("mlp", "adamw", dtype, schedule=schedule, microbatches=number, is_checkpointed=True)
        errors[f"mlp adamw {dtype}"] = error_of(pipeline, expected) / BOUND[dtype]
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_process(world_size: int) -> None:
    for errors in run_ranks(world_size, equality_job):
        assert {what: error for what, error in errors.items() if not error <= 1} == {}


def mesh_job(rank: int) -> float:
    """Pipeline x data parallel, tied weights over both ends of the pipeline; a bad batch is told beside it too."""
    mesh = pycomm.Mesh(pp=2, dp=2)
    pipeline = train("gpt", "sgd", mesh=mesh, microbatches=3)
    tokens = torch.zeros(3 + mesh["dp"], 8, dtype=torch.int64)
    with pytest.raises(pycomm.ConfigError, match="3 microbatches divide" if mesh["dp"] else "a rank of data_group"):
        pipeline.step(tokens, tokens)
    return error_of(pipeline, train_alone("gpt", "sgd", models=LAYERED)) / BOUND[torch.float32]


def test_with_data_parallelism() -> None:
    assert max(run_ranks(4, mesh_job)) <= 1


def other_job(rank: int) -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    sample = torch.randn(2, 4)
    pipeline = pycomm.Pipeline(layers, functional.mse_loss, 2, split="time", sample=sample)
    assert sum(len(stage.module) for stage in pipeline.stages.values()) in (1, 2, 3)
    inputs, targets = torch.ones(4, 4), torch.zeros(4, 4)
    loss = pipeline.step(inputs if rank == 0 else None, targets if rank == 1 else None)
    everyone = torch.empty(2)
    pycomm.all_gather_single(everyone, loss.view(1))
    assert everyone[0] == everyone[1]
    assert pipeline.evaluate(inputs, targets) == loss
    with pytest.raises(pycomm.ConfigError, match="before the first step"):
        pycomm.Pipeline(layers, functional.mse_loss, 2).measured_times()
    times, actions = pipeline.measured_times(), pipeline.measured_actions()
    assert sorted(times) == [0, 1] and all(each.forward_s > 0 for each in times.values())
    assert sorted(map(str, actions)) == sorted(str(each) for row in pipeline.schedule.rows for each in row)
    assert all(seconds > 0 for seconds in actions.values()) and simulate(pipeline.schedule, actions).total_s > 0
    pycomm.Pipeline(layers, functional.mse_loss, 4, schedule="zero_bubble", times=times).step(inputs, targets)
    assert list(pipeline.state_dict()) == [name for name, _ in pipeline.named_parameters()]
    with pytest.raises(pycomm.ConfigError, match="cannot be cut into 2 stages"):
        pycomm.Pipeline(layers[:1], functional.mse_loss, 2)
    with pytest.raises(pycomm.ConfigError, match="needs at least 2 microbatches"):
        pycomm.Pipeline(layers, functional.mse_loss, 1, schedule="interleaved_one_f_one_b")
    with pytest.raises(pycomm.ConfigError, match="unknown pipeline schedule"):
        pycomm.Pipeline(layers, functional.mse_loss, 1, schedule="one")
    with pytest.raises(pycomm.CollectiveMismatchError, match=r"ranks \[1\] have '0.weight"):
        pycomm.Pipeline([nn.Linear(4 + rank, 4), nn.Linear(4, 4)], functional.mse_loss, 2)


def test_splitting_times_and_mistakes() -> None:
    run_ranks(2, other_job)


def mistakes_job(rank: int) -> None:
    """The rank in the middle has neither inputs nor targets, and is told all the same."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    pipeline = pycomm.Pipeline(layers, functional.mse_loss, 2)
    good = torch.ones(4, 4), torch.zeros(4, 4)
    for inputs, targets, words in (
        (torch.ones(3, 4), good[1], r"^Pipeline.step: rank 0: inputs: .*2 microbatches divide, got shape \(3, 4\)$"),
        (good[0], None, r"^Pipeline.step: rank 2: targets: holds stage 2 .*got None$"),
        (torch.ones(2, 4), good[1], "rank 1: 2 rows of inputs and 4 of targets"),
    ):
        with pytest.raises(pycomm.ConfigError, match=words):
            pipeline.step(inputs, targets)
        with pytest.raises(pycomm.ConfigError, match=words):
            pipeline.evaluate(inputs, targets)
    assert pipeline.stages[rank].module.training
    pipeline.step(*good)
    if rank == 1:
        pipeline.stages[1].module[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(pycomm.ConfigError, match="rank 1: the parameters are not those .*: stage 1: 0.weight; make"):
        pipeline.step(*good)
    if rank == 1:
        pipeline.stages[1].module[0].bias.requires_grad_(False)
    with pytest.raises(pycomm.ConfigError, match="rank 1: .*stage 1: 0.bias, stage 1: 0.weight;"):
        pipeline.step(*good)
    for bad, words in (
        ({"device": "meta" if rank == 2 else "cpu"}, r"Pipeline: parameters on ranks \[2\] are on the meta device"),
        ({"bias": rank != 1}, r"parameter number 1 differs: ranks \[0, 2\] have '0.bias"),
    ):
        with pytest.raises(pycomm.PycommError, match=words):
            pycomm.Pipeline([nn.Linear(4, 4, **bad) for _ in range(3)], functional.mse_loss, 2)


def test_mistakes_are_errors_on_every_rank() -> None:
    run_ranks(3, mistakes_job)
