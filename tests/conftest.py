"""Settings that all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# So that test modules, and the processes that they start, find harness.py.
sys.path.insert(0, str(Path(__file__).parent))

_PLACE = pytest.StashKey[int]()

# The same examples in every run: a failure in CI is a failure here.
settings.register_profile("pycomm", deadline=None, derandomize=True)
settings.load_profile("pycomm")


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers a file is one worker's, but for what runs under mpirun: that is one worker's from all files,
    since worlds of MPI stay and starting one costs seconds of every rank. It begins first, with the soak's three
    minutes; everything else is done beside them.
    """
    if not hasattr(config, "workerinput"):
        return
    places = {"test_soak.py": 0, "mpi": 1}
    for item in items:
        group = "mpi" if item.get_closest_marker("mpi") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        place = "mpi" if group == "mpi" else item.path.name
        item.stash[_PLACE] = places.get(place, 2)
    items.sort(key=lambda item: item.stash[_PLACE])
