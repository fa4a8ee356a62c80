"""How a parameter is cut over ranks: said on the parameter itself, for those that count, tie, gather or clip."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..errors import ConfigError

__all__ = ["Cut", "cut_of", "mark_cut", "refuse_cut"]

_CUT = "_pycomm_cut"  # the attribute: a plain tuple, for torch.load takes no classes of ours


class Cut(NamedTuple):
    """A rank has its part of a whole along ``dim``, or of each of so many ``blocks`` of it; ``ranks`` are global."""

    dim: int
    blocks: int
    ranks: tuple[int, ...]


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Returns how ``parameter`` is cut; None if it is whole."""
    found = getattr(parameter, _CUT, None)
    return None if found is None else Cut(*found)


def mark_cut(parameter: torch.Tensor, cut: Cut) -> None:
    """Says on ``parameter`` how it is cut."""
    setattr(parameter, _CUT, tuple(cut))


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
