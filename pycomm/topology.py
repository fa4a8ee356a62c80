"""Where this process stands: which launcher started it as which rank, on which host, with how many cores; and how the
ranks of a group lie on hosts and racks (``Topology``).

Everything here reads the environment and ``/proc`` alone. Nothing starts MPI, opens a socket or imports torch.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from .errors import ConfigError

__all__ = [
    "LaunchInfo",
    "Topology",
    "available_cores",
    "detect_launch",
    "first_host",
    "host_id",
    "local_address",
    "memory_bytes",
    "processor",
]

# Slurm numbers its own steps (batch script, interactive shell, ...) down from here; srun's count up from 0.
_SLURM_FIRST_RESERVED_STEP = 0xFFFF_FFF0
# Jobs of one host take different ports of this range; it lies below those that the kernel hands out by itself.
_SLURM_PORTS = range(20_000, 30_000)


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """What the environment says of this process.

    ``launcher`` is "torchrun", "env" (RANK and WORLD_SIZE set by hand or by a cluster), "openmpi", "mpich" (MPICH and
    Intel MPI), "slurm", or "none": a world of one. Where a launcher does not say who shares the host, ``local_rank``
    is 0 and ``local_world_size`` 1. ``master_addr`` is "" and ``master_port`` 0 if the environment names no meeting
    point. ``attempt`` counts the restarts of the job, and ``sources`` names the variables that were believed.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"
    master_addr: str = ""
    master_port: int = 0
    attempt: int = 0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_member("rank", self.rank, "world_size", self.world_size, self.sources)
        _check_member("local_rank", self.local_rank, "local_world_size", self.local_world_size, self.sources)
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"the launcher's variables contradict each other: expected at most {self.world_size} ranks on a host, "
                f"the whole world, got {self.local_world_size} (read from {', '.join(self.sources)}); "
                f"unset what another job left over"
            )

    @property
    def is_mpi(self) -> bool:
        """Whether an MPI launcher started this process, so that mpi4py can reach the other ranks."""
        return self.launcher in ("openmpi", "mpich")


def detect_launch(environ: Mapping[str, str] = os.environ) -> LaunchInfo:
    """Returns what the launcher's variables in ``environ`` say.

    The first that is there wins: RANK and WORLD_SIZE (torchrun, Kubernetes operators), OMPI_* (Open MPI), PMI_* (MPICH,
    Intel MPI), SLURM_* inside a step of several tasks (a shell of ``salloc`` is none), else a world of one.
    Raises ConfigError if the variables of one launcher are incomplete or contradict each other.
    """
    read = _Reader(environ)
    if read.has("RANK") or read.has("WORLD_SIZE"):
        launcher = "torchrun" if read.has("TORCHELASTIC_RUN_ID") else "env"
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif read.has("OMPI_COMM_WORLD_RANK") or read.has("OMPI_COMM_WORLD_SIZE"):
        launcher = "openmpi"
        prefix = "OMPI_COMM_WORLD_"
        names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    elif read.has("PMI_RANK") or read.has("PMI_SIZE"):
        launcher = "mpich"
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    elif _is_slurm_step(read):
        launcher = "slurm"
        names = ("SLURM_PROCID", _slurm_tasks_name(read), "SLURM_LOCALID", "")
    else:
        return LaunchInfo()
    return _launch_info(read, launcher, names)


def _launch_info(read: _Reader, launcher: str, names: tuple[str, ...]) -> LaunchInfo:
    """Reads rank, world size, local rank and local world size from the variables ``names``, "" where there is none."""
    rank_name, size_name, local_rank_name, local_size_name = names
    read.require_both(rank_name, size_name)
    rank, world_size = read.integer(rank_name), read.integer(size_name)
    local_rank = read.integer(local_rank_name, 0)
    if launcher == "slurm":
        local_world_size = _slurm_tasks_per_node(read, local_rank)
    else:
        local_world_size = read.integer(local_size_name, local_rank + 1)
    master_addr, master_port = _master(read)
    return LaunchInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher=launcher,
        master_addr=master_addr,
        master_port=master_port,
        attempt=read.integer("TORCHELASTIC_RESTART_COUNT", 0),
        sources=tuple(read.seen),
    )


