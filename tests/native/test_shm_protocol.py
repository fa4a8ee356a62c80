"""The shared-memory protocol, and streams on it, in C++, under the sanitizers: ranks are threads on one segment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_build import Build

from harness import with_small_shm

HERE = Path(__file__).parent
# A length that no memory holds must reach the code under test as bad_alloc. Leaks would be looked for by ptrace, which
# containers forbid.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "TSAN_OPTIONS": "allocator_may_return_null=1"}


def build_program(build: Build, sanitizer: str) -> Path:
    return build("shm_test", sanitizer, [HERE / "unit_shm.cpp", HERE / "unit_shm_tests.cpp"])


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_no_report(build: Build, sanitizer: str) -> None:
    program = build_program(build, sanitizer)
    result = subprocess.run(
        [program], env={**os.environ, **OPTIONS}, capture_output=True, text=True, timeout=1500, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
    assert " checks, 0 failures" in result.stdout and not result.stdout.startswith("0 checks")


def test_a_full_file_system_is_an_error_with_the_size(build: Build) -> None:
    program = build_program(build, "address")
    result = subprocess.run(
        with_small_shm([str(program), "/dev/shm/segment"]),
        env={**os.environ, **OPTIONS},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checks, 0 failures" in result.stdout
