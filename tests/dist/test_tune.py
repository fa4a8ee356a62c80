"""``pycomm tune`` as a user runs it: it measures, stores a table, and the next job goes by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_tune_stores_a_table(tmp_path: Path) -> None:
    environ = {**os.environ, "PYCOMM_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    arguments = ["tune", "-n", "2", "--verbs", "all_reduce,broadcast", "-b", "4KiB", "-e", "1MiB", "-f", "256"]
    command = [sys.executable, "-m", "pycomm", *arguments, "--rounds", "2", "--round-ms", "1"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    assert "median error" in result.stdout and "stored in" in result.stdout
    (table,) = tmp_path.glob("*.table")
    rules = [line.split() for line in table.read_text().splitlines() if not line.startswith("#")]
    assert {rule[0] for rule in rules} == {"all_reduce", "broadcast"}
    assert all(rule[1:4] == ["shm", "2", "1"] for rule in rules)
    show = [sys.executable, "-m", "pycomm", "tune", "--show"]
    shown = subprocess.run(show, env=environ, capture_output=True, text=True, timeout=900, check=True)
    assert "# tuned" in shown.stdout