def _master(read: _Reader) -> tuple[str, int]:
    """Returns the meeting point: MASTER_ADDR and MASTER_PORT, else the first host of the Slurm step, else ("", 0)."""
    if read.has("MASTER_ADDR") or read.has("MASTER_PORT"):
        read.require_both("MASTER_ADDR", "MASTER_PORT")
        return read.text("MASTER_ADDR"), read.integer("MASTER_PORT")
    if not _is_slurm_step(read):
        return "", 0
    nodes = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if read.has(name)), "")
    if not nodes:
        return "", 0
    is_one_host = read.integer("SLURM_STEP_NUM_NODES", 0) == 1
    host = "127.0.0.1" if is_one_host else first_host(read.text(nodes))
    # Every rank computes the same port; steps of one job that run side by side get different ones.
    job, step = read.integer("SLURM_JOB_ID", 0), read.integer("SLURM_STEP_ID", 0)
    return host, _SLURM_PORTS[(job * 17 + step) % len(_SLURM_PORTS)]


# -- Slurm ------------------------------------------------------------------------------------------------------------


def _is_slurm_step(read: _Reader) -> bool:
    # An salloc or sbatch shell carries SLURM_NTASKS of the whole job, but is one process.
    if not (read.has("SLURM_STEP_ID") and read.has("SLURM_PROCID")):
        return False
    if read.integer("SLURM_STEP_ID") >= _SLURM_FIRST_RESERVED_STEP:
        return False
    return read.integer(_slurm_tasks_name(read), 1) > 1


def _slurm_tasks_name(read: _Reader) -> str:
    return "SLURM_STEP_NUM_TASKS" if read.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def _slurm_tasks_per_node(read: _Reader, local_rank: int) -> int:
    """Reads "4(x2),3" at this node's place; a node beyond the list, or no list, gives what the local rank implies."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if not read.has(name):
        return local_rank + 1
    text, counts = read.text(name), list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name}: expected a list like '4(x2),3', got {text!r}; unset it")
        counts += [int(match[1])] * int(match[2] or 1)
    node = read.integer("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else local_rank + 1


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm list: "gpu[08-11,20],login1" gives "gpu08"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    prefix, index, suffix = match.groups(default="") if match else ("", "", "")
    host = prefix + index + suffix
    if not host:
        raise ConfigError(f"cannot read the host list {nodelist!r}; set MASTER_ADDR and MASTER_PORT instead")
    return host


# -- reading variables ------------------------------------------------------------------------------------------------


class _Reader:
    """Reads launcher variables and remembers in ``seen`` what it read, for messages. An empty one counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.seen: dict[str, None] = {}

    def has(self, name: str) -> bool:
        return bool(name and self._environ.get(name, "").strip())

    def require_both(self, first: str, second: str) -> None:
        for name, other in ((first, second), (second, first)):
            if not self.has(name):
                raise ConfigError(
                    f"the launcher's variables are incomplete: expected {first} and {second}, got {other} "
                    f"({self._environ[other]!r}) alone; set {name} too, or unset {other}"
                )

    def text(self, name: str) -> str:
        self.seen[name] = None
        return self._environ[name].strip()

    def integer(self, name: str, default: int | None = None) -> int:
        if default is not None and not self.has(name):
            return default
        raw = self.text(name)
        if not (raw.isascii() and raw.isdigit()):
            raise ConfigError(f"environment variable {name}: expected an integer of at least 0, got {raw!r}")
        return int(raw)


def _check_member(index_name: str, index: int, size_name: str, size: int, sources: tuple[str, ...]) -> None:
    if not 0 <= index < size:
        origin = f"read from {', '.join(sources)}" if sources else "given as arguments"
        raise ConfigError(
            f"{index_name} and {size_name} contradict each other: expected 0 <= {index_name} < {size_name}, got "
            f"{index_name} {index} and {size_name} {size} ({origin}); correct them, or unset what another job left over"
        )


