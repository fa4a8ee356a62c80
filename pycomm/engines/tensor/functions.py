"""Exchanges of activations that autograd knows the reverse of. x is whole on every rank, or cut along a dimension.

    copy_to_ranks       forward  x                     backward  sum of the ranks' gradients
    sum_over_ranks      forward  sum of the ranks' x   backward  the gradient
    gather_dim          forward  all parts of x        backward  own part of the sum of the gradients
    gather_same         forward  all parts of x        backward  own part of the gradient, which is the same everywhere
    scatter_sum         forward  own part of the sum   backward  all parts of the gradient
    cut_same            forward  own part of x         backward  all parts of the gradient
    sum_gradient        forward  a parameter           backward  its gradient, summed by reducer/reduce.py

They are pairs: the backward pass of each is the other's forward pass, and is written as a call of it, so that it can
itself be differentiated, as for a penalty on gradients:

    copy_to_ranks, sum_gradient <-> sum_over_ranks         gather_dim <-> scatter_sum         gather_same <-> cut_same

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
    "find_own",
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


def find_own(index: torch.Tensor, length: int, group: pycomm.Group, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where to look up ``index (...)`` in this rank's ``length`` entries of a vocabulary, and which are there.

    The others are to be looked up at 0. Raises ConfigError for one that no rank has; ``what`` words the place. On a
    GPU, where to ask would make the host wait, its index is out of bounds: the lookup fails as an ordinary one does.
    """
    entries = length * group.world_size
    is_known = (index >= 0) & (index < entries)
    if index.device.type == "cpu" and not is_known.all():
        raise ConfigError(
            f"{what}: expected indices from 0 to {entries - 1}, got "
            f"{index[~is_known][0].item()}; check the tokens, or choose a larger vocabulary"
        )
    local = index - group.rank * length
    is_here = (local >= 0) & (local < length)
    return local.where(is_here, 0).where(is_known, length), is_here


def _summed(x: torch.Tensor, group: pycomm.Group) -> torch.Tensor:
    result = x.contiguous().clone()
    start_sum(Wire(group, is_async=False), result)
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
        return sum_over_ranks(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group) -> Any:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return copy_to_ranks(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int, is_same: bool) -> Any:
        ctx.group, ctx.dim, ctx.is_same = group, dim, is_same
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reverse = cut_same if ctx.is_same else scatter_sum
        return reverse(gradient, ctx.group, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int) -> Any:
        ctx.group, ctx.dim = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_dim(gradient, ctx.group, ctx.dim), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: pycomm.Group, dim: int) -> Any:
        ctx.group, ctx.dim = group, dim
        return own_part(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_same(gradient, ctx.group, ctx.dim), None, None


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
    return _Copy.apply(parameter, group)  # type: ignore[no-untyped-call, no-any-return]
