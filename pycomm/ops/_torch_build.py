"""What the operator library that torch sees is made of: one list for setup.py (ahead of time) and for first use.

The library stays on torch's stable ABI, so one ``_torch_ops.abi3.so`` serves torch 2.11 and later. setup.py loads this
file by its path, before torch or numpy are there: it imports neither, and nothing of pycomm.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CXX_FLAGS", "csrc_dir", "sources"]

CXX_FLAGS = (
    "-O2",
    "-g0",  # Python's own flags ask for debug information
    "-fvisibility=hidden",
    "-Wall",  # no -Wextra -Werror as in the core: torch's headers would not pass
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # 2.11: what is newer than that is not declared
)


def csrc_dir() -> Path:
    """Returns where the native sources are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def sources(csrc: Path) -> list[Path]:
    """Returns the C++ files of the library; the kernels are not among them, the core hands those over."""
    return [csrc / "bindings" / "torch_ops.cpp"]
