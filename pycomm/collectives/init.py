"""Starting and ending: the default group, and groups made from it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .. import env, topology
from ..algorithms.executor import meet
from ..algorithms.selection import Selector, load_table
from ..config import LOG_LEVELS, Config, seconds
from ..errors import ConfigError, NativeUnavailableError, PeerLostError
from ..sizes import whole_number
from ..topology import LaunchInfo, Topology
from ..transport import TRANSPORTS, ConnectSpec, Look, Patience, Transport, connect
from .agreement import agree_on_selector
from .board import disown_boards, keep_boards, leave_boards, new_boards
from .context import NON_MEMBER, NonMember, default_group, is_non_member, resolve, state
from .exchange import exchange_hosts
from .group import Group
from .last_words import leave_last_words_of_uncaught_errors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "connect_group",
    "finalize",
    "get_group",
    "init",
    "is_initialized",
    "join_ranks",
    "local_rank",
    "new_group",
    "rank",
    "split",
    "world_size",
]

_log = logging.getLogger("pycomm")
_inherited: list[Any] = []
_kept_at_exit: list[Any] = []
_has_exit_handlers = False
_inits = 0


def init(
    transport: str | Transport = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    init_method: str | None = None,
    timeout: float | timedelta | None = None,
    config: Config | None = None,
) -> Group:
    """Joins the ranks of this job and returns the default group. Called once by every rank; also a context manager.

    ``transport`` is a registered name, or "auto": shm if all ranks share this host, else mixed. Rank and world size
    come from the launcher's environment unless given. ``store`` or ``init_method`` say where ranks meet, as in torch.
    ``timeout``, seconds or a timedelta, is that of a call, 10 minutes by default; ``config`` has the other settings. A
    connected Transport may be given instead of all that; one of a LocalWorld makes a group for the calling thread
    alone. Raises ConfigError, NativeUnavailableError, CollectiveTimeoutError if a rank does not come.
    """
    if default_group() is not None or (not isinstance(transport, str) and isinstance(state.world, Group)):
        raise ConfigError(
            f"pycomm is already initialized ({default_group() or state.world!r}); call pycomm.finalize() first"
        )
    config = Config() if config is None else config
    if timeout is not None:
        config = replace(config, timeout_s=seconds(timeout))
    _set_up_logging(config.log)
    if isinstance(transport, Transport):
        return _adopt(transport, timeout)
    if transport != "auto":
        config = replace(config, transport=transport)
    if config.transport != "auto" and config.transport not in TRANSPORTS:
        raise TRANSPORTS.unknown(config.transport)
    launch = _launch_info(rank, world_size)
    return _start(launch, config, store, init_method)


def finalize() -> None:
    """Closes the default group and all groups made from it, and those around torch groups.

    Does nothing without ``init``.
    """
    by_thread = getattr(state.by_thread, "world", None)
    if by_thread is not None:
        by_thread.close()
        return
    for group in list(state.torch_groups.values()):
        group.close()
    state.world.close()


def is_initialized() -> bool:
    """Says whether ``init`` has made a default group that is not yet closed."""
    return default_group() is not None


def get_group(group: Any = None) -> Group:
    """Returns the Group that a ``group`` argument means: the default one for None, that around a torch ProcessGroup.

    Without ``init`` an initialized torch.distributed is joined. Raises ConfigError if there is none.
    """
    return resolve(group)


def rank(group: Any = None) -> int:
    """Returns this rank in ``group``, -1 if it is not a member."""
    return -1 if is_non_member(group) else resolve(group).rank


def world_size(group: Any = None) -> int:
    """Returns the number of ranks in ``group``, -1 if this one is not a member."""
    return -1 if is_non_member(group) else resolve(group).world_size


def local_rank() -> int:
    """Returns the index of this rank among those on its host: the number of its GPU, for one."""
    group = resolve(None)
    return group.rank if group.transport.name == "local" else state.local_rank


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
    *,
    group: Any = None,
    name: str | None = None,
) -> Group | NonMember:
    """Makes a group of ``ranks`` (global, None for all), on the transport of ``group``.

    Called by every rank of ``group``; those outside get NON_MEMBER. Members are ordered by rank, or as in ``ranks``
    without ``sort_ranks``. ``timeout`` is that of the new group's calls; to make it the ranks have the timeout of
    ``group``. ``name``, or torch's word for it, ``group_desc``, is what errors and tables call it; ``backend``, if
    given, the transport's name. Of torch's other arguments ``device_id`` binds nothing: it may be any device, but over
    a transport for GPUs only that of this rank. Raises ConfigError for ranks that do not exist or repeat, for any
    ``pg_options``, and for ``use_local_synchronization`` without all ranks.
    """
    parent = resolve(group)
    with parent.scope("new_group"):
        if backend not in (None, parent.transport.name):
            raise ConfigError(
                f"backend: a group uses the transport of its parent: expected {parent.transport.name!r} or None, got "
                f"{backend!r}; leave it out"
            )
        if pg_options is not None:
            raise ConfigError(
                f"pg_options: a group has the settings of its parent: expected None, got {type(pg_options).__name__}: "
                f"{pg_options!r}; leave it out, and pass timeout= here, algorithm= and compression= to each call"
            )
        if name is not None and group_desc is not None:
            raise ConfigError(f"expected name or group_desc, got both: {name!r} and {group_desc!r}; pass one")
        called = _name_of(group_desc if name is None else name)
        if device_id is not None:
            _check_device(parent, device_id)
        if ranks is not None and not isinstance(ranks, Iterable):
            raise ConfigError(f"ranks: expected several ranks or None, got {ranks!r}; one rank alone is [{ranks!r}]")
        chosen = list(parent.ranks if ranks is None else ranks)
        members = sorted(chosen) if ranks is not None and sort_ranks else chosen
        if not members or len(set(members)) != len(members):
            raise ConfigError(f"ranks: expected at least one rank and none twice, got {chosen}")
        group_ranks = [parent.group_rank(member) for member in members]
        if use_local_synchronization and len(members) < parent.world_size:
            raise ConfigError(
                f"use_local_synchronization: every rank of the group takes part in making another: expected False, or "
                f"all {parent.world_size} ranks, got True and {chosen}; pass False and call it on every rank, also on "
                f"those outside"
            )
    return parent.subgroup(group_ranks, called, timeout) or NON_MEMBER


def _name_of(name: Any) -> str | None:
    """Returns the name that a caller gives a group. Raises ConfigError if it is none."""
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name: expected a str or None, got {type(name).__name__}: {name!r}")
    return name


def _check_device(parent: Group, device: torch.device) -> None:
    """Raises ConfigError for the ``device_id`` of a new group whose transport is bound to another device."""
    if not isinstance(device, torch.device):
        raise ConfigError(
            f"device_id: expected a torch.device or None, got {type(device).__name__}: {device!r}; leave it out"
        )
    own = parent.control_device
    is_own = device == own or (device.type == own.type and device.index is None)
    if own.type != "cpu" and not is_own:
        raise ConfigError(
            f"device_id: transport {parent.transport.name!r} serves one GPU a rank: expected {own} or None, got "
            f"{device}; leave it out, and call torch.cuda.set_device before pycomm.init"
        )


def split(color: int | None, key: int = 0, group: Any = None, *, name: str | None = None) -> Group | NonMember:
    """Makes one group of all ranks that pass the same ``color``, ordered by ``key``, then by rank.

    Called by every rank of ``group``; a rank that passes None joins no group and gets NON_MEMBER.
    """
    from .verbs import all_gather_single

    parent = resolve(group)
    device = parent.control_device
    with parent.scope("split"):
        called = _name_of(name)
        mine = [-1, whole_number(key, "key", -(1 << 63))]
        if color is not None:  # True is a color: split(rank < 4)
            mine[0] = whole_number(int(color) if isinstance(color, bool) else color, "color", 0)
    table = torch.empty(2 * parent.world_size, dtype=torch.int64, device=device)
    all_gather_single(table, torch.tensor(mine, dtype=torch.int64, device=device), parent)
    pairs = table.view(-1, 2).tolist()
    members = sorted((pair[1], member) for member, pair in enumerate(pairs) if pair[0] == color)
    group_ranks = [member for _, member in members] if color is not None else None
    return parent.subgroup(group_ranks, called, with_all=True) or NON_MEMBER


def init_from_torch() -> Group:
    """Joins the ranks of an initialized torch.distributed on first use. Raises ConfigError if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "pycomm has no default group in this thread; call pycomm.init() on every rank first "
            "(an initialized torch.distributed would serve too)"
        )
    _log.info("joining the ranks of torch.distributed's default group")
    return init(rank=dist.get_rank(), world_size=dist.get_world_size())


