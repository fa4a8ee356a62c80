"""Makes gloo groups whose ranks are connected, to each other and to nobody else: see [Note: deaf sockets]."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from ..errors import CollectiveTimeoutError, ConfigError, PycommError, TransportError
from ..topology import local_address
from ._gloo_sockets import NOT_CORKED, Corked, deafen, tcp_sockets
from ._torch_messages import timeout_of
from ._wording import Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from . import ConnectSpec
    from ._patience import Patience
    from ._watch import Watch

__all__ = ["Failed", "Meeting", "come_together", "connection_to", "host_of", "make_group"]

Failed = Callable[[Failure], TransportError]

dist: Any = torch.distributed  # its stubs lack some of the names below


class Meeting(NamedTuple):
    """Where and how the ranks of a gloo group find one another."""

    store: Store
    connection: Store  # the same, by one of gloo's own: it answers nobody else while gloo waits in it
    rank: int
    world_size: int
    patience: Patience
    host: str | None  # the address to bind to; None leaves it to torch


def host_of(spec: ConnectSpec) -> str | None:
    """Returns loopback on one host, else None if GLOO_SOCKET_IFNAME names an interface, else the address on the way to
    the store.
    """
    if len(set(spec.host_ids)) == 1:
        return "127.0.0.1"
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    # torch would take what the host's own name resolves to: on many systems 127.0.1.1, where no other host gets.
    store: Any = spec.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return local_address(getattr(store, "host", "127.0.0.1"))


def connection_to(store: Store) -> Store:
    """Returns ``store`` by another connection, if it is of a kind that can have several."""
    try:
        another: Store = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
    except RuntimeError:  # one that is written in Python
        return store
    return another


def come_together(meeting: Meeting) -> bool:
    """Waits until all ranks are here; False if their time runs out. To connect those that are takes gloo no long time,
    in which nobody can look around as well.
    """
    keys = [f"here{member}" for member in range(meeting.world_size)]
    meeting.store.set(keys[meeting.rank], "1")
    try:
        meeting.patience.wait(meeting.store, keys)
    except PycommError:  # somebody is lost
        raise
    except RuntimeError:  # torch's
        return False
    return True


def make_group(meeting: Meeting, watch: Watch, failed: Failed) -> tuple[Any, Corked]:
    """Returns torch's ProcessGroupGloo, and what holds back what it sends to the other ranks, who are on their way.

    Raises what ``failed`` makes of it if ``watch`` sees one of them die, or give up: then gloo may wait in its
    connection yet, for as long as it was given.
    """
    _, connection, rank, world_size, patience, host = meeting
    patience = patience.looking(partial(_check, watch, failed))
    if not dist.is_gloo_available():
        raise ConfigError("transport 'torch': this torch has no gloo; use transport 'mpi'")
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout_of(patience.left_s())
    others = tcp_sockets()
    options._devices = [_device(host)]
    listeners = tcp_sockets().listening - others.listening
    try:
        group = patience.run(lambda: dist.ProcessGroupGloo(connection, rank, world_size, options))
    except PycommError:  # somebody is lost
        raise
    except RuntimeError as error:
        if (failure := watch.search(0)) is not None:  # one that has died since it was here takes no connection
            raise failed(failure) from error
        within = f" within {patience.timeout_s:.3g} s" if patience.is_over() else ""
        raise (CollectiveTimeoutError if within else TransportError)(
            f"rank {rank} of {world_size} could not connect to the other ranks by gloo{within}; see whether all of "
            f"them reached this call and can reach {host or 'the interface in use'} of this host "
            f"(GLOO_SOCKET_IFNAME chooses another) (torch says: {str(error).splitlines()[0]})"
        ) from error
    if os.environ.get("TORCH_GLOO_LAZY_INIT"):  # its ranks connect as they need each other
        return group, NOT_CORKED
    deafen(listeners)
    connections = tcp_sockets().connected - others.connected
    # If there are more, another thread has connected to something meanwhile.
    return group, Corked(connections) if len(connections) == world_size - 1 else NOT_CORKED


def _check(watch: Watch, failed: Failed) -> None:
    failure = watch.look(0)
    if failure is not None:
        raise failed(watch.declare(failure))


def _device(host: str | None) -> Any:
    if host is not None:
        return dist.ProcessGroupGloo.create_device(hostname=host)
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if interfaces[0]:
        return dist.ProcessGroupGloo.create_device(interface=interfaces[0])
    return dist.ProcessGroupGloo.create_default_device()
