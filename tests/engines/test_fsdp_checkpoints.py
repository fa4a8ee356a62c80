"""FSDP through torch.distributed.checkpoint: what one world saves another one of any size loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import pycomm
import pycomm.torch_backend
from engines.cases import OPTIMIZERS, batches, loss_of, make, relative_error
from engines.fsdp_cases import WRAP, error_of
from harness import run_ranks
from pycomm.engines.fsdp.pieces import Piece, boxes


def trained(strategy: str, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Returns an engine and its optimizer after some steps on the whole batch, the same in every world."""
    fsdp = pycomm.FullyShardedDataParallel(make("gpt"), wrap=WRAP["gpt"], strategy=strategy)
    optimizer = OPTIMIZERS["adamw"](fsdp.parameters())
    for inputs, targets in itertools.islice(batches("gpt"), steps):
        optimizer.zero_grad()
        loss_of(fsdp, inputs, targets).backward()
        optimizer.step()
    return fsdp, optimizer


def save_job(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=pycomm.world_size())
    fsdp, optimizer = trained("full_shard", steps=3)
    state = {"model": fsdp.state_dict(), "optimizer": fsdp.optimizer_state_dict(optimizer)}
    assert isinstance(state["model"]["embedding.weight"], Piece)
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    dist.destroy_process_group()


def load_job(rank: int, folder: str) -> None:
    pycomm.torch_backend.register()
    store = dist.FileStore(f"{folder}/another")
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=pycomm.world_size())
    fsdp, optimizer = trained("shard_optimizer", steps=0)
    state = {"model": fsdp.state_dict(), "optimizer": fsdp.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    fsdp.load_state_dict(state["model"])
    fsdp.load_optimizer_state_dict(optimizer, state["optimizer"])
    dist.destroy_process_group()
    expected, expected_optimizer = trained("no_shard", steps=3)
    for engine, each in ((fsdp, optimizer), (expected, expected_optimizer)):
        each.zero_grad()
        loss_of(engine, *next(batches("gpt"))).backward()
        each.step()
    assert error_of(fsdp.full_state_dict(), expected.full_state_dict()) < 1e-5


def test_checkpoints_load_into_another_world(tmp_path: Path) -> None:
    """Saved by three ranks, loaded by two that shard otherwise, and by a process that knows no engine."""
    run_ranks(3, save_job, str(tmp_path))
    run_ranks(2, load_job, str(tmp_path))
    plain = make("gpt")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    alone = make("gpt")
    optimizer = OPTIMIZERS["adamw"](alone.parameters())
    for inputs, targets in itertools.islice(batches("gpt"), 3):
        optimizer.zero_grad()
        loss_of(alone, inputs, targets).backward()
        optimizer.step()
    assert relative_error(plain.state_dict(), alone.state_dict()) < 1e-5


def alone_job(rank: int, folder: str) -> None:
    fsdp = pycomm.FullyShardedDataParallel(nn.Linear(64, 64))
    with pytest.raises(CheckpointException, match=r"CheckpointError: weight: this rank has \d+ of 4096 elements"):
        dcp.save(fsdp.state_dict(), checkpoint_id=f"{folder}/checkpoint")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_torch_distributed_no_rank_writes_over_the_others(tmp_path: Path) -> None:
    run_ranks(2, alone_job, str(tmp_path))


class Scaled(nn.Module):
    """Has a parameter without dimensions, whose state and an optimizer's scalars are of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(1.0)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


STEPPERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd, dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": partial(torch.optim.Adam, weight_decay=0.1),
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
    "asgd": partial(torch.optim.ASGD, lambd=0.1, lr=0.1, t0=0),
    "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
}


def stepped(
    make_optimizer: Any, steps: int, saves_at: int | None = None, full: bool = True, strategy: str = "full_shard"
) -> dict[str, torch.Tensor]:
    """Returns the state after ``steps``; before number ``saves_at`` a new optimizer loads the old one's."""
    torch.manual_seed(4)
    fsdp = pycomm.FullyShardedDataParallel(Scaled(), strategy=strategy)
    optimizer = make_optimizer(fsdp.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step() of its own into it
    for number in range(steps):
        if number == saves_at:
            saved = fsdp.optimizer_state_dict(optimizer, full=full)
            resumed = make_optimizer(fsdp.parameters())
            fsdp.load_optimizer_state_dict(resumed, saved)
            assert bool(resumed.state) == bool(optimizer.state)
            optimizer = resumed
        optimizer.zero_grad()
        fsdp(torch.ones(2, 3) * (number + 1)).square().sum().backward()
        optimizer.step()
    return fsdp.full_state_dict()


def optimizers_job(rank: int) -> None:
    """To save an optimizer, and to load that, changes nothing: before its first step, and after it."""
    for name, each in STEPPERS.items():
        expected = stepped(each, steps=3)
        for saves_at, full, strategy in itertools.product((0, 1), (True, False), ("full_shard", "no_shard")):
            found = stepped(each, 3, saves_at, full, strategy)
            assert relative_error(found, expected) < 1e-6, (name, saves_at, full, strategy)
    groups_are_told_by_name()


def groups_are_told_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fsdp = pycomm.fully_shard(model)
    first, last = (list(layer.parameters()) for layer in model)

    def of(*groups: tuple[Any, float]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters, "lr": rate} for parameters, rate in groups], momentum=0.9)

    saved = fsdp.optimizer_state_dict(of((first, 0.1), (last, 0.5)), full=True)
    other = of((last[::-1], 1.0), (first, 1.0))
    fsdp.load_optimizer_state_dict(other, saved)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1]
    for groups in ([(first + last, 1.0)], [(first, 1.0)] + [(each, 1.0) for each in last]):
        other = of(*groups)
        with pytest.raises(pycomm.CheckpointError, match=r"its groups are 0\.weight, 0\.bias; 1\.weight, 1\.bias"):
            fsdp.load_optimizer_state_dict(other, saved)
        assert {group["lr"] for group in other.param_groups} == {1.0}