def _launch_info(rank: int | None, world_size: int | None) -> LaunchInfo:
    """Returns what the launcher says, with the arguments put in its place if they are given."""
    found = topology.detect_launch()
    if rank is None and world_size is None:
        return found
    if rank is None or world_size is None:
        raise ConfigError(
            f"init: expected rank and world_size together or neither, got rank={rank}, world_size={world_size}"
        )
    if (rank, world_size) == (found.rank, found.world_size):
        return found
    return replace(found, rank=rank, world_size=world_size, local_rank=0, local_world_size=1, sources=("arguments",))


def _start(launch: LaunchInfo, config: Config, store: Store | None, init_method: str | None) -> Group:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, though not in its __all__

    from .rendezvous import leave_in_order, open_store

    global _inits
    _log.info("launcher %s: rank %d of %d", launch.launcher, launch.rank, launch.world_size)
    base = open_store(launch, config.timeout_s, init_method=init_method, store=store)
    # The same store may serve a second init after finalize; its keys must be new ones.
    store = PrefixStore(f"init{_inits}", base)
    _inits += 1
    group = _join(store, launch, config)
    if not group.transport.sees_who_leaves:
        leave_in_order(store, launch)
    return group


def join_ranks(store: Store, rank: int, world_size: int, config: Config, look: Look | None = None) -> Group:
    """Joins the ranks that meet in ``store``, whose keys are new and theirs alone; returns the default group.

    Called by every rank, while it has no default group. Raises as ``init`` does, and what ``look`` raises, which is
    called now and then in all waits: so the ranks give up together what one of them has given up.
    """
    return _join(store, _launch_info(rank, world_size), config, look)


