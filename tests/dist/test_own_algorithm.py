"""The example of an algorithm in one file, as its users start it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from warm_python import warm_python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py"


def test_the_example() -> None:
    command = [warm_python(), "-m", "pycomm", "run", "-n", "3", str(EXAMPLE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    assert "proven for 2 to 16 ranks" in result.stdout
    assert all(f"rank {rank}: {[6.0] * 5}" in result.stdout for rank in range(3))
