"""Starts the ranks of a job: ``pycomm run -n 2 script.py``, ``-m module``; understands all options of torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..launch.run import run_job

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that ``argv`` describes and returns its exit code."""
    return run_job(sys.argv[1:] if argv is None else argv)
