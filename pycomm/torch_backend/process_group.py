"""The backend where torch lets Python make whole process groups only: torch 2.11 to 2.13."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import DEVICES
from .members import Members

if TYPE_CHECKING:
    from ..collectives.group import Group
    from .options import Options

__all__ = ["PycommProcessGroup"]


class PycommProcessGroup(Members, dist.ProcessGroup):  # type: ignore[misc]  # its many overloads are served by one
    """A process group that is pycomm's alone: torch asks its Python methods directly, without its own dispatcher."""

    def __init__(self, store: Any, group: Group, options: Options) -> None:
        """Takes a connected ``group``; ``store`` is its members' own."""
        dist.ProcessGroup.__init__(self, group.rank, group.world_size)  # type: ignore[call-arg]
        self._set_up(group, options, store)
        self._name, self._description = group.name, "undefined"

    # Torch's own answers come from the backends of a group, and this one has none.
    def setGroupName(self, name: str) -> None:
        """Takes the name by which torch knows the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Returns that name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Takes the user's description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Returns that description."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes."""
        names = DEVICES if torch.cuda.is_available() else DEVICES[:1]
        return [torch.device(name) for name in names]

    def _get_backend(self, device: torch.device) -> PycommProcessGroup:  # type: ignore[override]
        """Returns this group: it is its own backend. Raises RuntimeError for a device that it does not serve."""
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(f"pycomm serves {' and '.join(DEVICES)} tensors, and has no backend for {device}")
        return self

    @property
    def options(self) -> Options:
        """The settings that the group was made with."""
        return self.pycomm_options

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PycommProcessGroup | None:
        """Returns a group of ``new_ranks`` of this one, in that order; None on a rank that is not among them.

        Every rank of this group calls it.
        """
        options = self.pycomm_options.of_part(opts)
        if timeout is None and opts is not None:
            timeout = opts.timeout
        child = self.group.subgroup(list(new_ranks), group_name, timeout)
        if child is None:
            return None
        store = dist.PrefixStore(f"{child.name}/", self._store)  # type: ignore[attr-defined]  # missing in the stubs
        made = PycommProcessGroup(store, child, options)
        made._set_group_name(group_name or child.name)  # type: ignore[arg-type]
        made._set_group_desc(group_desc or "undefined")
        return made
