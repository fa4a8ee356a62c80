"""Exchanges of activations that autograd knows the reverse of. x is whole on every rank, or cut along a dimension.

    copy_to_ranks       forward  x                     backward  sum of the ranks' gradients
    sum_over_ranks      forward  sum of the ranks' x   backward  the gradient
    gather_dim          forward  all parts of x        backward  own part of the sum of the gradients
    gather_same         forward  all parts of x        backward  own part of the gradient, which is the same everywhere
    scatter_sum         forward  own part of the sum   backward  all parts of the gradient
    cut_same            forward  own part of x         backward  all parts of the gradient
    sum_gradient        forward  a parameter           backward  its gradient, summed by reducer/reduce.py

The first two stand around a pair of linear layers (f and g of Shoeybi et al. 2019, Megatron-LM, section 3); gather_dim
and scatter_sum take their place where the sequence is cut between the pairs (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch

import pycomm

from ...errors import ConfigError
from ...reducer.reduce import Wire, start_sum

__all__ = [
    "copy_to_ranks",
    "cut_same",
    "gather_dim",
    "gather_same",
    "own_part",
    "scatter_sum",
    "sum_gradient",
    "sum_over_ranks",
]


def own_part(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    """Returns this rank's part of ``x`` along ``dim``, a view. Raises ConfigError if the ranks do not divide it."""
    _check_divides(x, group, dim)
    return x.chunk(group.world_size, dim)[group.rank]


def _summed(x: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    result = x.contiguous().clone()
    pycomm.all_reduce(result, group=group)
    return result


def _gathered(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    x = x.contiguous()
    parts = torch.empty((group.world_size, *x.shape), dtype=x.dtype, device=x.device)
    pycomm.all_gather_single(parts.view(-1), x.view(-1), group)
    return torch.cat(parts.unbind(), dim)


def _check_divides(x: torch.Tensor, group: pycomm.Group, dim: int) -> None:
    if x.shape[dim] % group.world_size:
        raise ConfigError(
            f"tensor parallelism: {group.world_size} ranks cannot cut dim {dim} of a tensor of shape {tuple(x.shape)}; "
            f"expected a multiple of {group.world_size}: pad it, such as the sequence, or use another number of ranks"
        )


def _scattered(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    _check_divides(x, group, dim)
    parts = torch.stack(x.chunk(group.world_size, dim))
    result = torch.empty_like(parts[0])
    pycomm.reduce_scatter_single(result.view(-1), parts.view(-1), group=group)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group) -> Any:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group) -> Any:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int, is_same: bool) -> Any:
        ctx.group, ctx.dim, ctx.is_same = group, dim, is_same
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.is_same:
            return own_part(gradient, ctx.group, ctx.dim).contiguous(), None, None, None
        return _scattered(gradient, ctx.group, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int) -> Any:
        ctx.group, ctx.dim = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient, ctx.group, ctx.dim), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int) -> Any:
        ctx.group, ctx.dim = group, dim
        return own_part(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient, ctx.group, ctx.dim), None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: pycomm.Group) -> Any:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        start_sum(Wire(ctx.group, is_async=False), gradient)
        return gradient, None


def copy_to_ranks(x: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    """Returns ``x``, the same on all ranks, for layers of which each rank has a part."""
    return _Copy.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def sum_over_ranks(x: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    """Returns the sum of the ranks' partial results ``x``."""
    return _Sum.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_dim(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    """Returns all ranks' parts along ``dim``, for layers of which each rank has a part."""
    return _Gather.apply(x, group, dim, False)  # type: ignore[no-untyped-call, no-any-return]


def gather_same(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    """Returns all ranks' parts along ``dim``, for what every rank then computes alike."""
    return _Gather.apply(x, group, dim, True)  # type: ignore[no-untyped-call, no-any-return]


def scatter_sum(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    """Returns this rank's part along ``dim`` of the sum of the ranks' partial results ``x``."""
    return _Scatter.apply(x, group, dim)  # type: ignore[no-untyped-call, no-any-return]


def cut_same(x: torch.Tensor, group: pycomm.Group, dim: int) -> torch.Tensor:
    """Returns this rank's part along ``dim`` of ``x``, which is the same on all ranks: where the sequence gets cut."""
    return _Cut.apply(x, group, dim)  # type: ignore[no-untyped-call, no-any-return]


def sum_gradient(parameter: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    """Returns ``parameter``, which is whole on every rank but sees only a part of the sequence there."""
    return _SumGradient.apply(parameter, group)  # type: ignore[no-untyped-call, no-any-return]
