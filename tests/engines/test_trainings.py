"""Random models trained at random (``trainings.py``, which also runs by itself, at length)."""

from __future__ import annotations

import pytest

from engines import trainings
from harness import run_ranks


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (3, "shm"), (4, "mixed")])
def test_random_trainings_equal_one_process(ranks: int, transport: str) -> None:
    run_ranks(ranks, trainings.trainings, range(1000 * ranks, 1000 * ranks + 30), transport=transport)
