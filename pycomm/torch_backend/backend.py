"""The backend where torch lets Python make a backend of a process group: torch 2.14 and later."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend

from .members import Members

if TYPE_CHECKING:
    from ..collectives.group import Group
    from .options import Options

__all__ = ["PycommBackend"]


class PycommBackend(Members, Backend):
    """One of the backends of a torch process group: for the devices that the user's string names."""

    def __init__(self, store: Any, group: Group, options: Options) -> None:
        """Takes a connected ``group``; ``store`` is its members' own."""
        Backend.__init__(self, group.rank, group.world_size)
        self._set_up(group, options, store)
        self._torch_options = Backend.Options("pycomm", timedelta(seconds=min(group.timeout_s, 1e8)))

    @property
    def options(self) -> Backend.Options:
        """Torch's own options object; the settings that the group was made with are ``pycomm_options``."""
        return self._torch_options

    def split(self, store: Any, ranks: list[int], opts: Any) -> PycommBackend | None:
        """Returns the backend of a group of ``ranks`` of this one, in that order; None on a rank outside.

        Every rank of this group calls it.
        """
        child = self.group.subgroup(list(ranks), getattr(opts, "group_name", None) or None)
        return None if child is None else PycommBackend(store, child, self.pycomm_options)
