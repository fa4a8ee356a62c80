"""Transports carry bytes between the ranks of a group. ``base.py`` states the contract; a file here is a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..registry import Registry
from ._patience import Look, Patience
from .base import Request, Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TRANSPORTS", "ConnectSpec", "Look", "Patience", "Request", "Transport", "connect"]

TRANSPORTS = Registry("pycomm.transport", "pycomm.transports", "transport", helpers=frozenset({"base"}))


@dataclass(frozen=True, kw_only=True)
class ConnectSpec:
    """What a transport needs to join its ranks.

    ``store`` is shared by exactly these ranks and this connect, so keys need no further prefix. ``host_ids[r]`` says
    where rank r runs: ranks with equal ids can share memory. ``timeout_s`` becomes the transport's default, in seconds;
    so long ranks are waited for. A transport calls ``look`` now and then meanwhile; it raises what has made that vain.
    """

    rank: int
    world_size: int
    store: Store
    host_ids: tuple[str, ...]
    timeout_s: float
    look: Look | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} is not in a world of {self.world_size}; expected 0 <= rank < world_size"
            )
        if len(self.host_ids) != self.world_size:
            raise ConfigError(f"expected {self.world_size} host ids, one a rank, got {len(self.host_ids)}")


def connect(name: str, spec: ConnectSpec) -> Transport:
    """Joins this rank through the transport ``name``.

    Called by every rank of the group; raises ConfigError if unknown.
    """
    transport = TRANSPORTS.load(name).connect(spec)
    if not isinstance(transport, Transport):
        raise ConfigError(f"transport {name!r}: connect() must return a pycomm.transport.Transport, got {transport!r}")
    return transport
