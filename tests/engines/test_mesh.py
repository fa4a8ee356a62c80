"""Several axes at once, on 8 ranks: pipeline x data x tensor parallelism equals one process on the whole batch.

One job for all: 8 ranks take longer to start than to train.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import pycomm
from engines import cases
from engines.cases import OPTIMIZERS, PlainAttention, PlainMLP, batches, relative_error
from harness import run_ranks
from pycomm.engines import mesh as mesh_module
from pycomm.engines.planning.batch import largest_micro_batch
from pycomm.engines.planning.memory import state_bytes
from pycomm.engines.tensor import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    TensorParallelAttention,
    TensorParallelMLP,
    VocabParallelEmbedding,
)

WIDTH, HEADS, HIDDEN, VOCABULARY, BLOCKS = 16, 4, 32, 18, 2
MICROBATCHES = 2
BOUND = 2e-4  # of a tensor's largest element, after ten steps
MAX_NORM = 0.1  # every step is clipped


KINDS = {"qkv": "qkv", "out": "row", "up": "column", "down": "row", "linear": "column"}


class Trained(NamedTuple):
    """Parameters after training, and the norms that clipping found, step by step."""

    state: dict[str, torch.Tensor]
    norms: list[torch.Tensor]


class Block(nn.Module):
    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = PlainAttention(WIDTH, HEADS) if tp is None else TensorParallelAttention(WIDTH, HEADS, tp)
        self.mlp = PlainMLP(WIDTH, HIDDEN) if tp is None else TensorParallelMLP(WIDTH, HIDDEN, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Scores; its weight may be the embedding's, whole or cut."""

    def __init__(self, embedding: nn.Module, tp: Any, is_tied: bool) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.linear = linear if tp is None else ColumnParallelLinear.of(linear, tp)
        if is_tied:
            self.linear.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def gpt(tp: Any = None, is_tied: bool = True) -> nn.Sequential:
    """Returns the GPT in layers, cut over the group ``tp``; with the same parameters each time."""
    torch.manual_seed(3)
    embedding = nn.Embedding(VOCABULARY, WIDTH) if tp is None else VocabParallelEmbedding(VOCABULARY, WIDTH, tp)
    return nn.Sequential(embedding, *(Block(tp) for _ in range(BLOCKS)), Head(embedding, tp, is_tied))


def train_alone(optimizer_name: str, is_clipped: bool = True, is_tied: bool = True) -> Trained:
    model, norms = gpt(is_tied=is_tied), []
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for inputs, targets in batches("gpt"):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        if is_clipped:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            assert norms[-1] > MAX_NORM
        optimizer.step()
    return Trained(model.state_dict(), norms)


def part_of(name: str, whole: torch.Tensor, tp: pycomm.Group) -> torch.Tensor:
    """Returns this rank's part of a parameter of the ordinary GPT."""
    layer = name.split(".")[-2]
    kind = "vocabulary" if layer == "0" else KINDS.get(layer, "")
    return cases.part_of(kind, name, whole, tp)


def errors_of(found: Trained, whole: Trained, tp: pycomm.Group) -> tuple[float, list[bytes]]:
    """Returns the largest error, by its bound, and the norms to the bit."""
    for norms in zip(found.norms, whole.norms, strict=True):
        torch.testing.assert_close(*norms, rtol=1e-3, atol=0)
    error = relative_error(found.state, {name: part_of(name, whole.state[name], tp) for name in found.state})
    return error / BOUND, [norm.numpy().tobytes() for norm in found.norms]


def three_axes(schedule: str, optimizer_name: str) -> tuple[float, list[bytes]]:
    mesh = pycomm.Mesh(dp=2, tp=2, pp=2)
    tp = mesh.group("tp")
    pipeline = pycomm.Pipeline(
        gpt(tp),
        ParallelCrossEntropy(tp),
        MICROBATCHES,
        mesh.group("pp"),
        schedule=schedule,
        data_group=mesh.group("dp"),
    )
    norms = train_pipeline(pipeline, optimizer_name, mesh["dp"], tensor=tp)
    return errors_of(Trained(dict(pipeline.named_parameters()), norms), train_alone(optimizer_name), tp)


