"""What a rank has of a parameter: said on the parameter itself, for those that count, tie, gather or clip.

    cut       layers have cut it over ranks                     (tensor parallelism)
    shards    it is one of the shards of it                     (FullyShardedDataParallel)
    holders   some ranks hold it, whose stages use it           (Pipeline)

Ranks are global. What is said is a plain tuple: torch.load takes no classes of ours, and a group cannot be saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..errors import ConfigError

__all__ = [
    "Cut",
    "Holders",
    "cut_of",
    "forget_holders",
    "has_left",
    "holders_of",
    "mark_cut",
    "mark_holders",
    "mark_left",
    "mark_shard",
    "numel_of",
    "refuse_cut",
    "shards_of",
]

_CUT, _HOLDERS, _SHARDS, _NUMEL = "_pycomm_cut", "_pycomm_holders", "_pycomm_shards", "_pycomm_numel"  # the attributes
_LEFT = "_pycomm_left"


class Cut(NamedTuple):
    """A rank has its part of a whole along ``dim``, or of each of so many ``blocks`` of it, of those of ``ranks``."""

    dim: int
    blocks: int
    ranks: tuple[int, ...]


class Holders(NamedTuple):
    """Of the ``ranks`` of a pipeline those whose stages use a parameter; ``first`` is the index of the first one."""

    ranks: tuple[int, ...]
    first: int


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Returns how layers have cut ``parameter``; None if they have not."""
    found = getattr(parameter, _CUT, None)
    return None if found is None else Cut(*found)


def mark_cut(parameter: torch.Tensor, cut: Cut) -> None:
    """Says on ``parameter`` how it is cut."""
    setattr(parameter, _CUT, tuple(cut))


def has_left(parameter: torch.Tensor) -> bool:
    """Whether an engine has put shards in the place of ``parameter``: what still has it is no longer tied to them."""
    return hasattr(parameter, _LEFT)


def mark_left(parameter: torch.Tensor) -> None:
    """Says on ``parameter`` that an engine has put shards in its place."""
    setattr(parameter, _LEFT, True)


def numel_of(parameter: torch.Tensor) -> int:
    """Returns the elements of the whole parameter, of which a shard has fewer: alike on all ranks."""
    return int(getattr(parameter, _NUMEL, parameter.numel()))


def shards_of(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the ranks that have the shards of which ``parameter`` is one; None if it is no engine's."""
    found: tuple[int, ...] | None = getattr(parameter, _SHARDS, None)
    return found


def mark_shard(parameter: torch.Tensor, ranks: tuple[int, ...], numel: int) -> None:
    """Says on ``parameter`` that it is one of the shards that ``ranks`` have of ``numel`` elements; one rank: all."""
    setattr(parameter, _NUMEL, numel)
    setattr(parameter, _SHARDS, tuple(ranks))


def holders_of(parameter: torch.Tensor) -> Holders | None:
    """Returns which ranks of a pipeline hold ``parameter``; None if it is in no pipeline."""
    found = getattr(parameter, _HOLDERS, None)
    return None if found is None else Holders(*found)


def mark_holders(parameter: torch.Tensor, holders: Holders, pipeline: object) -> None:
    """Says on ``parameter`` which ranks of ``pipeline`` hold it, while that is there and nobody says anything newer."""
    said = tuple(holders)
    setattr(parameter, _HOLDERS, said)
    weakref.finalize(pipeline, _unsay, weakref.ref(parameter), said).atexit = False


def _unsay(parameter: weakref.ref[torch.Tensor], said: tuple[object, ...]) -> None:
    found = parameter()
    if found is not None and getattr(found, _HOLDERS, None) is said:
        delattr(found, _HOLDERS)


def forget_holders(parameters: Iterable[torch.Tensor]) -> None:
    """Says that ``parameters`` are trained by another engine now than a pipeline."""
    for parameter in parameters:
        if hasattr(parameter, _HOLDERS):
            delattr(parameter, _HOLDERS)


def refuse_cut(parameters: Iterable[torch.Tensor], where: str, advice: str) -> None:
    """Raises ConfigError if some of ``parameters`` are cut over several ranks.

    A norm of one rank's parameters differs between those ranks, and what they have whole would drift apart.
    """
    over = {cut.ranks for cut in map(cut_of, parameters) if cut is not None and len(cut.ranks) > 1}
    if over:
        raise ConfigError(
            f"{where}: expected parameters that are whole on each rank, got some that layers have cut over ranks "
            f"{', '.join(map(str, sorted(over)))}; {advice}"
        )
