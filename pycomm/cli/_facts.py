"""What the doctor finds out about installed packages, the launcher, the host and the environment."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..topology import memory_bytes, processor

__all__ = ["Fact", "chosen", "environment", "extras", "host", "installed", "launcher", "versions"]

MEMBARRIER_SYSCALL = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_PRIVATE_EXPEDITED = 1 << 3
# Asks the MPI library for its name before MPI_Init, in a process of its own: a broken MPI may abort its process.
MPI_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
EXTRAS = {
    "nccl4py": "cuda13",
    "prometheus-client": "monitor",
    "matplotlib": "plot",
    "scikit-learn": "examples",
}
# Read by setup.py alone, so they are not in the table of pycomm.env.
BUILD_VARIABLES = ("PYCOMM_CUDA",)


@dataclass(frozen=True)
class Fact:
    """One line of the report. ``value`` is None if the thing is not there; ``hint`` says why, or what to do."""

    name: str
    value: str | int | float | bool | None
    hint: str = ""


def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> list[Fact]:
    """Returns the versions of pycomm and of what it stands on."""
    facts = [
        Fact("pycomm", installed("pycomm"), "" if installed("pycomm") else "not installed: pip install -e ."),
        Fact("folder", str(Path(__file__).resolve().parents[1])),
        Fact("Python", f"{platform.python_version()} ({sys.executable})"),
        _torch_version(),
        Fact("NumPy", installed("numpy")),
    ]
    return [*facts, *_mpi()]


def _torch_version() -> Fact:
    try:
        import torch
    except Exception as error:
        return Fact("torch", None, f"{type(error).__name__}: {error}; pip install torch")
    cuda = getattr(torch.version, "cuda", None)
    return Fact("torch", f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU only'})")


def _mpi() -> list[Fact]:
    version = installed("mpi4py")
    if version is None:
        return [Fact("mpi4py", None, "pip install 'pycomm[mpi]' (uses the site's MPI) or 'pycomm[mpich]' (brings one)")]
    try:
        command = [sys.executable, "-c", MPI_PROBE]
        probe = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [Fact("mpi4py", version), Fact("MPI library", None, "did not answer within 20 s")]
    output = probe.stdout if probe.returncode == 0 else probe.stderr
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if probe.returncode != 0:
        hint = f"{lines[-1] if lines else 'no message'}; pip install 'pycomm[mpich]' brings an MPI"
        return [Fact("mpi4py", version), Fact("MPI library", None, hint)]
    name = " ".join(lines[0].replace("\t", " ").split()) if lines else "unnamed"
    return [Fact("mpi4py", version), Fact("MPI library", name), Fact("mpirun", _program("mpirun"))]


def _program(name: str) -> str | None:
    """Returns the path of a program beside this Python, or on PATH."""
    return shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


def extras() -> list[Fact]:
    """Returns the optional packages, each with the extra that adds it."""
    facts = []
    for distribution, extra in EXTRAS.items():
        version = installed(distribution)
        facts.append(Fact(distribution, version, "" if version else f"pip install 'pycomm[{extra}]'"))
    names = [name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if installed(name)]
    if not names:
        return [*facts, Fact("CuPy", None, "pip install 'pycomm[cupy13]' (beside a torch for CUDA 12: cupy12)")]
    return [*facts, *(Fact(name, installed(name)) for name in names)]


def launcher() -> list[Fact]:
    """Returns the launcher that ``pycomm.init`` would see in this environment."""
    from ..topology import detect_launch

    launch = detect_launch()
    plain = (str, int, float, bool)
    return [Fact(name, value if isinstance(value, plain) else str(value)) for name, value in vars(launch).items()]


def environment() -> list[Fact]:
    """Returns the ``PYCOMM_*`` variables of the table, with their defaults, and any that is set but unknown."""
    from .. import env

    facts = []
    for name, variable in env.VARIABLES.items():
        wrong = _why_refused(name)
        facts.append(Fact(name, os.environ.get(name), wrong or f"default {variable.default}: {variable.meaning}"))
    for name in sorted(os.environ):
        if name.startswith("PYCOMM_") and name not in env.VARIABLES:
            hint = "read by the build alone" if name in BUILD_VARIABLES else "not a variable of pycomm: misspelt?"
            facts.append(Fact(name, os.environ[name], hint))
    return facts


def _why_refused(name: str) -> str:
    """Returns what is wrong with a variable's value, "" if nothing is."""
    from .. import env
    from ..config import Config

    try:
        env.read(name)
        Config()
    except ConfigError as error:
        return f"cannot be used: {error}" if name in str(error) else ""
    return ""


def host() -> list[Fact]:
    """Returns what shared memory on this host depends on: cores, memory, /dev/shm, huge pages, membarrier."""
    try:
        affinity = sorted(os.sched_getaffinity(0))
    except AttributeError:
        affinity = []
    facts = [
        Fact("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Fact("CPU", processor()),
        Fact("cores", os.cpu_count()),
        Fact("cores of this process", _ranges(affinity)),
        Fact("memory", f"{memory_bytes() / 2**30:.1f} GiB"),
    ]
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
        facts.append(Fact("/dev/shm", text, "pycomm keeps nothing there"))
    huge = "/sys/kernel/mm/transparent_hugepage"
    return [
        *facts,
        Fact("THP for shared memory", chosen(f"{huge}/shmem_enabled"), "advise allows huge pages in shared segments"),
        Fact("THP", chosen(f"{huge}/enabled")),
        Fact("memfd_create", hasattr(os, "memfd_create")),
        Fact("pidfd_open", hasattr(os, "pidfd_open")),
        _membarrier(),
        _autogroup(),
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Writes ``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def chosen(path: str) -> str | None:
    """Returns the bracketed word of a sysfs switch: ``always [madvise] never`` -> ``madvise``."""
    try:
        words = Path(path).read_text().split()
    except OSError:
        return None
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def _autogroup() -> Fact:
    try:
        is_on = Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() != "0"
    except OSError:
        return Fact("autogroup", None)
    hint = "slows ranks that share cores under torchrun and MPICH's mpirun, not under pycomm run"
    return Fact("autogroup", is_on, hint if is_on else "")


def _membarrier() -> Fact:
    number = MEMBARRIER_SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return Fact("membarrier", None, f"not known for {platform.machine()}")
    commands = ctypes.CDLL(None, use_errno=True).syscall(number, 0, 0, 0)
    if commands < 0:
        return Fact("membarrier", False, os.strerror(ctypes.get_errno()))
    return Fact("membarrier", bool(commands & MEMBARRIER_PRIVATE_EXPEDITED))
