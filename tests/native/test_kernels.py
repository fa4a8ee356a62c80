"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, driven from C++."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from native_build import ROOT, Build

from pycomm.ops.reduce import reduce_supported
from pycomm.types import DTYPES, ReduceOp

KERNELS = ROOT / "csrc/kernels/cpu"


def run_program(program: Path) -> str:
    # Looking for leaks needs ptrace; the kernels allocate nothing.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_reduce_under_the_sanitizers(build: Build) -> None:
    sources = [KERNELS / "isa.cpp", *sorted(KERNELS.glob("reduce*.cpp")), Path(__file__).with_name("reduce_test.cpp")]
    pairs = sum(reduce_supported(getattr(torch, dtype.name), op) for dtype in DTYPES for op in ReduceOp)
    assert f"{pairs} pairs of dtype and operator, 0 failures" in run_program(build("reduce_test", "address", sources))


def test_codecs_under_the_sanitizers(build: Build) -> None:
    sources = [*sorted(KERNELS.glob("*.cpp")), Path(__file__).with_name("codec_test.cpp")]
    printed = run_program(build("codec_test", "address", sources))
    assert "1000000 damaged payloads, 0 failures" in printed


def test_cuda_kernels_on_a_cpu_give_the_bits_of_the_cpu_kernels(build: Build) -> None:
    """What fake_cuda/cuda_runtime.h says: it finds mistakes in the logic, not those that only a GPU makes."""
    kernels = [*sorted(KERNELS.glob("*.cpp")), *sorted((ROOT / "csrc/kernels/cuda").glob("*.cu"))]
    printed = run_program(build("cuda_test", "address", [*kernels, Path(__file__).with_name("cuda_test.cpp")]))
    assert " checks, 0 failures" in printed
