"""Settings that all tests share."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Workers and ranks share the cores; a thread of OpenMP that waits for another one's share of an operator spins. What
# tests the kernels' threads asks for them. Before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's TCPStore asks the name server for the name of every address that it connects or listens to. A question that
# is lost takes the five seconds after which the resolver asks again; hundreds of worlds lose many.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell starts what runs in its background with SIGINT ignored, and so would be all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# So that test modules, and the processes that they start, find harness.py.
sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run: a failure in CI is a failure here.
settings.register_profile("pycomm", deadline=None, derandomize=True)
settings.load_profile("pycomm")


# The files that take a worker minutes, the longest first: begun last, one of them would be all that still runs.
LONGEST = (
    "test_soak.py",
    "test_launchers.py",
    "test_exits.py",
    "test_model.py",
    "test_shm_protocol.py",
    "test_kernels.py",
    "test_algorithms.py",
    "test_two_hosts.py",
    "test_torch_backend.py",
    "test_build.py",
    "test_waits.py",
    "test_verbs.py",
    "test_compression.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, each of which has a file at a time, the longest files begin first."""
    if hasattr(config, "workerinput"):
        turn = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: turn.get(item.path.name, len(LONGEST)))
