"""All ranks have the same model, it can be trained, and it stays the one that the engine was made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import pycomm

from ..errors import CollectiveMismatchError, ConfigError
from ..reducer.bucket import memory_order
from ._marks import has_left

__all__ = ["Roster", "check_same_model", "trained_parameters"]

_NAMED = 8  # of the parameters that an error names


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns name and parameter of all that require a gradient, each once, also if it is tied to several names."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


class Roster:
    """The parameters that a model has, by name, with dtype, device and order in memory, and whether each is trained.

    ``named`` gives those that it has now.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._named = named
        self._known = self._now()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._known

    def change(self) -> str:
        """Returns what has changed since then, as an error words it; "" if nothing has."""
        now = self._now()
        if now == self._known:
            return ""
        names = {name for name, *_ in {*now.values()} ^ {*self._known.values()}}
        names |= {now[key][0] for key in now.keys() - self._known.keys()}  # replaced under the same name
        return (
            f"expected {len(self._known)}, got {len(now)}; new, replaced, gone, or with another requires_grad, "
            f"dtype, device or memory format: {', '.join(sorted(names)[:_NAMED])}"
        )

    def unfrozen(self) -> str:
        """Returns the names of those that are trained now and were not, as an error words it; "" if there are none."""
        trained = {key for key, (_, is_trained, *_) in self._known.items() if is_trained}
        return ", ".join([name for name, p in self._named() if p.requires_grad and id(p) not in trained][:_NAMED])

    def _now(self) -> dict[int, tuple[Any, ...]]:
        return {id(p): (name, p.requires_grad, p.dtype, p.device, p.stride()) for name, p in self._named()}


def check_same_model(
    tensors: Sequence[tuple[str, torch.Tensor]],
    group: pycomm.Group,
    what: str,
    *,
    may_be_meta: bool = False,
    by_memory: bool = False,
) -> None:
    """Raises on every rank unless all have the same ``tensors``: names, shapes, dtypes, and none is on meta or may be;
    ``by_memory``: their elements lie in the same order, too.

    CollectiveMismatchError names the first difference and its ranks, ConfigError the tensors without memory, and those
    that others have which were sharded without them. ``what`` words the place.
    """
    left = [name for name, tensor in tensors if has_left(tensor)]
    if left:
        raise ConfigError(
            f"{what}: expected parameters that are trained here alone, got some that were also in a module which has "
            f"been sharded, and has others now: {', '.join(left[:_NAMED])}. Shard modules with tied weights in one "
            f"engine, and make optimizers after sharding"
        )
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{what}: expected parameters that have their shapes, got some of lazy modules, which get them in their "
            f"first forward pass: {', '.join(lazy[:_NAMED])}; run the module once before"
        )
    described = [_describe(name, tensor, by_memory) for name, tensor in tensors]
    digest = int.from_bytes(blake2b("\n".join(described).encode(), digest_size=7).digest(), "little")
    meta = [name for name, tensor in tensors if tensor.is_meta and not may_be_meta]
    mine = torch.tensor([digest, len(meta)], dtype=torch.int64, device=group.control_device)
    told = torch.empty(2 * group.world_size, dtype=torch.int64, device=group.control_device)
    pycomm.all_gather_single(told, mine, group)
    digests, metas = told.view(-1, 2).T.tolist()
    if any(metas):
        ranks = [rank for rank, number in enumerate(metas) if number]
        raise ConfigError(
            f"{what}: parameters on ranks {ranks} are on the meta device and have no memory (here: "
            f"{', '.join(meta[:_NAMED]) or 'none'}); call module.to_empty(device=...) and initialize them first, or "
            f"pass initialize= where an engine has it"
        )
    if len(set(digests)) > 1:
        everyone: list[Any] = [None] * group.world_size
        pycomm.all_gather_object(everyone, described, group)
        raise CollectiveMismatchError(f"{what}: {_first_difference(everyone)}; build the same model on every rank")


def _describe(name: str, tensor: torch.Tensor, by_memory: bool) -> str:
    frozen = "" if tensor.requires_grad else ", frozen"
    order = memory_order(tensor) if by_memory else []
    lies = "" if order == sorted(order) else f", dimensions {order} in memory"
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{lies}{frozen}"


def _first_difference(everyone: Sequence[Sequence[str]]) -> str:
    for place in range(max(len(each) for each in everyone)):
        found = [each[place] if place < len(each) else "no further parameter" for each in everyone]
        if len(set(found)) > 1:
            kinds = [
                f"ranks {[rank for rank, each in enumerate(found) if each == kind]} have {kind!r}"
                for kind in dict.fromkeys(found)
            ]
            return f"the ranks built different models; parameter number {place} differs: {', '.join(kinds)}"
    return "the ranks built different models"
