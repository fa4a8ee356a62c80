"""Settings that all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Workers and ranks share the cores; a thread of OpenMP that waits for another one's share of an operator spins. What
# tests the kernels' threads asks for them. Before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# So that test modules, and the processes that they start, find harness.py.
sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run: a failure in CI is a failure here.
settings.register_profile("pycomm", deadline=None, derandomize=True)
settings.load_profile("pycomm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the three minutes of the soak begin first, and everything else is done beside it."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name != "test_soak.py")
