"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, driven from C++."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pycomm.ops.reduce import reduce_supported
from pycomm.types import DTYPES, ReduceOp

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# -O1 keeps the build short; no contraction, as in the real build.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", *SANITIZE, f"-I{ROOT / 'csrc'}"]


def build(sources: list[Path], directory: Path) -> Path:
    """Compiles, two files at a time, and links."""
    compiler = os.environ.get("CXX", "g++")

    def compile_one(source: Path) -> str:
        output = str(directory / f"{source.stem}.o")
        subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", output], check=True, timeout=250)
        return output

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = directory / "reduce_test"
    subprocess.run([compiler, *SANITIZE, *objects, "-o", str(program)], check=True, timeout=250)
    return program


@pytest.mark.timeout(600)
def test_reduce_under_the_sanitizers(tmp_path: Path) -> None:
    sources = [*sorted((ROOT / "csrc/kernels/cpu").glob("*.cpp")), Path(__file__).with_name("reduce_test.cpp")]
    program = build(sources, tmp_path)
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # looking for leaks needs ptrace; reduce allocates none
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=250, check=False)
    pairs = sum(reduce_supported(getattr(torch, dtype.name), op) for dtype in DTYPES for op in ReduceOp)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{pairs} pairs of dtype and operator, 0 failures" in result.stdout
