"""Random models trained at random: ``trainings.py``, ``pipelines.py`` and ``tensor_trainings.py``.

They also run by themselves, at length.
"""

from __future__ import annotations

import pytest

from engines import losses, pipelines, tensor_trainings, trainings
from harness import run_ranks


@pytest.mark.parametrize(("ranks", "transport", "number"), [(2, "shm", 12), (3, "shm", 12), (4, "mixed", 8)])
def test_random_trainings_equal_one_process(ranks: int, transport: str, number: int) -> None:
    run_ranks(ranks, trainings.trainings, range(1000 * ranks, 1000 * ranks + number), transport=transport)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_pipelines_equal_one_process(ranks: int) -> None:
    run_ranks(ranks, pipelines.pipelines, range(1000 * ranks, 1000 * ranks + 8))


@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (3, 4), (4, 8)])
def test_random_trainings_of_cut_models_equal_one_process(ranks: int, number: int) -> None:
    run_ranks(ranks, tensor_trainings.trainings, range(1000 * ranks, 1000 * ranks + number))


@pytest.mark.parametrize(
    ("kind", "transport", "seed", "how"),
    [("trainings", "shm", 25985, "killed"), ("tensor", "torch", 1, "leaves"), ("pipelines", "mixed", 3, "interrupted")],
)
def test_trainings_end_where_a_rank_is_lost(kind: str, transport: str, seed: int, how: str) -> None:
    losses.run(4, kind, seed, transport, how)
