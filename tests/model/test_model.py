"""The flag protocol of shared memory, proven for three ranks by SPIN, and the proof of the proof: every bug that is
planted is found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("barrier.pml")

# Slots are used again two calls later; a kill and a timeout meet every step of a call.
PROVEN = ["CALLS=3 KILLS=0", "CALLS=2 KILLS=0 TIMEOUTS=1", "CALLS=2 KILLS=1", "CALLS=1 KILLS=2"]
PLANTED = [
    "CALLS=2 KILLS=0 BUG_NO_BARRIER",
    "CALLS=2 KILLS=0 BUG_NO_LAST_LOOK",
    "CALLS=2 KILLS=0 BUG_NO_WAKE",
    "CALLS=3 KILLS=0 BUG_ONE_SLOT",
    "CALLS=1 KILLS=1 BUG_UNCHECKED_DEATH",
    "CALLS=2 KILLS=0 TIMEOUTS=1 BUG_UNSEEN_FAILURE",
]


def count_errors(settings: str, folder: Path, *options: str) -> int:
    """Checks the model exhaustively, to the first error; returns how many there are, 0 or 1. ``options`` are gcc's."""
    if shutil.which("spin") is None:
        assert not os.environ.get("CI"), "CI must check the model: apt install spin"
        pytest.skip("SPIN, the model checker, is not installed: apt install spin")
    definitions = [f"-D{each}" for each in settings.split()]
    subprocess.run(["spin", "-a", *definitions, str(MODEL)], cwd=folder, check=True, capture_output=True, timeout=1500)
    compiler = os.environ.get("CC", "gcc")
    flags = [*options, "-w", "-DSAFETY", "-DVECTORSZ=2048", "-DMEMLIM=4000"]  # in MiB; -DCOLLAPSE would take longer
    subprocess.run([compiler, *flags, "-o", "pan", "pan.c"], cwd=folder, check=True, timeout=1500)
    # States are looked up all over a gigabyte: few a bucket (of 2^25), and in huge pages.
    command, environ = ["./pan", "-m1000000", "-w25"], {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    found = re.search(r"depth reached \d+, errors: (\d+)", result.stdout)
    assert found is not None, result.stdout + result.stderr
    errors = int(found[1])
    assert errors or "Search not completed" not in result.stdout, result.stdout
    return errors


@pytest.mark.parametrize("settings", PROVEN)
def test_every_interleaving_is_right(settings: str, tmp_path: Path) -> None:
    assert count_errors(settings, tmp_path, "-O2") == 0


@pytest.mark.parametrize("settings", PLANTED)
def test_a_planted_bug_is_found(settings: str, tmp_path: Path) -> None:
    assert count_errors(settings, tmp_path, "-O0") == 1  # found before the compiler has optimised
