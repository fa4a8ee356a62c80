"""What the doctor finds out about pycomm's own native parts, and about CUDA and NCCL."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from ._facts import Fact

__all__ = ["built", "cuda"]

PACKAGE = Path(__file__).resolve().parents[1]
# A path, not the name: on PyPI that is another project's.
REBUILD = (
    "pip install -e . --no-build-isolation (in a checkout), or "
    "pip install --force-reinstall --no-deps PATH-OF-CHECKOUT-OR-WHEEL"
)


def built() -> list[Fact]:
    """Returns which native parts are there, and for those that are not, why, and the command that adds them."""
    return [*_native(), _torch_ops()]


def _native() -> list[Fact]:
    try:
        native = importlib.import_module("pycomm._native")
    except ModuleNotFoundError as error:
        return [Fact("native core", None, f"not built ({error}); {REBUILD}")]
    except Exception as error:
        return [Fact("native core", None, f"broken: {type(error).__name__}: {error}; {REBUILD}")]
    archs = getattr(native, "cuda_archs", None)
    isa = getattr(native, "cpu_isa", None)
    return [
        Fact("native core", str(native.__file__)),
        Fact("CPU kernels", isa() if callable(isa) else isa),
        Fact("CUDA kernels", archs or None, "" if archs else _why_no_cuda()),
    ]


def _why_no_cuda() -> str:
    nvcc = _nvcc()
    if nvcc is None:
        return "built without nvcc; install the CUDA toolkit, then CUDA_HOME=/usr/local/cuda PYCOMM_CUDA=1 " + REBUILD
    return f"built without CUDA, but nvcc is there now ({nvcc}); PYCOMM_CUDA=1 {REBUILD}"


def _torch_ops() -> Fact:
    libraries = sorted(PACKAGE.glob("_torch_ops*.so"))
    if libraries:
        return Fact("torch operators", str(libraries[0]), "built ahead of time")
    hint = "not built ahead of time (torch was not there then); built on first use"
    if not (shutil.which("g++") or shutil.which("c++")):
        hint += ", which needs a C++ compiler: apt install g++"
    return Fact("torch operators", None, hint)


def cuda() -> list[Fact]:
    """Returns the driver, nvcc and NCCL of this machine, and the GPUs that torch sees."""
    facts = [
        Fact("driver", _driver()),
        Fact("nvcc", _nvcc_version(), "" if _nvcc() else "only the build needs it; set CUDA_HOME if it is installed"),
        *_nccl(),
    ]
    try:
        import torch
    except Exception:
        return facts
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [*facts, Fact("GPUs", ", ".join(names) or None)]


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", first)
    return match[1] if match else first


def _nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and os.path.isfile(os.path.join(home, "bin", "nvcc")):
            return os.path.join(home, "bin", "nvcc")
    return shutil.which("nvcc")


def _nvcc_version() -> str | None:
    nvcc = _nvcc()
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"release ([\d.]+)", text)
    return f"{match[1] if match else 'unknown version'} ({nvcc})"


def _nccl() -> list[Fact]:
    path = _nccl_path()
    if path is None:
        return [Fact("NCCL", None, "comes with a torch that is built for CUDA")]
    try:
        number = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return [Fact("NCCL", None, f"{path} does not load: {error}")]
    code = number.value
    return [Fact("NCCL", f"{code // 10000}.{code % 10000 // 100}.{code % 100} ({path})")]


def _nccl_path() -> str | None:
    """Returns the libnccl of the wheel that torch brings, else the system's; loads nothing."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("lib/libnccl.so*"))
        if found:
            return str(found[0])
    from ctypes.util import find_library

    return find_library("nccl")