# -- a group on its hosts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """Which ranks of a group share a host, and which hosts share a rack: what plans and the cost model go by.

    ``hosts[h]`` are the ranks on host h, ascending; hosts are in the order of their first rank. ``racks[k]`` are the
    hosts in rack k; empty means that all hosts stand in one. Equal on all ranks of a group. Raises ConfigError unless
    every rank stands on one host and every host in one rack.
    """

    hosts: tuple[tuple[int, ...], ...]
    racks: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.racks:
            object.__setattr__(self, "racks", (tuple(range(len(self.hosts))),))
        for noun, of, parts in (("ranks", "hosts", self.hosts), ("hosts", "racks", self.racks)):
            members = sorted(member for part in parts for member in part)
            if not members or members != list(range(len(members))) or not all(parts):
                raise ConfigError(
                    f"topology: expected {noun} 0, 1, ... each in one of the {of}, got {str(parts)[:200]}"
                )
        if sum(map(len, self.racks)) != len(self.hosts):
            raise ConfigError(f"topology: expected racks of {len(self.hosts)} hosts, got {str(self.racks)[:200]}")

    @staticmethod
    @cache
    def flat(world_size: int) -> Topology:
        """Returns ``world_size`` ranks on one host."""
        return Topology((tuple(range(world_size)),))

    @staticmethod
    def of_sizes(sizes: Sequence[int], hosts_per_rack: int = 0) -> Topology:
        """Returns hosts of ``sizes`` ranks each, numbered in order, ``hosts_per_rack`` to a rack (0: all in one)."""
        starts = [sum(sizes[:host]) for host in range(len(sizes))] if len(set(sizes)) > 1 else None
        first = starts or [host * sizes[0] for host in range(len(sizes))]
        hosts = tuple(tuple(range(start, start + size)) for start, size in zip(first, sizes, strict=True))
        step = hosts_per_rack or len(hosts)
        numbers = range(len(hosts))
        return Topology(hosts, tuple(tuple(numbers[start : start + step]) for start in range(0, len(hosts), step)))

    @staticmethod
    def of_hosts(host_ids: Sequence[Hashable]) -> Topology:
        """Returns the topology of ranks whose hosts are named by ``host_ids (world_size,)``."""
        members: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(host_ids):
            members.setdefault(host, []).append(rank)
        return Topology(tuple(map(tuple, members.values())))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._places)

    def host_of(self, rank: int) -> int:
        """Returns the index of the host of ``rank``."""
        return self._places[rank][0]

    def local_rank_of(self, rank: int) -> int:
        """Returns the index of ``rank`` among those of its host."""
        return self._places[rank][1]

    def rack_of(self, host: int) -> int:
        """Returns the index of the rack of ``host``."""
        return self._racks_of_hosts[host]

    def distance(self, rank: int, peer: int) -> int:
        """Returns 0 for two ranks on one host, 1 in one rack, 2 across racks."""
        host, other = self._places[rank][0], self._places[peer][0]
        if host == other:
            return 0
        return 1 if self._racks_of_hosts[host] == self._racks_of_hosts[other] else 2

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (host, local) for host, ranks in enumerate(self.hosts) for local, rank in enumerate(ranks)}

    @cached_property
    def _racks_of_hosts(self) -> dict[int, int]:
        return {host: rack for rack, hosts in enumerate(self.racks) for host in hosts}

    @cached_property
    def _hash(self) -> int:
        return hash((self.hosts, self.racks))

    def __hash__(self) -> int:  # plans are cached by topology: a tuple of 65,536 ranks is hashed once
        return self._hash


# -- the host ---------------------------------------------------------------------------------------------------------


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def host_id() -> str:
    """Returns a text that is equal for two processes exactly if they can share memory over an abstract Unix socket.

    That takes one kernel (its boot id), one network namespace (abstract names live there) and one user.
    """
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        namespace = "0"
    return f"{_boot_id()}/{namespace}/{os.getuid()}"


def local_address(peer: str) -> str:
    """Returns the IPv4 address under which hosts on the way to ``peer`` (a name or an address) reach this one.

    If ``peer`` is this host itself under a loopback name, it is the address on the default route. Sends no packet.
    Raises ConfigError if there is no such address.
    """
    tried = []
    for target in (peer, "192.0.2.1"):  # the second is reserved for documentation: it stands for "anywhere"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError as error:
                tried.append(f"{target}: {error}")
                continue
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
            tried.append(f"{target}: {address} is this host alone")
    raise ConfigError(
        f"no address found under which other hosts reach {socket.gethostname()} ({'; '.join(tried)}); "
        f"set MASTER_ADDR to an address of rank 0's host, or see to the network"
    )


def available_cores() -> int:
    """Returns how many cores this process may keep busy: its affinity, held down by the CPU quota of its cgroups."""
    affinity = len(os.sched_getaffinity(0))
    return int(min(affinity, max(1.0, _cgroup_quota_cores())))


def processor() -> str:
    """Returns the model name of this host's processors, or their architecture where the kernel tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def memory_bytes() -> int:
    """Returns the size of this host's physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_quota_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Returns the smallest CPU quota, in cores, on the way from this process's cgroup up to the root; inf if none."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup v2
            top = root
        elif "cpu" in controllers.split(","):
            top = root / controllers if (root / controllers).is_dir() else root / "cpu"
        else:
            continue
        group = top / path.lstrip("/")
        quotas += [_quota_of(each) for each in (group, *group.parents) if each == top or top in each.parents]
    return min(quotas)


def _quota_of(group: Path) -> float:
    """Reads "max 100000" or "150000 100000" (v2), or the two files of v1; inf where nothing limits."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota in ("max", "-1") else int(quota) / int(period)
