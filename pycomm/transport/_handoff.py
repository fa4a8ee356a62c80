"""How the ranks of one host come to share a memfd: one Unix socket, used once.

The first rank of the host makes the memory and listens on an abstract Unix socket of a random name, which it publishes
in the job's store with a random token. The others connect, prove that they belong (same user, checked by the kernel;
the token, compared in constant time) and get the memory's descriptor with a descriptor of every rank's *process*. So
nothing has a name in a file system: there is nothing to squat on, to leak or to clean up; and a rank that dies is
noticed through its pidfd, whatever it dies of.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from ..errors import CollectiveTimeoutError, PeerLostError, PycommError, TransportError
from ..ops import native
from ..topology import available_cores
from ._patience import Patience

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["SharedMemory", "share_memory"]

_TOKEN_BYTES = 32
_CPU_BYTES = 128  # a bit a CPU, for 1024 of them
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sii{_CPU_BYTES}s")  # token, rank on the host, quota in cores, CPUs
_WELCOME = struct.Struct("<ii")  # ranks, cores that they have together
_TOO_LATE = 0  # in place of the ranks: some did not come in time; less: one that had come died, this is its rank
_FDS_A_MESSAGE = 200  # the kernel takes 253
_STRANGERS = 64  # connections that say nothing and are kept waiting all the same


class SharedMemory(NamedTuple):
    """What a rank holds of its host: the memory, and every rank's process."""

    fd: int
    pidfds: tuple[int, ...]  # by rank on the host; -1 for this rank
    pids: tuple[int, ...]
    cores: int  # that the ranks have together


def share_memory(store: Store, host: str, host_rank: int, host_ranks: int, patience: Patience) -> SharedMemory:
    """Joins the ``host_ranks`` ranks of this host; every one of them calls it.

    Raises:
        CollectiveTimeoutError: not all of them came within ``patience``.
        TransportError: the memory could not be made, or a stranger answered.
    """
    if host_rank == 0:
        return _lead(store, host, host_ranks, patience)
    return _follow(store, host, host_rank, host_ranks, patience)


def _cpus() -> tuple[int, int]:
    """Returns how many cores this rank may keep busy if that is less than its CPUs, else 0; and the CPUs' bits."""
    affinity = os.sched_getaffinity(0)
    quota = available_cores()
    return (quota if quota < len(affinity) else 0), sum(1 << min(cpu, 8 * _CPU_BYTES - 1) for cpu in affinity)


def _lead(store: Store, host: str, host_ranks: int, patience: Patience) -> SharedMemory:
    memory = native().shm_create_memory(host_ranks)
    pidfds = [-1] * host_ranks
    peers: dict[int, socket.socket] = {}
    try:
        return _gather(store, host, patience, memory, pidfds=pidfds, peers=peers)
    except BaseException:
        for connection in peers.values():
            connection.close()
        for fd in (memory, *pidfds):
            if fd >= 0:
                os.close(fd)
        raise


