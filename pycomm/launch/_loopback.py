"""The rendezvous of a job on one host: there is nobody to wait for, and nobody beyond loopback to be heard by.

torch's launcher asks a rendezvous two things: which host of the job this is, and where the store is that the ranks
meet at. torch's own ones (c10d, static) serve that store on every interface of the host, and c10d keeps its state in it
pickled, so that whoever reaches the port runs code here. This one serves a store on loopback and reads nothing from it.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "register"]

BACKEND = "pycomm-loopback"
_LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its stubs lack TCPStore
_BACKLOG = 1024  # ranks that may come at the same moment


def register() -> None:
    """Makes ``BACKEND`` known to torch's launcher. Calling it again changes nothing."""
    rendezvous_handler_registry.register(BACKEND, _LoopbackRendezvous)


class _LoopbackRendezvous(RendezvousHandler):
    """One host, always complete. Each attempt of the job gets a new store: keys of a dead one are gone with it."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.endpoint.rpartition(":")[2])  # 0: any that is free
        self._is_closed = False
        self._store: Any = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Serves a new store; the agent calls it at the start, and again when it restarts the ranks."""
        self._store = None  # frees the port if one was asked for
        self._store = _serve(self._port)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


def _serve(port: int) -> Any:
    """Returns a store served on loopback. Given a listening socket, torch does not open one on every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK, port))
        except OSError as error:
            raise RendezvousConnectionError(f"cannot listen at {_LOOPBACK}:{port}: {error.strerror}") from error
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
