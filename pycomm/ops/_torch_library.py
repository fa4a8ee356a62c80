"""Loads the operator library that torch sees: the one built ahead of time, else one built on first use and cached."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ..errors import NativeUnavailableError
from . import _torch_build, native

__all__ = ["load_torch_library"]

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def load_torch_library() -> None:
    """Makes ``torch.ops.pycomm`` known to torch. The first use may take ten seconds, if it has to compile.

    torch keeps what it compiles under ``TORCH_EXTENSIONS_DIR`` (default ``~/.cache/torch_extensions``). Raises
    NativeUnavailableError.
    """
    kernels = native().reduce_kernels()
    built = sorted(_PACKAGE.glob("_torch_ops*.so"))
    try:
        path = str(built[0]) if built else _build()
        torch.ops.load_library(path)  # type: ignore[no-untyped-call, unused-ignore]
        ctypes.CDLL(path).pycomm_use_kernels(ctypes.c_void_p(kernels))
    except Exception as error:
        action = f"load {built[0]}" if built else "build pycomm's torch operators on first use"
        raise NativeUnavailableError(
            f"cannot {action}: {type(error).__name__}: {error}. It needs torch 2.11 or later and, to build, a C++ "
            "compiler and ninja (`pip install ninja`). To build ahead: `pip install -e . --no-build-isolation` in a "
            "checkout."
        ) from error


def _build() -> str:
    """Compiles the library, unless torch has it in its cache; returns its path."""
    from torch.utils import cpp_extension

    csrc = _torch_build.csrc_dir()
    with _ninja_on_path():
        path: str = cpp_extension.load(
            name="pycomm_torch_ops",
            sources=[str(path) for path in _torch_build.sources(csrc)],
            extra_cflags=list(_torch_build.CXX_FLAGS),
            extra_include_paths=[str(csrc)],
            is_python_module=False,
        )
    return path


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Lets torch find the ninja of this virtual environment, also when the environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