def _gather(
    store: Store, host: str, patience: Patience, memory: int, *, pidfds: list[int], peers: dict[int, socket.socket]
) -> SharedMemory:
    """Admits the other ranks and hands everything to them; fills ``pidfds`` and ``peers``, which the caller closes."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    host_ranks = len(pidfds)
    pids = [0] * host_ranks
    pidfds[0], pids[0] = os.pidfd_open(os.getpid()), os.getpid()
    quota, cpus = _cpus()
    quotas = [quota]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"\0pycomm-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(host_ranks + _STRANGERS)
        store.set(f"{host}/socket", name.encode().hex() + ":" + token.hex())
        for connection, hello in _arrivals(listener, token, host_ranks, patience):
            if connection is None:
                _give_up(peers, -hello.rank)
                raise _lost(hello.rank, host_ranks, hello.pid)
            peers[hello.rank], pidfds[hello.rank], pids[hello.rank] = connection, hello.pidfd, hello.pid
            quotas.append(hello.quota)
            cpus |= hello.cpus
            if len(peers) == host_ranks - 1:
                break
        else:
            missing = sorted(set(range(1, host_ranks)) - set(peers))
            if missing:
                _give_up(peers, _TOO_LATE)
                raise CollectiveTimeoutError(
                    f"init: local ranks {missing} of {host_ranks} on this host did not come in time; "
                    "expected all of them to call pycomm.init; check that they started, or pass a longer timeout="
                )
    # Ranks that are pinned to a core each have as many cores as there are of them, so the sets count together.
    cores = min([cpus.bit_count(), *filter(None, quotas)])
    for rank, connection in peers.items():
        try:
            with connection:
                connection.sendall(_WELCOME.pack(host_ranks, cores) + struct.pack(f"<{host_ranks}i", *pids))
                _send_fds(connection, [memory, *pidfds])
        except OSError as error:
            raise TransportError(
                f"init: local rank {rank} of {host_ranks} (pid {pids[rank]}) ended, or gave up, while the ranks of "
                f"this host came together ({error}); see that rank's own error, then start it, or the job, again"
            ) from error
    os.close(pidfds[0])
    pidfds[0] = -1
    return SharedMemory(memory, tuple(pidfds), tuple(pids), cores)


def _give_up(peers: dict[int, socket.socket], word: int) -> None:
    """Tells those that have come why they wait in vain."""
    for connection in peers.values():
        with contextlib.suppress(OSError):
            connection.sendall(_WELCOME.pack(word, 0))


def _lost(rank: int, host_ranks: int, pid: int) -> PeerLostError:
    whose = f" (pid {pid})" if pid else ""
    return PeerLostError(
        f"init: local rank {rank} of {host_ranks}{whose} ended while the ranks of this host came together; see that "
        "rank's own error, then start it, or the job, again"
    )


class _Hello(NamedTuple):
    """What a rank says of itself, checked."""

    rank: int
    quota: int
    cpus: int
    pidfd: int
    pid: int


def _arrivals(
    listener: socket.socket, token: bytes, host_ranks: int, patience: Patience
) -> Iterator[tuple[socket.socket | None, _Hello]]:
    """Yields who belongs, as they come, within ``patience``; again, with None, who has died since.

    Strangers learn nothing, and delay nobody: one that says nothing is waited for beside the others, and at most
    ``_STRANGERS`` of them.
    """
    waiting: list[socket.socket] = []
    arrived: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while host_ranks > 1 and not patience.is_over():
                for key, _ in selector.select(patience.slice_s()):
                    if key.data is not None:
                        yield None, key.data
                        return
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        if _peer(connection)[1] != os.getuid():
                            connection.close()
                            continue
                        waiting.append(connection)
                        selector.register(connection, selectors.EVENT_READ)
                        if len(waiting) > _STRANGERS + host_ranks:
                            selector.unregister(waiting[0])
                            waiting.pop(0).close()
                        continue
                    connection = cast("socket.socket", key.fileobj)
                    if connection not in waiting:  # closed in this round
                        continue
                    selector.unregister(connection)
                    waiting.remove(connection)
                    hello = _admit(connection, token, host_ranks)
                    if hello is None:
                        connection.close()
                    elif hello.rank in arrived:
                        os.close(hello.pidfd)
                        connection.close()
                    else:
                        arrived.add(hello.rank)
                        selector.register(hello.pidfd, selectors.EVENT_READ, hello)
                        connection.settimeout(patience.left_s())
                        yield connection, hello
        finally:
            for connection in waiting:
                connection.close()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end, by the kernel's word."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _admit(connection: socket.socket, token: bytes, host_ranks: int) -> _Hello | None:
    """Reads what a process of this user says, which is one message and is there; returns None for a stranger."""
    connection.setblocking(False)
    try:
        message, fds = _receive(connection, _HELLO.size, 1)
    except OSError:
        return None
    belongs = len(message) == _HELLO.size and len(fds) == 1
    if belongs:
        sent, rank, quota, cpus = _HELLO.unpack(message)
        belongs = hmac.compare_digest(sent, token) and 0 < rank < host_ranks and quota >= 0 and any(cpus)
    if not belongs:
        for fd in fds:
            os.close(fd)
        return None
    return _Hello(rank, quota, int.from_bytes(cpus, "little"), fds[0], _peer(connection)[0])


def _follow(store: Store, host: str, host_rank: int, host_ranks: int, patience: Patience) -> SharedMemory:
    quota, cpus = _cpus()
    name, _, token = _address_of_leader(store, host, host_rank, patience)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience.left_s())
        own = os.pidfd_open(os.getpid())
        try:
            _connect(connection, bytes.fromhex(name), patience)
            if _peer(connection)[1] != os.getuid():
                raise ConnectionError("another user answered")
            socket.send_fds(
                connection,
                [_HELLO.pack(bytes.fromhex(token), host_rank, quota, cpus.to_bytes(_CPU_BYTES, "little"))],
                [own],
            )
            _await(connection, patience)
            ranks, cores = _WELCOME.unpack(_read(connection, _WELCOME.size))
            if ranks == _TOO_LATE:
                raise TimeoutError("not all ranks of this host came in time")
            if ranks < 0:
                raise _lost(-ranks, host_ranks, 0)
            if ranks != host_ranks:
                raise TransportError(
                    f"init: this host has {host_ranks} ranks by the store, {ranks} by its first rank; "
                    "start the job anew"
                )
            pids = struct.unpack(f"<{host_ranks}i", _read(connection, 4 * host_ranks))
            memory, *pidfds = _receive_fds(connection, 1 + host_ranks)
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"init: local rank {host_rank} waited {patience.timeout_s:.3g} s to join the shared memory of its "
                f"host: {error}; see the other ranks' own errors"
            ) from error
        except ConnectionError as error:
            raise TransportError(
                f"init: local rank {host_rank} could not join the shared memory of its host: {error}; "
                "the host's first rank must be alive and of the same user"
            ) from error
        finally:
            os.close(own)
    native().shm_check_memory(memory, host_ranks)
    os.close(pidfds[host_rank])
    pidfds[host_rank] = -1
    return SharedMemory(memory, tuple(pidfds), pids, cores)


def _address_of_leader(store: Store, host: str, host_rank: int, patience: Patience) -> tuple[str, str, str]:
    """Returns the socket's name, a colon and the token, which the host's first rank leaves in the store."""
    key = f"{host}/socket"
    try:
        patience.wait(store, [key])
    except PycommError:  # somebody is lost
        raise
    except RuntimeError as error:  # torch's
        raise CollectiveTimeoutError(
            f"init: local rank {host_rank} waited {patience.timeout_s:.3g} s for the first rank of its host, which did "
            f"not make the shared memory; see that rank's own error ({str(error).partition(chr(10))[0]})"
        ) from error
    return store.get(key).decode().partition(":")


def _await(connection: socket.socket, patience: Patience) -> None:
    """Returns once there is something to read: the leader speaks when all ranks of the host have come."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1e3 * patience.slice_s()):
        if patience.is_over():
            raise TimeoutError("the other ranks of this host did not come in time")


def _connect(connection: socket.socket, name: bytes, patience: Patience) -> None:
    """Connects; while the listener's queue is full, which strangers can fill, tries again within ``patience``."""
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            if patience.is_over():
                raise TimeoutError("its queue stayed full") from None
            time.sleep(min(0.002, patience.slice_s()))


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        part = connection.recv(size_bytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _send_fds(connection: socket.socket, fds: Sequence[int]) -> None:
    for start in range(0, len(fds), _FDS_A_MESSAGE):
        socket.send_fds(connection, [b"+"], fds[start : start + _FDS_A_MESSAGE])


def _receive_fds(connection: socket.socket, number: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < number:
        data, some = _receive(connection, 1, _FDS_A_MESSAGE)
        if not data or not some:
            for fd in fds:
                os.close(fd)
            raise ConnectionError("the connection was closed")
        fds.extend(some)
    return fds


def _receive(connection: socket.socket, size_bytes: int, most_fds: int) -> tuple[bytes, list[int]]:
    """As ``socket.recv_fds``, whose flags Python 3.11 drops: the descriptors are closed on exec from the start."""
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(
        size_bytes, socket.CMSG_SPACE(most_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
