"""A pipeline on n ranks equals one process on the whole batch, for every schedule; one job a world."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import pycomm
from engines.cases import LAYERED, OPTIMIZERS, Doubles, Twice, batches, make, relative_error, train_alone
from harness import run_ranks
from pycomm.engines.pipeline.schedules import SCHEDULES
from pycomm.engines.pipeline.simulate import simulate
from pycomm.engines.pipeline.weights import defer_linears

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


# -- the gradients of models that are not plainly trained ------------------------------------------------------------


class Shift(nn.Module):
    """Whole numbers to whole numbers: there is no gradient to give back."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens + 1) % 11


class Forces(nn.Module):
    """Computes with the gradient of an energy, by which the weights are trained too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return x + energy + forces


def small_layers(case: str) -> list[nn.Module]:
    """Returns eight layers, equal each time, changed as ``case`` says."""
    torch.manual_seed(3)
    inner = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    layers = [nn.Embedding(11, 6), *inner, Twice(6), nn.Linear(6, 11, bias=False)]
    if case == "in place":  # wherever the model is cut
        layers = [nn.Embedding(11, 6), *(nn.Sequential(Doubles(), each[0]) for each in inner), Doubles(), layers[-1]]
    if case == "forces":
        layers[2:7:2] = [Forces(6) for _ in range(3)]
    if case.startswith("tied"):
        layers[-1].weight = layers[0].weight
    frozen = {"tied and frozen": [layers[0]], "frozen first": layers[:1], "frozen stage": layers[:6],
              "frozen last": layers[1:]}.get(case, [])  # fmt: skip
    for layer in frozen:
        layer.requires_grad_(False)
    for layer in layers:
        if case == "biases alone":
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))
    if case == "computed weights":
        prune.custom_from_mask(layers[1][0], "weight", torch.ones(6, 6).triu())
        layers[2][0] = nn.utils.weight_norm(layers[2][0])
        layers[3][0] = nn.utils.parametrizations.weight_norm(layers[3][0])
        prune.custom_from_mask(layers[4][0], "bias", torch.arange(6) % 2)
    if case == "replaced forward":
        layers[1][0].forward = partial(functional.linear, weight=layers[1][0].weight)  # without the bias
    if case == "hooks":
        layers[1][0].weight.register_hook(lambda gradient: 2 * gradient)
        layers[-1].weight.register_hook(lambda gradient: -gradient)
    return [Shift(), *layers] if case == "whole numbers" else layers


def gradient_mistakes(
    case: str, *, steps: int = 1, bound: float = 1e-4, mesh: Any = None, **options: Any
) -> dict[str, str]:
    """Returns what is wrong with this rank's gradients after ``steps`` batches, by the one process that they equal."""
    group = None
    if mesh is not None:
        group, options["data_group"] = mesh.group("pp"), mesh.group("dp")
    pipeline = pycomm.Pipeline(small_layers(case), loss_of_words, 4, group, **options)
    alone = nn.Sequential(*small_layers(case))
    for _, (tokens, targets) in zip(range(steps), batches("gpt")):
        tokens, targets = tokens[:8] % 11, targets[:8] % 11
        loss_of_words(alone(tokens), targets).backward()
        if mesh is not None:
            tokens, targets = (each.chunk(mesh.shape["dp"])[mesh["dp"]] for each in (tokens, targets))
        pipeline.step(tokens, targets)
    names, mistakes = dict(alone.named_parameters(remove_duplicate=False)), {}
    for name, parameter in pipeline.named_parameters():
        got, expected = parameter.grad, names[name].grad
        if got is None or expected is None:
            if got is not expected:
                mistakes[name] = f"expected {expected}, got {got}"
        elif (error := relative_error({name: got}, {name: expected})) > bound or got.dtype != expected.dtype:
            mistakes[name] = f"{error}, {got.dtype}"
    return mistakes


