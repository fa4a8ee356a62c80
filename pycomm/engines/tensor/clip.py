"""The norm of gradients of which some are cut over the ranks: each part counts once, and what is whole counts once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

import pycomm

from ...errors import ConfigError
from .._cuts import cut_of
from .._norms import norm_of
from ..fsdp.wrap import SHARDED

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, *, group: Any = None
) -> torch.Tensor:
    """Scales the gradients of ``parameters`` down to a norm of at most ``max_norm``; returns the norm it was.

    The norm is the one that ``torch.nn.utils.clip_grad_norm_`` finds on the whole module: of parameters that layers
    here have cut over ``group`` every rank has a part, the others are alike on its ranks. Gradients are reduced
    already: after ``backward()``, of DistributedDataParallel too. Called by every rank of ``group``; all get the same
    number, ``()``. Raises ConfigError if no parameter is cut, or one over other ranks, for shards of
    FullyShardedDataParallel, whose norm would go over two axes, and for a ``norm_type`` <= 0.
    """
    found, given = pycomm.get_group(group), list(parameters)
    _check(given, norm_type, found)
    trained = [each for each in given if each.grad is not None]
    device = given[0].device
    cut = _norm([each for each in trained if cut_of(each) is not None], norm_type, device)
    whole = _norm([each for each in trained if cut_of(each) is None], norm_type, device)
    mine = torch.stack([cut, whole])
    told = mine.new_empty(2 * found.world_size)
    pycomm.all_gather_single(told, mine, found)
    cuts, wholes = told.view(-1, 2).T
    # The first rank's norm of what is whole: were another's to differ in a bit, what is whole would drift apart.
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([cuts, wholes[:1]]), norm_type)
    clip_grads_with_norm_(trained, max_norm, norm)
    return norm


def _norm(parameters: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns the norm of all their gradients, ``()``, in float32 at least, on ``device``."""
    norms = [norm_of(each.grad, norm_type) for each in parameters if each.grad is not None]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(device) for each in norms]), norm_type)
    return norm


def _check(parameters: list[torch.Tensor], norm_type: float, group: pycomm.Group) -> None:
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type: expected a number above 0, or inf, got {norm_type}")
    others = {cut.ranks for cut in map(cut_of, parameters) if cut is not None}
    if others != {group.ranks}:
        raise ConfigError(
            f"clip_grad_norm_: expected parameters of which some are cut over ranks {group.ranks} (group "
            f"{group.name!r}), got {len(parameters)}, cut over {', '.join(map(str, sorted(others))) or 'none'}; pass "
            f"the group that the layers were made with"
        )
    if any(SHARDED in vars(each) for each in parameters):
        raise ConfigError(
            "clip_grad_norm_: expected parameters of which a rank has its part whole, got shards of "
            "FullyShardedDataParallel; a norm over both axes is not there: use DistributedDataParallel in its place, "
            "or clip by value"
        )