def _join(store: Store, launch: LaunchInfo, config: Config, look: Look | None = None) -> Group:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as above

    rank, world_size, table = launch.rank, launch.world_size, load_table(config.algorithms)
    own, address = new_boards(config.monitor)
    patience = Patience(config.timeout_s, look)
    host_ids, addresses = exchange_hosts(store, rank, world_size, config.transport, table, patience, address)
    if own is not None:
        own.meet(addresses, host_ids, rank)
    transport = _connect(store, rank, config, host_ids, "world", look)
    says_local = launch.launcher != "none" and launch.local_world_size > 1
    state.local_rank = launch.local_rank if says_local else host_ids[:rank].count(host_ids[rank])
    selector = Selector(transport, Topology.of_hosts(host_ids), table)
    state.world = Group(transport, "world", on_close=_forget_world, selector=selector)
    _set_exit_handlers()
    _log.debug("board: %s", "none" if own is None else f"{len(own.peers)} of the host's other ranks are in sight")
    keep_boards(state.world, own, PrefixStore("monitor", store), config, host_ids)
    return state.world


def connect_group(
    store: Store,
    rank: int,
    world_size: int,
    config: Config,
    name: str,
    ranks: Sequence[int] | None = None,
    *,
    monitor_store: Store | None = None,
) -> Group:
    """Joins ranks that meet in ``store``, as ``join_ranks`` does, in a group that is nobody's default and that its
    owner closes. ``ranks`` are the global ranks of its members. If they are all of the job, ``monitor_store`` is given:
    then they make boards, where the process has none, and watch them as ``init`` does.
    """
    table = load_table(config.algorithms)
    own, address = (None, None) if monitor_store is None else new_boards(config.monitor)
    host_ids, addresses = exchange_hosts(
        store, rank, world_size, config.transport, table, Patience(config.timeout_s), address
    )
    if own is not None:
        own.meet(addresses, host_ids, rank)
    try:
        transport = _connect(store, rank, config, host_ids, name)
    except PeerLostError as error:  # whose words are those of ranks that join a world
        error.global_rank = error.rank if ranks is None or error.rank < 0 else ranks[error.rank]
        raise
    selector = Selector(transport, Topology.of_hosts(host_ids), table)
    group = Group(transport, name, ranks, on_close=leave_boards, selector=selector)
    _set_exit_handlers()
    if monitor_store is not None:
        keep_boards(group, own, monitor_store, config, host_ids)
    return group


