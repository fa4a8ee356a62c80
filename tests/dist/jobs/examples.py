"""Runs the training examples one after the other in the ranks that a launcher started, each for a moment.

Their exit status says how well they learned, which a moment is too short for: here it only has to be one of theirs.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
SHORT = ["--steps", "2", "--batch", "4"]
JOBS = (("train_digits.py", ["--epochs", "1"]), ("train_gpt.py", SHORT), ("train_gpt_pipeline.py", SHORT))

sys.path.insert(0, str(EXAMPLES))  # as python does for a script; they share a file
for name, arguments in JOBS:
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, 1):
            raise
