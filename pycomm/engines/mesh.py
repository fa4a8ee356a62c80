"""A mesh: the ranks of a group as a grid with named axes, ``Mesh(pp=2, dp=2, tp=2)``.

Each rank has a coordinate on each axis, and each axis a group: the ranks whose other coordinates are this rank's.

[Note: the chattiest axis stays on the host]
Ranks are laid out in row-major order over the axes, the last of which varies fastest, after the ranks were sorted by
host. So the last axes have their groups on one host as far as they fit. Tensor parallelism exchanges activations four
times a layer, sharded data parallelism every parameter twice a step, data parallelism every gradient once, a pipeline
the activations at the cuts: that is the order of ``CHATTINESS``, and unless told otherwise a mesh goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import torch

import pycomm

from ..errors import ConfigError
from ..sizes import whole_number
from ..topology import host_id

__all__ = ["CHATTINESS", "Mesh", "layout_axes"]

# From the axis that says least to the one that says most; axes of other names stand between dp and tp, as given.
CHATTINESS = ("pp", "dp", "fsdp", "cp", "ep", "tp")


class Mesh:
    """A grid of ranks. Made by every rank of ``group`` with the same axes.

    ``mesh.group("tp")`` is the group along an axis, ``mesh.group("dp", "tp")`` one over several; ``mesh["dp"]`` is this
    rank's coordinate, ``mesh.shape["dp"]`` the axis's length. One axis may be -1: what the world leaves for it.
    """

    def __init__(self, group: Any = None, *, order: Sequence[str] | None = None, **axes: int) -> None:
        """Lays out the ranks of ``group``; ``order`` names the axes from the outermost in, instead of by chattiness.

        Raises ConfigError, before a byte moves, if the lengths do not multiply to the number of ranks.
        """
        self.parent = group
        world_size, rank = pycomm.world_size(group), pycomm.rank(group)
        lengths = _lengths(axes, world_size)
        names = layout_axes(tuple(lengths)) if order is None else tuple(order)
        if sorted(names) != sorted(lengths):
            raise ConfigError(f"Mesh: order names the axes {names}, expected each of {sorted(lengths)} once")
        self.shape: dict[str, int] = {name: lengths[name] for name in names}
        seats = _sorted_by_host(group, world_size)  # seat -> rank
        self._grid = torch.tensor(seats, dtype=torch.int64, device="cpu").view(*self.shape.values())
        seat = seats.index(rank)
        self._coordinates: dict[str, int] = {}
        for name, length in reversed(self.shape.items()):
            seat, self._coordinates[name] = divmod(seat, length)
        self._groups: dict[tuple[str, ...], pycomm.Group] = {}
        for name in self.shape:
            self.group(name)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, from the outermost in."""
        return tuple(self.shape)

    def __getitem__(self, axis: str) -> int:
        self._check((axis,))
        return self._coordinates[axis]

    def group(self, *axes: str) -> pycomm.Group:
        """Returns the group of the ranks that differ from this one along ``axes`` alone, in the mesh's order.

        The first use of a combination of axes makes its group, so every rank of the mesh makes that call.
        """
        self._check(axes)
        key = tuple(name for name in self.shape if name in axes)
        if key not in self._groups:
            color = self._index([name for name in self.shape if name not in key])
            found = pycomm.split(color, self._index(key), self.parent, name="x".join(key))
            assert isinstance(found, pycomm.Group), "every rank passes a color"
            self._groups[key] = found
        return self._groups[key]

    def rank_at(self, **coordinates: int) -> int:
        """Returns the rank in the parent group at this rank's coordinates, changed to the given ones."""
        self._check(tuple(coordinates))
        place = {**self._coordinates, **coordinates}
        for name, index in place.items():
            if not 0 <= index < self.shape[name]:
                raise ConfigError(f"Mesh: axis {name!r} has coordinates 0..{self.shape[name] - 1}, got {index}")
        return int(self._grid[tuple(place[name] for name in self.shape)])

    def close(self) -> None:
        """Closes the groups that this mesh made."""
        for group in self._groups.values():
            group.close()

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}={length}" for name, length in self.shape.items())
        here = ", ".join(f"{name}={index}" for name, index in self._coordinates.items())
        return f"Mesh({shape}; this rank: {here})"

    def _index(self, names: Sequence[str]) -> int:
        index = 0
        for name in names:
            index = index * self.shape[name] + self._coordinates[name]
        return index

    def _check(self, axes: Sequence[str]) -> None:
        unknown = [axis for axis in axes if axis not in self.shape]
        if unknown or not axes:
            raise ConfigError(f"Mesh: no axis {unknown or 'was named'}; this mesh has {', '.join(self.shape)}")


def layout_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes from the outermost in, the chattiest last. See the note on top of this file."""
    unknown = CHATTINESS.index("tp") - 0.5
    return tuple(sorted(names, key=lambda name: CHATTINESS.index(name) if name in CHATTINESS else unknown))


def _lengths(axes: dict[str, int], world_size: int) -> dict[str, int]:
    """Returns the axes with -1 replaced. Raises ConfigError if they do not make up the world."""
    axes = {name: whole_number(length, f"Mesh: axis {name!r}", -1) for name, length in axes.items()}
    lengths = dict(axes)
    if 0 in axes.values():
        raise ConfigError(f"Mesh: expected axes of lengths >= 1, or -1 for what is left, got {axes}")
    open_axes = [name for name, length in axes.items() if length == -1]
    known = prod(length for length in axes.values() if length != -1)
    if len(open_axes) == 1 and world_size % known == 0:
        lengths[open_axes[0]] = world_size // known
    if len(open_axes) > 1 or not axes or prod(lengths.values()) != world_size:
        shape = " x ".join(f"{name}={length}" for name, length in axes.items()) or "no axis"
        raise ConfigError(
            f"Mesh: {shape} does not make the {world_size} ranks of the group; choose lengths whose product is "
            f"{world_size}, with -1 for at most one of them"
        )
    return lengths


def _sorted_by_host(group: Any, world_size: int) -> list[int]:
    """Returns the ranks, those of one host side by side, hosts in the order of their first rank."""
    digest = int.from_bytes(blake2b(host_id().encode(), digest_size=7).digest(), "little")
    device = pycomm.get_group(group).control_device
    told = torch.empty(world_size, dtype=torch.int64, device=device)
    pycomm.all_gather_single(told, torch.tensor([digest], dtype=torch.int64, device=device), group)
    hosts = told.tolist()
    return sorted(range(world_size), key=lambda rank: (hosts.index(hosts[rank]), rank))
