"""What is sharded, and over whom: the strategies as data, and the arguments of the engine, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

import pycomm

from ...errors import ConfigError
from ...reducer.reduce import Wire
from ..mesh import Mesh

__all__ = ["OFFLOADS", "STRATEGIES", "Precision", "Ranks", "Strategy", "ranks_of", "state_name", "strategy_of"]


class Strategy(NamedTuple):
    """What a rank holds of a model only in part (ZeRO's stages 1, 2 and 3 add one each; Rajbhandari et al. 2020).

    ``is_hybrid``: over the ranks of one group, and again in full over those of another.
    """

    name: str
    shards_optimizer: bool = True
    shards_gradients: bool = True
    shards_parameters: bool = True
    is_hybrid: bool = False


STRATEGIES = {
    each.name: each
    for each in (
        Strategy("no_shard", False, False, False),
        Strategy("shard_optimizer", True, False, False),
        Strategy("shard_grad_op", True, True, False),
        Strategy("full_shard"),
        Strategy("hybrid_shard", is_hybrid=True),
    )
}
OFFLOADS = (None, "optimizer", "parameters")


def strategy_of(name: str) -> Strategy:
    """Returns the strategy called ``name``, in small or capital letters. Raises ConfigError."""
    found = STRATEGIES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return found


class Precision(NamedTuple):
    """Dtypes of what is computed with and of gradients on the wire; None: the parameters' own, and the former."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def of(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Returns both for parameters of ``dtype``; those that are no floats keep theirs. Raises ConfigError."""
        for what, each in zip(self._fields, self):
            if each is not None and not (isinstance(each, torch.dtype) and each.is_floating_point):
                raise ConfigError(f"{what}: expected a floating-point torch.dtype or None, got {each!r}")
        if not dtype.is_floating_point:
            return dtype, dtype
        computed = self.param_dtype or dtype
        return computed, self.reduce_dtype or computed


class Ranks(NamedTuple):
    """Who has the parts of one model (``shards``, None: each rank all of it), who the same parts (``replicas``)."""

    shards: Wire | None
    replicas: Wire | None

    @property
    def parts(self) -> int:
        """The number of parts."""
        return 1 if self.shards is None else self.shards.group.world_size

    @property
    def own(self) -> int:
        """The number of this rank's part."""
        return 0 if self.shards is None else self.shards.group.rank

    @property
    def sharding(self) -> tuple[int, ...]:
        """The global ranks that have the parts; none if each has all."""
        return () if self.shards is None else self.shards.group.ranks

    @property
    def groups(self) -> Sequence[pycomm.Group]:
        """One after the other they reach all ranks."""
        return [wire.group for wire in self if wire is not None]

    @property
    def control_device(self) -> torch.device:
        """Where small tensors go that all ranks tell each other."""
        return self.groups[0].control_device


def ranks_of(strategy: Strategy, group: Any, compression: Any, overlap: bool | None) -> Ranks:
    """Returns who shards and who replicates. Raises ConfigError if ``group`` does not fit the strategy.

    Collective where calls run beside the computation: that takes a stream.
    """
    is_pair = isinstance(group, (tuple, list)) and len(group) == 2
    if strategy.is_hybrid:
        if isinstance(group, Mesh) and len(group.axes) == 2:
            group, is_pair = (group.group(group.axes[0]), group.group(group.axes[1])), True
        if not is_pair:
            raise ConfigError(
                "hybrid_shard: expected group=Mesh of two axes, the inner of which shards, or group=(replicas, "
                f"shards), got {group!r}; make one with pycomm.Mesh(dp=..., fsdp=...)"
            )
        outer, inner = (pycomm.get_group(each) for each in group)
        return Ranks(_wire(inner, compression, overlap), _wire(outer, compression, overlap, is_inner=False))
    if isinstance(group, Mesh) or is_pair:
        raise ConfigError(f"{strategy.name}: expected one group, got {group!r}; pass mesh.group(AXIS), or hybrid_shard")
    found = pycomm.get_group(group)
    if not strategy.shards_optimizer or found.world_size == 1:
        return Ranks(None, _wire(found, compression, overlap, is_inner=False))
    return Ranks(_wire(found, compression, overlap), None)


def _wire(group: pycomm.Group, compression: Any, overlap: bool | None, is_inner: bool = True) -> Wire:
    """Replicas are reduced by whoever reduces the shards, so only that wire has a stream."""
    wire = Wire.of(group, compression, overlap)
    if wire.is_async and is_inner:
        return wire._replace(stream=pycomm.CommStream("fsdp", group))
    return wire


_taken: WeakKeyDictionary[pycomm.Group, Counter[str]] = WeakKeyDictionary()


def state_name(names: Sequence[str], numel: int, groups: Sequence[pycomm.Group]) -> str:
    """Returns by what name compressors keep the state of parameters in one buffer, of ``numel`` elements unpadded.

    It follows from the parameters, so a checkpoint fits another world, and a program that makes other engines too. All
    ranks make their engines in one order: a second one of the same parameters in one of the ``groups`` gets a number.
    """
    name = f"fsdp:{names[0]}..{names[-1]}:{numel}"
    taken = [_taken.setdefault(group, Counter()) for group in groups]
    number = max(each[name] for each in taken)
    for each in taken:
        each[name] = number + 1
    return pycomm.compression.PaddedName(f"{name}#{number}" if number else name, numel)
