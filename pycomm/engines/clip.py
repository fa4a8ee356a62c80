"""The norm of a whole model's gradients, of which each rank has pieces, along any axes of a mesh.

    shards    a rank has its own part of what is sharded; the rest is alike           (FullyShardedDataParallel)
    tensor    a rank has its own part of what layers have cut; the rest is alike      (tensor parallelism)
    stages    a rank has its own; what is tied over several counts on the first rank  (Pipeline)

[Note: one axis after the other]
A parameter says itself over which ranks it is in pieces, see ``_marks.py``. So a rank has one norm for each combination
of axes, eight in all. Along an axis, what the ranks have alike counts once, by the first rank's number, and their own
parts count each; what is left are the norms for the axes that follow, at last one. Ranks that went by numbers of their
own would scale by factors that differ in a bit, and what they have alike would drift apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

import pycomm

from ._axes import axes_of, check_alike
from ._marks import holders_of
from ._norms import norm_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    shards: Any = None,
    tensor: Any = None,
    stages: Any = None,
) -> torch.Tensor:
    """Scales the gradients of ``parameters`` down to a norm of at most ``max_norm``; returns the norm it was, ``()``.

    It is the norm that ``torch.nn.utils.clip_grad_norm_`` finds on the whole model in one process, in float32 at least;
    ``parameters`` are those of this rank. Axes along which the ranks have different pieces are named by their groups,
    those along which they have the same, as in data parallelism, are not:

    - ``shards``: the ranks of FullyShardedDataParallel; of "hybrid_shard" those that shard, not the replicas.
    - ``tensor``: the ranks over which tensor-parallel layers are cut.
    - ``stages``: the ranks of the Pipeline.

    Gradients are reduced already, as they are after ``backward()`` and ``Pipeline.step()``. Called by every rank of the
    groups; all get the same number, to the bit. A ``.grad`` of None has no part in it. Raises ConfigError, on every
    rank of the groups, if one passes no parameters, some that are in pieces along an axis without its group, a
    ``norm_type`` <= 0 or a ``max_norm`` < 0, and if the ranks pass different numbers.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(dict.fromkeys(parameters))
    max_norm, norm_type, axes = float(max_norm), float(norm_type), axes_of(shards, tensor, stages)
    check_alike(given, max_norm, norm_type, axes)
    trained = [each for each in given if each.grad is not None and each.grad.numel()]
    kinds: dict[tuple[bool, ...], list[torch.Tensor]] = defaultdict(list)
    for each in trained:
        if _counts_here(each, axes[-1].group):
            kinds[tuple(bool(axis.ranks_of(each)) for axis in axes)].append(each)
    device = given[0].device
    norms = [_norm(kinds[kind], norm_type, device) for kind in product((False, True), repeat=len(axes))]
    numbers = torch.stack(norms).view([2] * len(axes))
    for axis in axes:
        numbers = _join(numbers, norm_type, axis.group)
    norm = numbers.to(device, _dtype_of(given))
    # On the CPU it costs nothing to look whether each gradient would be multiplied by 1.
    if norm.is_cuda or not norm + 1e-6 <= max_norm:
        clip_grads_with_norm_(trained, max_norm, norm)
    return norm


def _counts_here(parameter: torch.Tensor, stages: pycomm.Group | None) -> bool:
    """Whether this rank is the first one of ``stages`` that uses the parameter."""
    holders = holders_of(parameter)
    return stages is None or holders is None or holders.first == stages.rank


def _norm(parameters: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns the norm of all their gradients, ``()``, in float64 on ``device``."""
    norms = [norm_of(each.grad, norm_type).to(device) for each in parameters if each.grad is not None]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type, dtype=torch.float64)
    return norm


def _join(numbers: torch.Tensor, norm_type: float, group: pycomm.Group | None) -> torch.Tensor:
    """Returns the norms ``(...)`` over the ranks of ``group``; None: over this one.

    Of ``numbers (2, ...)`` the first are the norms of what the ranks have alike, the others of their own parts.
    """
    told = numbers.unsqueeze(0)
    if group is not None:
        mine = numbers.to(group.control_device) if numbers.is_cpu else numbers
        told = mine.new_empty(group.world_size, *mine.shape)
        pycomm.all_gather_single(told.view(-1), mine.view(-1), group)
    norms: torch.Tensor = torch.linalg.vector_norm(torch.cat([told[:1, 0], told[:, 1]]), norm_type, dim=0)
    return norms


def _dtype_of(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    """Returns the dtype of a norm: alike on ranks whose parameters have the same dtypes."""
    dtype = torch.float32
    for each in parameters:
        dtype = torch.promote_types(dtype, each.dtype.to_real())
    return dtype
