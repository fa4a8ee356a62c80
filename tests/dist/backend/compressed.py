"""Compressed training with DDP and FSDP2: ranks stay equal, and error feedback makes good what a step leaves out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from backend.training import batch, check_equal_ranks, check_gradients, joined_gradients, network
from pycomm.torch_backend import Options, compress_fsdp, ddp_hook


def case_ddp_hook() -> None:
    for spec, tolerance in (("none", 1e-6), ("bf16", 1e-2), ("int8", 2e-2), ("int4+ef", None), ("powersgd:2+ef", None)):
        model = network()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        ddp_hook(ddp, spec)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(dist.get_rank())).square().mean().backward()
            for parameter in model.parameters():
                check_equal_ranks(parameter.grad)
        if tolerance is not None:
            check_gradients(model, joined_gradients(model), tolerance)


def case_error_feedback_of_ddp_goes_by_parameter() -> None:
    """The mean of what is sent in many steps comes to the gradient, also as DDP lays its buckets out anew."""
    model = network()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    state = ddp_hook(ddp, "topk:0.1+ef")
    expected = joined_gradients(model)
    totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(40):
        ddp.zero_grad()
        ddp(batch(dist.get_rank())).square().mean().backward()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            total += parameter.grad
    for total, gradient in zip(totals, expected, strict=True):
        assert (total / 40 - gradient).norm() < 0.35 * gradient.norm()
    saved = state.state_dict()
    assert "topk:0.1+ef" in saved["compressors"]
    state.load_state_dict(saved)


def case_fsdp() -> None:
    for spec, tolerance in (("none", 1e-6), ("int8", 2e-2), ("int4+ef", None)):
        model = network()
        expected = joined_gradients(model)
        for part in (model[0], model[2], model):
            fully_shard(part)
        compress_fsdp(model, spec, all_gather="bf16" if tolerance is None else None)
        for _ in range(3):
            model.zero_grad()
            model(batch(dist.get_rank())).square().mean().backward()
        if tolerance is not None:
            check_gradients(model, expected, tolerance)
        for parameter in model.parameters():
            check_equal_ranks(parameter.grad.full_tensor())


def case_models_of_one_group_owe_each_their_own() -> None:
    """Two of one class, by DDP and by FSDP2: what the first owes does not come to the second."""
    for train in (by_ddp, by_fsdp):
        first, second = train(network()), train(network())
        for _ in range(3):
            first(batch(dist.get_rank())).square().mean().backward()
        (0 * second(batch(dist.get_rank())).sum()).backward()
        for parameter in second.parameters():
            gradient = parameter.grad.full_tensor() if train is by_fsdp else parameter.grad
            assert not gradient.any()


def by_ddp(model: torch.nn.Module) -> torch.nn.Module:
    ddp = DistributedDataParallel(model)
    ddp_hook(ddp, "topk:0.1+ef")
    return ddp


def by_fsdp(model: torch.nn.Module) -> torch.nn.Module:
    fully_shard(model)
    compress_fsdp(model, "topk:0.1+ef")
    return model


def case_a_compressed_group() -> None:
    """With pg_options alone DDP trains compressed, and what is small stays exact."""
    group = dist.new_group(pg_options=Options(compression="int8"))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(torch.randn(4, 64) + dist.get_rank()).square().mean().backward()
    check_equal_ranks(model.weight.grad)
    inside = group._get_backend(torch.device("cpu")).pycomm_group
    assert inside.compression.total.calls == 1
    small = torch.full((100,), 1 / 3)
    dist.all_reduce(small, group=group)
    assert torch.equal(small, torch.full((100,), 1 / 3) * dist.get_world_size())


def case_what_cannot_be_compressed() -> None:
    with pytest.raises(pycomm.ConfigError, match="no FSDP2 module"):
        compress_fsdp(network(), "int8")
    with pytest.raises(pycomm.ConfigError, match="unknown compression"):
        ddp_hook(DistributedDataParallel(network()), "int5")
    with pytest.raises(pycomm.ConfigError, match="compresses what has two dimensions or more"):
        Options(compression="int8+policy")
    Options(compression="int8+policy:min_dim=1")
