"""Where the native operators come from: ahead of time, built on first use, or nowhere, which is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm.errors import NativeUnavailableError
from pycomm.ops import _torch_library

FIRST_USE = """
import torch
import pycomm.ops._torch_library as library
library._PACKAGE = library.Path("/nonexistent")  # nothing was built ahead of time
from pycomm.ops.reduce import torch_ops
x = torch.arange(100.0)
assert torch.equal(torch_ops().reduce([x, x], 0, []), x + x)
"""


def test_first_use_builds_and_the_second_finds_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    built_at = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", FIRST_USE], env=environment, check=True, timeout=1500)
        (library,) = tmp_path.rglob("*.so")
        built_at.append(library.stat().st_mtime_ns)
    assert built_at[0] == built_at[1]


WITHOUT_CORE = """
import torch
import pycomm.ops._torch_library as library
torch.ops.load_library(str(next(library._PACKAGE.glob("_torch_ops*.so"))))
try:
    torch.ops.pycomm.reduce([torch.ones(3)], 0, [])
except RuntimeError as error:
    print(error)
"""


def test_the_library_alone_says_where_its_kernels_are() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_CORE], stdout=subprocess.PIPE, text=True, check=True)
    assert "load this library by pycomm.ops" in result.stdout


def test_a_build_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(_torch_library, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_torch_library, "_build", fail)
    with pytest.raises(NativeUnavailableError, match=r"Ninja is required.*pip install"):
        _torch_library.load_torch_library.__wrapped__()


def test_a_library_that_is_broken_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_torch_ops.abi3.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_torch_library, "_PACKAGE", tmp_path)
    with pytest.raises(NativeUnavailableError, match=str(broken)):
        _torch_library.load_torch_library.__wrapped__()