def _connect(
    store: Store, rank: int, config: Config, host_ids: tuple[str, ...], name: str, look: Look | None = None
) -> Transport:
    """Connects the transport of a group called ``name`` and meets its other ranks."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as above

    kind, world_size = _choose_transport(config.transport, host_ids), len(host_ids)
    spec = ConnectSpec(
        rank=rank,
        world_size=world_size,
        store=PrefixStore(kind, store),
        host_ids=host_ids,
        timeout_s=config.timeout_s,
        look=look,
    )
    transport = connect(kind, spec)
    transport.group_name = name
    try:
        if look is not None:  # else a rank that gave up, and is no member, would be waited for where nobody looks
            # From then on who leaves closes the group, or dies.
            Patience(config.timeout_s, look).meet(store, "connected", rank, world_size, word="1", to="connect")
        meet(transport)
    except BaseException:
        transport.close()
        raise
    _log.info("rank %d of %d of group %r joined by transport %s", rank, world_size, name, kind)
    return transport


def _choose_transport(name: str, host_ids: tuple[str, ...]) -> str:
    """Returns ``name``, or what "auto" means: shm where all ranks share one host, else mixed."""
    if name != "auto":
        return name
    if len(set(host_ids)) > 1:
        return "mixed"
    if len(host_ids) == 1:
        from ..ops import native

        try:
            native()
        except NativeUnavailableError as error:  # one rank alone exchanges nothing, so nothing is lost by it
            _log.info("a world of one on transport local, as shm is not there: %s", error)
            return "local"
    return "shm"


def _adopt(transport: Transport, timeout: float | timedelta | None) -> Group:
    """Makes the default group of a transport that is already connected."""
    if timeout is not None:
        transport.timeout_s = seconds(timeout)
    selector = agree_on_selector(transport)
    if transport.name == "local":
        group = Group(transport, "world", on_close=_forget_thread, selector=selector)
        state.by_thread.world = group
    else:
        group = Group(transport, "world", on_close=_forget_world, selector=selector)
        state.world = group
        _set_exit_handlers()
    return group


def _forget_world(group: Group) -> None:
    if group.transport.is_broken:
        from .rendezvous import leave_at_once

        leave_at_once()
    leave_boards(group)
    state.world = NON_MEMBER


def _forget_thread(group: Group) -> None:
    if getattr(state.by_thread, "world", None) is group:
        state.by_thread.world = None


def _set_exit_handlers() -> None:
    global _has_exit_handlers
    if not _has_exit_handlers:
        _has_exit_handlers = True
        leave_last_words_of_uncaught_errors()  # first: what is registered then comes last
        atexit.register(_finalize_at_exit)
        os.register_at_fork(after_in_child=_disown)


def _finalize_at_exit() -> None:
    """Closes the groups, and keeps them: a daemon thread may be in a call of one, and if it were the last to hold that,
    it would free tensors, for which torch lets the GIL go; that Python gives back to no thread then, but ends it there.
    """
    _kept_at_exit.append((state.world, list(state.torch_groups.values())))
    finalize()


def _disown() -> None:
    """Makes a forked child no rank. It keeps the parent's objects, unused, so that it closes nothing of theirs."""
    _inherited.append((state.world, dict(state.torch_groups), disown_boards()))
    state.world = NON_MEMBER
    state.torch_groups.clear()


def _set_up_logging(level: str) -> None:
    """Applies PYCOMM_LOG. Gives the logger a handler only if somebody asked for more than warnings, and has none."""
    if not env.is_set("PYCOMM_LOG") and level == "warning":
        return
    _log.setLevel(LOG_LEVELS[level])
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(f"{socket.gethostname()}:%(process)d [pycomm] %(levelname)s %(message)s")
        )
        _log.addHandler(handler)