def train_pipeline(
    pipeline: pycomm.Pipeline, optimizer_name: str, share: int, **axes: pycomm.Group
) -> list[torch.Tensor]:
    """Trains on one half of the rows; returns the norms."""
    optimizer, norms = OPTIMIZERS[optimizer_name](list(pipeline.parameters())), []
    for inputs, targets in batches("gpt"):
        optimizer.zero_grad()
        pipeline.step(inputs.chunk(2)[share], targets.chunk(2)[share])
        norms.append(pycomm.clip_grad_norm_(pipeline.parameters(), MAX_NORM, stages=pipeline.group, **axes))
        optimizer.step()
    with pytest.raises(pycomm.ConfigError, match="stages=: expected the group of ranks"):
        pycomm.clip_grad_norm_(pipeline.parameters(), 1.0, **axes)
    return norms


def sharded_three_axes(optimizer_name: str) -> tuple[float, list[bytes]]:
    """Each layer is sharded by itself, so weights cannot be tied."""
    mesh = pycomm.Mesh(fsdp=2, tp=2, pp=2)
    tp, fsdp = mesh.group("tp"), mesh.group("fsdp")
    layers = [pycomm.FullyShardedDataParallel(layer, fsdp) for layer in gpt(tp, is_tied=False)]
    pipeline = pycomm.Pipeline(layers, ParallelCrossEntropy(tp), MICROBATCHES, mesh.group("pp"))
    norms = train_pipeline(pipeline, optimizer_name, mesh["fsdp"], shards=fsdp, tensor=tp)
    own = {layer for stage in pipeline.stages.values() for layer in stage.module}
    found = {}
    for index, layer in enumerate(layers):
        if layer in own:
            with layer.full_parameters():
                found.update({f"{index}.{name}": p.detach().clone() for name, p in layer.module.named_parameters()})
    return errors_of(Trained(found, norms), train_alone(optimizer_name, is_tied=False), tp)


def data_and_tensor(optimizer_name: str, is_clipped: bool) -> tuple[float, list[bytes]]:
    mesh = pycomm.Mesh(dp=4, tp=2)
    tp = mesh.group("tp")
    model, loss = gpt(tp), ParallelCrossEntropy(tp)
    ddp = pycomm.DistributedDataParallel(model, mesh.group("dp"))
    optimizer, norms = OPTIMIZERS[optimizer_name](ddp.parameters()), []
    for inputs, targets in batches("gpt"):
        optimizer.zero_grad()
        loss(ddp(inputs.chunk(4)[mesh["dp"]]), targets.chunk(4)[mesh["dp"]]).backward()
        if is_clipped:
            norms.append(pycomm.clip_grad_norm_(ddp.parameters(), MAX_NORM, tensor=tp))
        optimizer.step()
    with pytest.raises(pycomm.ConfigError, match="cut over ranks .* call pycomm.clip_grad_norm_"):
        ddp.clip_grad_norm_(1.0)
    return errors_of(Trained(dict(model.named_parameters()), norms), train_alone(optimizer_name, is_clipped), tp)


