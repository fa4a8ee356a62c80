"""A short soak always, a long one where slow tests run; hours of it by hand: ``python tests/faults/soak.py --help``."""

from __future__ import annotations

import random

import pytest
from soak import soak

STUCK_S = 240.0  # for hangs alone: the longest time between two steps was a fiftieth of it on two busy cores


def run(seed: int, duration_s: float) -> None:
    print(f"seed {seed}")
    try:
        done = soak(seed, duration_s, STUCK_S)
    except AssertionError as error:
        raise AssertionError(f"seed {seed} (python tests/faults/soak.py --seed {seed}): {error}") from error
    print(done)
    assert done["steps"] > 0 and done["kill"] > 0 and done["generations"] > 1


def test_ranks_that_are_killed_and_started_again_finish_their_work() -> None:
    run(1, 6.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_minutes_of_kills_stops_and_rejoins() -> None:
    run(random.SystemRandom().randrange(1 << 32), 180.0)