def test_optimizers_are_what_they_were() -> None:
    run_ranks(2, optimizers_job)


def unstepped_job(rank: int, folder: str) -> None:
    """What was saved before the first step loads as such through torch.distributed.checkpoint."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=pycomm.world_size())
    fsdp, optimizer = trained("full_shard", steps=0)
    dcp.save({"optimizer": fsdp.optimizer_state_dict(optimizer)}, checkpoint_id=f"{folder}/checkpoint")
    fsdp, optimizer = trained("full_shard", steps=1)
    state = {"optimizer": fsdp.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    dist.destroy_process_group()
    fsdp.load_optimizer_state_dict(optimizer, state["optimizer"])
    assert not optimizer.state


def test_optimizers_without_state_load_as_such(tmp_path: Path) -> None:
    run_ranks(2, unstepped_job, str(tmp_path))


SPEC = "int4+ef"


def compressed_step(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean gradient of a step with error feedback, and what it is without compression."""
    gradients = []
    for compression in (SPEC, None):
        fsdp = pycomm.FullyShardedDataParallel(Owing(), compression=compression, gather_compression=compression)
        fsdp.module.weight.data.copy_(torch.ones_like(fsdp.module.weight))
        before = fsdp.full_state_dict()
        fsdp(torch.randn(5, generator=torch.Generator().manual_seed(10 * step + pycomm.rank()))).backward()
        torch.optim.SGD(fsdp.parameters(), lr=1.0).step()
        gradients.append(before["weight"] - fsdp.full_state_dict()["weight"])
    return gradients[0], gradients[1]


class Owing(nn.Module):
    """The gradient is the input, which 16 elements do not divide, nor 16 for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


def owed(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    residuals = state["compressors"][SPEC]["error_feedback"]["residuals"]
    return {name: each for name, each in residuals.items() if "gather" not in name}


def owing_job(rank: int, states: list[Any] | None = None) -> dict[str, Any]:
    """One step with error feedback, after ``states`` of another world; another engine was made before."""
    group = pycomm.get_group()
    pycomm.FullyShardedDataParallel(make("mlp"), compression=SPEC)
    carried = torch.zeros(5)
    if states is not None:
        merged = pycomm.compression.merge_states(states)
        (carried,) = owed(merged).values()
        assert carried.any()
        group.compression.load_state_dict(merged)
    found, exact = compressed_step(0 if states is None else 1)
    state = group.compression.state_dict()
    everyone: list[Any] = [None] * pycomm.world_size()
    pycomm.all_gather_object(everyone, state)
    (left,) = owed(pycomm.compression.merge_states(everyone)).values()
    torch.testing.assert_close(found + left, exact + carried)  # what is sent and what is owed then is what came in
    return state


def test_error_feedback_goes_to_another_world() -> None:
    states = run_ranks(2, owing_job)
    run_ranks(3, owing_job, states)


def test_boxes_cover_a_run_of_elements_once() -> None:
    for shape in ((), (7,), (3, 5), (2, 3, 4), (3, 1, 2, 2), (4, 0, 2)):
        whole = torch.arange(prod(shape)).view(shape)
        for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
            found = []
            for box in boxes(shape, start, stop):
                part = whole[tuple(slice(at, at + length) for at, length in zip(box.offsets, box.sizes))]
                assert part.reshape(-1)[0] == box.start
                found += part.reshape(-1).tolist()
            assert found == list(range(start, stop))