def loss_of_words(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def gradients_job(rank: int) -> None:
    cases = ("plain", "tied", "tied and frozen", "frozen first", "frozen stage", "frozen last", "biases alone",
             "computed weights", "replaced forward", "hooks", "whole numbers", "in place", "forces")  # fmt: skip
    for case in cases:
        split = [1, 8] if case == "whole numbers" else [5, 3]
        for schedule, options in (("one_f_one_b", {"split": split}), ("zero_bubble", {"split": split}), ("zbv", {})):
            mistakes = gradient_mistakes(case, steps=2, schedule=schedule, **options)
            assert mistakes == {}, (case, schedule)
    for schedule in SCHEDULES.names():
        for case in ("in place", "forces"):
            mistakes = gradient_mistakes(case, schedule=schedule, is_checkpointed=True)
            assert mistakes == {}, (schedule, case, "checkpointed")
    for schedule in ("one_f_one_b", "zero_bubble"):
        for is_checkpointed in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                mistakes = gradient_mistakes("plain", bound=0.05, schedule=schedule, is_checkpointed=is_checkpointed)
            assert mistakes == {}, (schedule, is_checkpointed)


def test_gradients_of_two_steps_are_those_of_one_process() -> None:
    """Also those of frozen, tied, pruned and normalized weights, and of those with hooks."""
    run_ranks(2, gradients_job)


@pytest.mark.parametrize("is_cast", [False, True])
def test_weight_gradients_wait(is_cast: bool) -> None:
    layer = nn.Linear(4, 3)
    expected = copy.deepcopy(layer)
    deferred = defer_linears(layer, is_split=True)
    x = torch.arange(8.0).view(2, 4)
    for one in (layer, expected):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = one(x).square().sum()
        with deferred.put_off(0):
            loss.backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    deferred.finish(0)
    for parameter, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    defer_linears(layer, is_split=False)
    assert "forward" not in vars(layer)


def frozen_job(rank: int) -> None:
    """A frozen weight that two ranks hold stays where it is; hooks run once a microbatch; peaks are the simulated."""
    shared = nn.Linear(4, 4).requires_grad_(False)
    layers = [nn.Linear(4, 4), shared, nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[2].weight = shared.weight
    pipeline = pycomm.Pipeline(layers, functional.mse_loss, 2, schedule="zero_bubble", split=[2, 2])
    before = shared.weight.clone()
    told = []
    own = layers[3 * rank].weight
    own.register_post_accumulate_grad_hook(lambda parameter: told.append(parameter is own))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1, weight_decay=0.5)
    pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    optimizer.step()
    assert torch.equal(shared.weight, before) and shared.weight.grad is None
    assert told == [True, True], told
    frozen = [nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]
    pipeline = pycomm.Pipeline([*frozen, nn.Linear(4, 4)], functional.mse_loss, 4, schedule="gpipe", split=[3, 1])
    pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    assert pipeline.report.peak_activations == simulate(pipeline.schedule).peak_activations[rank]


def test_frozen_weights_stay_and_hooks_run() -> None:
    run_ranks(2, frozen_job)


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise ValueError("only in training")
        return x


def modes_job(rank: int) -> None:
    for last in (nn.Identity(), Refuses()):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Sequential(nn.Linear(4, 4), nn.Dropout().eval()), last]
        pipeline = pycomm.Pipeline(layers, functional.mse_loss, 2)
        was = [module.training for module in nn.Sequential(*layers).modules()][1:]
        assert not all(was)
        with pytest.raises(ValueError, match="only in training") if isinstance(last, Refuses) else nullcontext():
            pipeline.evaluate(torch.ones(4, 4), torch.zeros(4, 4))
        assert [module.training for module in nn.Sequential(*layers).modules()][1:] == was
    pipeline = pycomm.Pipeline([nn.Linear(4, 4)], lambda output, targets: output.detach().sum(), 2)
    with pytest.raises(pycomm.ConfigError, match="the loss of stage 0 depends on nothing that requires a gradient"):
        pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))


def test_evaluating_leaves_every_module_in_its_mode() -> None:
    run_ranks(1, modes_job)


# -- other axes, other splits, mistakes --------------------------------------------------------------------------------


def mesh_job(rank: int) -> float:
    """Pipeline x data parallel, tied weights over both ends of the pipeline; a bad batch is told beside it too."""
    mesh = pycomm.Mesh(pp=2, dp=2)
    pipeline = train("gpt", "sgd", mesh=mesh, microbatches=3)
    tokens = torch.zeros(3 + mesh["dp"], 8, dtype=torch.int64)
    with pytest.raises(pycomm.ConfigError, match="3 microbatches divide" if mesh["dp"] else "with another batch"):
        pipeline.step(tokens, tokens)
    for case in ("tied", "frozen stage"):
        assert gradient_mistakes(case, steps=2, mesh=mesh) == {}, case
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
    for expected, wrong in (
        ("layers: expected", {"layers": nn.Linear(2, 2)}),
        ("microbatches: expected", {"microbatches": 2.0}),
        ("schedule: expected", {"schedule": None}),
        ("split_model: by: expected", {"split": None}),
    ):
        with pytest.raises(pycomm.ConfigError, match=expected):
            pycomm.Pipeline(**{"layers": layers, "loss": functional.mse_loss, "microbatches": 2, **wrong})
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
