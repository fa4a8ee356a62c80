"""The rendezvous of a job on one host: there is nobody to wait for, and nobody else to be heard by.

torch's launcher asks a rendezvous two things: which host of the job this is, and where the store is that the ranks
meet at. torch's own ones (c10d, static) serve that store by TCP on every interface of the host, and c10d keeps its
state in it pickled, so that whoever reaches the port runs code here. Here the store is a file without a name (a memfd)
that the launcher holds: the kernel lets processes of the same user open it through /proc, and nobody else; it listens
nowhere, and is gone with the launcher. Nothing that is read from it is unpickled.

Ranks are told of it by PYCOMM_STORE. MASTER_ADDR and MASTER_PORT name loopback and a free port, for programs that use
torch.distributed as well: then rank 0 serves torch's store there, as torch does it.
"""

from __future__ import annotations

import os
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

from .ports import free_port

__all__ = ["BACKEND", "register"]

BACKEND = "pycomm-loopback"
_LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its stubs lack TCPStore
_ANY_NUMBER = -1  # of processes that use a FileStore: it is not to remove the file


def register() -> None:
    """Makes ``BACKEND`` known to torch's launcher. Calling it again changes nothing."""
    rendezvous_handler_registry.register(BACKEND, _LoopbackRendezvous)


class _LoopbackRendezvous(RendezvousHandler):
    """One host, always complete. Each attempt of the job gets a new store: keys of a dead one are gone with it."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.endpoint.rpartition(":")[2])  # 0: any that is free
        self._is_closed = False
        self._fd = -1

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False  # torch's own store, at MASTER_PORT

    def next_rendezvous(self) -> RendezvousInfo:
        """Makes a new store; the agent calls it at the start, and again when it restarts the ranks."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.memfd_create("pycomm-store", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            port = free_port(self._port)
        except OSError as error:
            raise RendezvousConnectionError(f"cannot listen at port {self._port}: {error.strerror}") from error
        os.environ["PYCOMM_STORE"] = f"{_LOOPBACK}:{port}={path}"  # the ranks inherit it
        return RendezvousInfo(dist.FileStore(path, _ANY_NUMBER), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

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
