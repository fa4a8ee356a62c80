"""Where the ranks of a job meet first: the store through which they tell each other what a transport needs.

The store is torch's. Under ``pycomm run`` on one host it is a file that the launcher holds, under ``torchrun`` the
agent's own, elsewhere one that rank 0 serves.
Stores are kept until the process ends, because a rank that is done may not take the store from under the others, and
because a second ``init`` then meets where the first did.

[Note: who serves the store leaves last]
Messages may be under way for seconds after their sender has gone, and until they are there their receivers look in the
store for who has left in good order. So a process that serves it ends after the others, or ``_STAY_S`` later.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlparse

import torch.distributed

from .. import env
from ..errors import CollectiveTimeoutError, ConfigError, NativeUnavailableError
from ..topology import LaunchInfo, host_id, local_address
from ..transport._mpi_library import import_mpi

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["leave_at_once", "leave_in_order", "open_store"]

_log = logging.getLogger("pycomm")
dist: Any = torch.distributed  # its stubs lack half of the names below

_LONGEST_S = 1e9
_LOOPBACK = "127.0.0.1"
_RECORD_BYTES = 512
_STAY_S = 5.0
_kept: dict[tuple[int, str], Store] = {}
_served: list[int] = []  # the process that serves a store; a child does not
_leaving: _Leaving | None = None


def open_store(
    launch: LaunchInfo, timeout_s: float, init_method: str | None = None, store: Store | None = None
) -> Store:
    """Returns a store that all ranks of ``launch`` share, with a prefix of pycomm's and the job's attempt.

    It is the first of: ``store``; what ``init_method`` says (``tcp://host:port``, ``file:///path``, ``env://``); a
    store of this process alone in a world of one; the store of an initialized torch.distributed; the one of ``pycomm
    run`` on one host (PYCOMM_STORE); the one at MASTER_ADDR and MASTER_PORT (torchrun's own where there is one); one
    that rank 0 serves and MPI tells the others of.

    Raises ConfigError, NativeUnavailableError, and CollectiveTimeoutError if the others cannot be reached in time.
    """
    base, origin = _find_store(launch, timeout_s, init_method, store)
    _log.info("rank %d of %d meets the others at %s", launch.rank, launch.world_size, origin)
    if launch.is_mpi and launch.world_size > 1:
        _abort_job_on_error()
    # Under torchrun --max-restarts the store outlives an attempt: the keys of a dead one must not be found.
    prefixed: Store = dist.PrefixStore(f"pycomm/{launch.attempt}", base)
    return prefixed


class _Leaving(NamedTuple):
    """How this process leaves the job that it joined last."""

    store: Store
    keys: list[str]  # of all ranks
    rank: int
    pid: int
    stays: bool


def leave_in_order(store: Store, launch: LaunchInfo) -> None:
    """Has this process tell the others at its end that it needs ``store`` no more; see the note on top of this file."""
    global _leaving
    keys = [f"left{rank}" for rank in range(launch.world_size)]
    _leaving = _Leaving(store, keys, launch.rank, os.getpid(), os.getpid() in _served)


def leave_at_once() -> None:
    """Has it stay for nobody: its group is broken, and who is dead does not say that he leaves."""
    global _leaving
    _leaving = None if _leaving is None else _leaving._replace(stays=False)


@atexit.register  # before init does so with finalize, which therefore comes first
def _leave() -> None:
    if _leaving is None or _leaving.pid != os.getpid():
        return
    deadline = time.monotonic() + _STAY_S
    with contextlib.suppress(RuntimeError):  # the store may have gone with its process
        _leaving.store.set(_leaving.keys[_leaving.rank], "1")
        while _leaving.stays and not _leaving.store.check(_leaving.keys) and time.monotonic() < deadline:
            time.sleep(2e-3)


def _find_store(
    launch: LaunchInfo, timeout_s: float, init_method: str | None, store: Store | None
) -> tuple[Store, str]:
    """Returns the store and the words that say where it is."""
    if store is not None and init_method is not None:
        raise ConfigError("init: expected store or init_method, got both; pass one")
    if store is not None:
        return store, "the store that was given"
    if init_method is not None and init_method != "env://":
        return _keep(init_method, lambda: _by_url(launch, timeout_s, init_method)), init_method
    if launch.world_size == 1:
        return dist.HashStore(), "a store of this process alone"
    if init_method is None and dist.is_initialized() and _is_same_world(launch):
        return dist.distributed_c10d._get_default_store(), "the store of torch.distributed"
    if launch.master_addr:
        where = f"{launch.master_addr}:{launch.master_port}"
        told, _, path = str(env.read("PYCOMM_STORE")).partition("=")
        if told == where and init_method is None:  # else it is meant for a job that started this one
            return _keep(path, lambda: _by_file(path, timeout_s)), f"the store of `pycomm run`, {path}"
        return _keep(where, lambda: _by_address(launch, timeout_s)), f"{where} ({', '.join(launch.sources)})"
    if launch.is_mpi and init_method is None:
        return _keep("mpi", lambda: _by_mpi(launch, timeout_s)), "a store that rank 0 told of by MPI"
    raise ConfigError(
        f"rank {launch.rank} of {launch.world_size} (launcher: {launch.launcher}) does not know where to meet the "
        f"others: looked for init(store=), init(init_method=), an initialized torch.distributed, MASTER_ADDR with "
        f"MASTER_PORT, and an MPI launcher; found none. Start the job with `pycomm run -n {launch.world_size} "
        f"script.py`, or set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same on all ranks"
    )


def _is_same_world(launch: LaunchInfo) -> bool:
    return bool((dist.get_rank(), dist.get_world_size()) == (launch.rank, launch.world_size))


def _keep(where: str, make: Callable[[], Store]) -> Store:
    """Returns the store that this process has at ``where``, else makes it. A forked child makes its own."""
    key = (os.getpid(), where)
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


def _by_file(path: str, timeout_s: float) -> Store:
    try:
        store: Store = dist.FileStore(path, -1)
        store.set_timeout(timedelta(seconds=min(timeout_s, _LONGEST_S)))
        store.check(["pycomm"])  # the file is opened by the first call
    except RuntimeError as error:
        raise ConfigError(
            f"PYCOMM_STORE: cannot open {path}, the store of `pycomm run` ({str(error).splitlines()[0]}); "
            f"see whether its process still runs, as the same user"
        ) from error
    return store


def _by_address(launch: LaunchInfo, timeout_s: float) -> Store:
    # torch's own handler knows torchrun's store, and shares a port with init_process_group in the same process.
    url = f"tcp://{launch.master_addr}:{launch.master_port}"
    return _by_url(launch, timeout_s, url)


def _by_url(launch: LaunchInfo, timeout_s: float, url: str) -> Store:
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_S))
    try:
        store: Store = (
            _serve_where_asked(launch, url, timeout)
            or next(dist.rendezvous(url, launch.rank, launch.world_size, timeout=timeout))[0]
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        _raise_unreachable(launch, url, timeout_s, error)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"init_method {url!r}: {error}; expected tcp://HOST:PORT or file:///PATH") from error
    return store


def _serve_where_asked(launch: LaunchInfo, url: str, timeout: timedelta) -> Store | None:
    """Serves the store at the address of ``url`` alone, where torch would listen on every interface of the host.

    Returns None where that is not for this rank to do: another one serves it, an agent does, or this process does
    already, for torch.distributed. An address that is not this host's own (of a balancer, say) cannot be bound; then
    all interfaces are listened on, with a warning.
    """
    where = urlparse(url)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.rank != 0 or is_agents or where.scheme != "tcp" or not where.hostname or not where.port:
        return None
    family, _, _, _, address = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                _log.warning("%s is no address of this host: the store listens on all interfaces", where.hostname)
            return None  # torch shares a port that this process has, or says that it is taken
        listener.listen(launch.world_size + 8)
        arguments = {"is_master": True, "timeout": timeout, "multi_tenant": True}
        store: Store = dist.TCPStore(
            where.hostname, where.port, launch.world_size, **arguments, master_listen_fd=listener.detach()
        )
    _served.append(os.getpid())
    return store


def _raise_unreachable(launch: LaunchInfo, where: str, timeout_s: float, error: Exception) -> NoReturn:
    text = str(error).partition("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        raise ConfigError(
            f"rank 0 cannot serve the store at {where}: the port is taken, by another job or by one that still runs; "
            f"set MASTER_PORT to a free port (torch says: {text})"
        ) from error
    raise CollectiveTimeoutError(
        f"rank {launch.rank} of {launch.world_size} could not meet the others at {where} within {timeout_s:.3g} s; "
        f"see whether all {launch.world_size} ranks were started and call pycomm.init(), and whether this host reaches "
        f"that address (torch says: {text})"
    ) from error


# -- MPI --------------------------------------------------------------------------------------------------------------


def _by_mpi(launch: LaunchInfo, timeout_s: float) -> Store:
    """Rank 0 serves a store on a port that is free and tells the others by MPI; on one host it listens on loopback."""
    try:
        mpi = import_mpi()
    except NativeUnavailableError as error:
        raise NativeUnavailableError(
            f"rank {launch.rank} of {launch.world_size} was started by an MPI launcher ({launch.launcher}); without "
            f"MASTER_ADDR its ranks find each other by MPI. {error}. Or do without MPI: set MASTER_ADDR to rank 0's "
            f"host and MASTER_PORT to a free port there (127.0.0.1 on one host)"
        ) from error
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.world_size):
        raise ConfigError(
            f"the launcher says rank {launch.rank} of {launch.world_size}, but the MPI library that mpi4py loaded says "
            f"rank {world.Get_rank()} of {world.Get_size()} ({mpi.Get_library_version().splitlines()[0]}): they are of "
            f"two different MPIs; use the mpirun of that library"
        )
    deadline = time.monotonic() + timeout_s
    hosts = _exchange(mpi, f"{host_id()} {socket.gethostname()}", deadline)
    port, server = _serve(hosts) if launch.rank == 0 else (0, None)
    address = _address_of_server(hosts) if launch.rank == 0 else ""
    where = _exchange(mpi, f"{address} {port}", deadline)[0].split()
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_S))
    if server is not None:
        store: Store = server
    else:
        try:
            store = dist.TCPStore(where[0], int(where[1]), is_master=False, timeout=timeout)
        except RuntimeError as error:
            _raise_unreachable(launch, ":".join(where), timeout_s, error)
    return store


def _serve(hosts: list[str]) -> tuple[int, Store]:
    """Starts the store's server in this process. torch alone would listen on every interface, on one host too."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_LOOPBACK if _is_one_host(hosts) else "", 0))
    listener.listen(len(hosts) + 8)
    port = int(listener.getsockname()[1])
    descriptor = listener.detach()  # the server closes it
    store: Store = dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    _served.append(os.getpid())
    return port, store


def _is_one_host(hosts: list[str]) -> bool:
    return len({entry.split()[0].rsplit("/", 1)[0] for entry in hosts}) == 1


def _address_of_server(hosts: list[str]) -> str:
    """Returns the address under which the other hosts reach this one, which is rank 0's."""
    if _is_one_host(hosts):
        return _LOOPBACK
    other = next(entry for entry in hosts if entry.split()[0] != hosts[0].split()[0])
    return local_address(other.split()[1])


def _exchange(mpi: Any, mine: str, deadline: float) -> list[str]:
    """Returns every rank's text, by MPI: bytes of a fixed size, nothing pickled, and no wait beyond ``deadline``."""
    world = mpi.COMM_WORLD
    sent = bytearray(mine.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES))
    received = bytearray(_RECORD_BYTES * world.Get_size())
    request = world.Iallgather([sent, mpi.BYTE], [received, mpi.BYTE])
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rank {world.Get_rank()} of {world.Get_size()} did not meet the others by MPI in time; see whether "
                f"all ranks call pycomm.init(), or raise its timeout"
            )
        time.sleep(1e-4)
    return [
        received[start : start + _RECORD_BYTES].decode().strip() for start in range(0, len(received), _RECORD_BYTES)
    ]


def _abort_job_on_error() -> None:
    """Makes an exception that ends this rank end the job, as ``python -m mpi4py`` does.

    Without it MPI_Finalize, which mpi4py calls at exit, waits for the other ranks, and they for this one.
    """
    global _has_hook
    if _has_hook:
        return
    _has_hook = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        sys.stderr.flush()
        if "mpi4py.MPI" in sys.modules:  # only then has this process joined MPI
            from mpi4py.run import set_abort_status

            set_abort_status(error)

    sys.excepthook = hook


_has_hook = False
