"""Settings that all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# So that test modules, and the processes that they start, find harness.py.
sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run: a failure in CI is a failure here.
settings.register_profile("pycomm", deadline=None, derandomize=True)
settings.load_profile("pycomm")
