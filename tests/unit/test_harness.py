"""The harness itself: what it reports when ranks fail, die or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from harness import RanksFailed, run_ranks


def double(rank: int, factor: int) -> torch.Tensor:
    return torch.tensor([rank * factor])


def misbehave(rank: int, how: str) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("from rank 1")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        time.sleep(100)
    return rank


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_results_by_rank(transport: str) -> None:
    assert run_ranks(3, double, 10, transport=transport) == [torch.tensor([0]), torch.tensor([10]), torch.tensor([20])]


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_tracebacks_are_tagged(transport: str) -> None:
    with pytest.raises(RanksFailed, match="misbehave on 2 ranks over .*: 1 ranks failed") as caught:
        run_ranks(2, misbehave, "raise", transport=transport)
    assert "[rank 1] Traceback" in str(caught.value) and "ValueError: from rank 1" in str(caught.value)
    assert "[rank 0]" not in str(caught.value)


def test_a_death_is_told() -> None:
    with pytest.raises(RanksFailed, match=r"\[rank 1\] died without a result, exit code -9"):
        run_ranks(2, misbehave, "die", transport="torch")


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_a_hang_shows_its_stack(transport: str) -> None:
    with pytest.raises(RanksFailed, match=r"\[rank 1\] still running") as caught:
        run_ranks(2, misbehave, "hang", transport=transport, timeout_s=1.0)
    assert "in misbehave" in str(caught.value)
