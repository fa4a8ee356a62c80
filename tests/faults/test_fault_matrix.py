"""One rank of four dies, in every way and at every moment: the others raise, name it, and go on without it."""

from __future__ import annotations

import pytest
from laws import DEATHS, MPI, RANKS, TRANSPORTS, VICTIM, survive

from harness import run_ranks


@pytest.mark.parametrize("when", DEATHS)
@pytest.mark.parametrize("how", ["kill", "segv", "exit"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_name_the_dead_rank_and_go_on_without_it(transport: str, how: str, when: str) -> None:
    run_ranks(RANKS, survive, how, when, transport=transport, casualties=[VICTIM])


@pytest.mark.parametrize("when", ["before", "while a peer waits"])
@pytest.mark.parametrize("transport", MPI)
def test_survivors_name_the_dead_rank_also_under_mpi(transport: str, when: str) -> None:
    """Of a rank that exits: MPICH's launchers end all the others within moments of one that a signal killed."""
    run_ranks(RANKS, survive, "exit", when, transport=transport, casualties=[VICTIM])
