"""The axes over which a model is in pieces: the groups that a caller names, held against what parameters say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import pycomm

from ..errors import ConfigError
from ._marks import cut_of, holders_of, shards_of

__all__ = ["Axis", "axes_of", "check_alike"]


class Axis(NamedTuple):
    """The ``group`` that a caller named as ``name=``, and ``said``: over which ranks a parameter says it is in pieces.

    In errors they are ``pieces``, and ``made`` by what has the group.
    """

    name: str
    group: pycomm.Group | None
    said: Callable[[torch.Tensor], tuple[int, ...] | None]
    pieces: str
    made: str

    def ranks_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Returns over which ranks the parameter is in pieces along this axis; none if it is whole."""
        return _several(self.said(parameter))

    def mistake(self, parameters: Sequence[torch.Tensor]) -> str:
        """Returns what is wrong with the group for ``parameters``; "" if nothing is."""
        over = {self.ranks_of(each) for each in parameters}
        ranks = () if self.group is None else _several(self.group.ranks)
        if self.name == "stages" and ranks and () in over:  # along other axes what is whole is alike on all ranks
            return f"stages=: expected parameters of a Pipeline over ranks {ranks}, got some of none; leave them out"
        if not over - {ranks, ()}:
            return ""
        said = " and ".join(map(str, sorted(over - {()})))
        got = "None" if self.group is None else f"group {self.group.name!r} of ranks {self.group.ranks}"
        return (
            f"{self.name}=: expected the group of ranks {said}, over which parameters are {self.pieces}, got {got}; "
            f"pass the group that {self.made} was made with to pycomm.clip_grad_norm_"
        )


def axes_of(shards: Any, tensor: Any, stages: Any) -> tuple[Axis, ...]:
    """Returns the axes in the order in which norms are joined: that of stages is the last."""
    groups = [None if each is None else pycomm.get_group(each) for each in (shards, tensor, stages)]
    return (
        Axis("shards", groups[0], shards_of, "sharded", "FullyShardedDataParallel"),
        Axis("tensor", groups[1], _cut_over, "cut", "each tensor-parallel layer"),
        Axis("stages", groups[2], _staged_over, "in stages", "the Pipeline"),
    )


def _several(ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    return ranks if ranks is not None and len(ranks) > 1 else ()


def _cut_over(parameter: torch.Tensor) -> tuple[int, ...] | None:
    cut = cut_of(parameter)
    return None if cut is None else cut.ranks


def _staged_over(parameter: torch.Tensor) -> tuple[int, ...] | None:
    holders = holders_of(parameter)
    return None if holders is None else holders.ranks


def check_alike(parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, axes: Sequence[Axis]) -> None:
    """Raises ConfigError, on every rank along ``axes``, if one of them cannot clip, or if their numbers differ.

    What a rank learns along an axis it tells along those that follow, so in the end all know.
    """
    groups = [axis.group for axis in axes if axis.group is not None]
    mistake = _mistake(parameters, max_norm, norm_type, axes)
    if mistake:
        where = "".join(f" on rank {group.ranks[group.rank]}" for group in groups[:1])
        mistake = f"clip_grad_norm_{where}: {mistake}"
    is_cuda = bool(parameters) and parameters[0].is_cuda
    for group in groups:
        if group.control_device.type != "cpu":
            continue  # the host would have to wait for the GPU; such a group compares no calls either
        mine = torch.tensor([bool(mistake), max_norm, norm_type, is_cuda], dtype=torch.float64, device="cpu")
        told = torch.empty(4 * group.world_size, dtype=torch.float64, device="cpu")
        pycomm.all_gather_single(told, mine, group)
        rows = told.view(-1, 4).tolist()
        if any(has_mistake for has_mistake, *_ in rows):
            everyone: list[Any] = [None] * group.world_size
            pycomm.all_gather_object(everyone, mistake, group)
            mistake = mistake or next(filter(None, everyone))
        elif any(row != rows[0] for row in rows):
            mistake = _disagreement(group, rows)
    if mistake:
        raise ConfigError(mistake)


def _mistake(parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, axes: Sequence[Axis]) -> str:
    if not norm_type > 0:
        return f"norm_type: expected a number above 0, or inf, got {norm_type:g}; pass 2 for the usual norm"
    if not max_norm >= 0:
        return f"max_norm: expected a number of at least 0, got {max_norm:g}; pass inf to have the norm alone"
    if not parameters:
        return "parameters: expected those of this rank, got none; pass a list if an iterator was used before"
    return "; ".join(filter(None, (axis.mistake(parameters) for axis in axes)))


def _disagreement(group: pycomm.Group, rows: Sequence[Sequence[float]]) -> str:
    told = "; ".join(
        f"rank {rank}: max_norm={max_norm:g}, norm_type={norm_type:g}, parameters on {'cuda' if is_cuda else 'cpu'}"
        for rank, (_, max_norm, norm_type, is_cuda) in zip(group.ranks, rows)
    )
    return f"clip_grad_norm_: expected the same on every rank of group {group.name!r}, got {told}; pass the same"
