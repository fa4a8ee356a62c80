"""Loads the operator library that torch sees: the one built ahead of time, else one built on first use and cached."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ..errors import NativeUnavailableError
from . import _torch_build

__all__ = ["load_torch_library"]

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def load_torch_library() -> None:
    """Makes ``torch.ops.pycomm`` known to torch. The first use may take half a minute, if it has to compile.

    torch keeps what it compiles under ``TORCH_EXTENSIONS_DIR`` (default ``~/.cache/torch_extensions``). Raises
    NativeUnavailableError.
    """
    built = sorted(_PACKAGE.glob("_torch_ops*.so"))
    try:
        if built:
            torch.ops.load_library(str(built[0]))  # type: ignore[no-untyped-call, unused-ignore]
        else:
            _build()
    except Exception as error:
        action = f"load {built[0]}" if built else "build pycomm's torch operators on first use"
        raise NativeUnavailableError(
            f"cannot {action}: {type(error).__name__}: {error}. It needs torch 2.11 or later and, to build, a C++ "
            "compiler and ninja (`pip install ninja`). To build ahead: `pip install -e . --no-build-isolation` in a "
            "checkout."
        ) from error


def _build() -> None:
    from torch.utils import cpp_extension

    csrc = _torch_build.csrc_dir()
    with _ninja_on_path():
        cpp_extension.load(
            name="pycomm_torch_ops",
            sources=[str(path) for path in _torch_build.sources(csrc)],
            extra_cflags=list(_torch_build.CXX_FLAGS),
            extra_include_paths=[str(csrc)],
            is_python_module=False,
        )


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Lets torch find the ninja of this virtual environment, also when the environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
