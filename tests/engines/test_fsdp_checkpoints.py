"""FSDP through torch.distributed.checkpoint: what one world saves another one of any size loads."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

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
