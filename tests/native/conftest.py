"""What the native tests share."""

from __future__ import annotations

import pytest
from native_build import Build, builder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds programs in C++ for the whole session; see native_build."""
    return builder(tmp_path_factory.mktemp("native"))