def sharded_and_tensor(optimizer_name: str) -> tuple[float, list[bytes]]:
    """Also: the planner's bytes of each class are those of the engine's books."""
    mesh = pycomm.Mesh(fsdp=4, tp=2)
    tp = mesh.group("tp")
    model, loss = gpt(tp), ParallelCrossEntropy(tp)
    numel = sum(p.numel() for p in model.parameters())
    fsdp = pycomm.FullyShardedDataParallel(model, mesh.group("fsdp"), wrap=Block)
    optimizer, norms = OPTIMIZERS[optimizer_name](fsdp.parameters()), []
    for inputs, targets in batches("gpt"):
        optimizer.zero_grad()
        loss(fsdp(inputs.chunk(4)[mesh["fsdp"]]), targets.chunk(4)[mesh["fsdp"]]).backward()
        norms.append(pycomm.clip_grad_norm_(fsdp.parameters(), MAX_NORM, shards=mesh.group("fsdp"), tensor=tp))
        optimizer.step()
    with pytest.raises(pycomm.ConfigError, match="shards=: .* got None"):
        pycomm.clip_grad_norm_(fsdp.parameters(), 1.0, tensor=tp)
    with pytest.raises(pycomm.ConfigError, match="tensor=: .* got None; pass the group .* to pycomm.clip_grad_norm_"):
        fsdp.clip_grad_norm_(1.0)
    held, planned = fsdp.memory_stats(), state_bytes(numel, "FULL_SHARD", 4, "fp32", optimizer_name)
    names = ("parameters", "gradients", "optimizer")
    told = torch.tensor([float(getattr(held, name).device) for name in names])
    pycomm.all_reduce(told, pycomm.ReduceOp.AVG, mesh.group("fsdp"))  # the last shard of a tiny model is shorter
    assert told.tolist() == pytest.approx([getattr(planned, name) for name in names], rel=0.1)
    with fsdp.full_parameters():
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return errors_of(Trained(found, norms), train_alone(optimizer_name), tp)


def layout_on_hosts(rank: int) -> None:
    """Ranks are dealt round two hosts of four: tp and dp stay on a host, the pipeline crosses."""
    real, mesh_module.host_id = mesh_module.host_id, lambda: f"host {rank % 2}"
    try:
        mesh = pycomm.Mesh(dp=2, tp=2, pp=2)
        assert mesh.axes == ("pp", "dp", "tp")
        for axes, hosts in ((("tp",), 1), (("dp",), 1), (("dp", "tp"), 1), (("pp",), 2), (("pp", "tp"), 2)):
            group = mesh.group(*axes)
            told: list[Any] = [None] * group.world_size
            pycomm.all_gather_object(told, rank % 2, group)
            assert len(set(told)) == hosts, (axes, told)
        assert [mesh.rank_at(pp=mesh["pp"], dp=0, tp=tp) % 2 for tp in range(2)] == [rank % 2] * 2
        mesh.close()
        wide = pycomm.Mesh(tp=4, dp=2)  # four ranks of tp fill a host; six could not
        told = [None] * 4
        pycomm.all_gather_object(told, rank % 2, wide.group("tp"))
        assert len(set(told)) == 1
        other = pycomm.Mesh(tp=4, dp=2, order=("tp", "dp"))
        assert other.axes == ("tp", "dp")
    finally:
        mesh_module.host_id = real


def agreed_micro_batch(rank: int) -> None:
    """Rank 5 has room for 5 samples, the others for more: all get 5, and one that has room for none tells all."""
    kept = torch.zeros(1)

    def step(samples: int) -> None:
        kept.add(torch.zeros(1000 * samples * (2 if rank == 5 else 1)).sum())

    assert largest_micro_batch(step, 2 * 4000 * 5 + 100, group=pycomm.get_group()) == 5
    with pytest.raises(pycomm.ConfigError, match="one sample"):
        largest_micro_batch(step, 100 if rank == 5 else 10**9, group=pycomm.get_group())


def job(rank: int) -> dict[str, tuple[float, list[bytes]]]:
    layout_on_hosts(rank)
    agreed_micro_batch(rank)
    return {
        "pp x dp x tp": three_axes("one_f_one_b", "adamw"),
        "pp x fsdp x tp": sharded_three_axes("sgd"),
        "dp x tp": data_and_tensor("sgd", False),
        "dp x tp, clipped": data_and_tensor("sgd", True),
        "fsdp x tp": sharded_and_tensor("adamw"),
    }


def test_eight_ranks_equal_one_process() -> None:
    first, *others = run_ranks(8, job)
    for each in (first, *others):
        assert {what: error for what, (error, _) in each.items() if not error <= 1} == {}
        for what, (_, norms) in each.items():
            assert norms == first[what][1], f"{what}: norms differ in a bit"
