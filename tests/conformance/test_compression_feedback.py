"""Nothing that a stateful compressor is given is lost, or arrives twice, or at another place."""

from __future__ import annotations

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import compression
from pycomm.collectives.auto_compression import STATEFUL, TRIAL_CALLS, WARM_UP_CALLS
from pycomm.collectives.context import resolve
from pycomm.compression import CODECS, parse

NUMEL = 97  # of each rank's part
STEPS = 3


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-50, 51, (NUMEL * pycomm.world_size(),), generator=generator).float()


# -- reduce_scatter: each chunk is decoded as it was encoded ----------------------------------------------------------


def scatter_by_all(rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    rows = []
    for name in CODECS.names():
        compressor = compression.error_feedback(parse(name))
        if not compressor.is_for_vectors:
            continue
        total, given = torch.zeros(NUMEL), torch.zeros(NUMEL * pycomm.world_size())
        for step in range(STEPS):
            part = torch.empty(NUMEL)
            pycomm.reduce_scatter_single(part, inputs(rank, step), compression=compressor, name="w")
            total += part
            given += inputs(rank, step)
        rows.append((name, total, given, compressor.residual("w")))
    return rows


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_scattered_and_what_is_owed_is_the_input(world_size: int) -> None:
    outcomes = run_ranks(world_size, scatter_by_all, transport="local")
    for row in zip(*outcomes, strict=True):
        total = torch.cat([each[1] for each in row])
        given, owed = sum(each[2] for each in row), sum(each[3] for each in row)
        assert (total + owed - given).abs().max() <= 1e-2, row[0][0]  # what float32 rounds


def gather_nothing(rank: int) -> None:
    for name in CODECS.names():
        if parse(name).is_for_gathers:
            pycomm.all_gather_single(torch.empty(0), torch.empty(0), compression=name, name="empty")


def test_nothing_is_gathered_of_nothing() -> None:
    run_ranks(2, gather_nothing, transport="local")


# -- an inf or NaN is passed on once ----------------------------------------------------------------------------------


def overflow_once(rank: int, spec: str, value: float) -> tuple[bool, bool, float]:
    """Returns whether the bad call told, whether a later one did, and how far the last is from its input's sum."""
    kept = parse(spec)
    finite = []
    for step in range(40):
        tensor = torch.linspace(-1, 1, 48).view(6, 8) * (rank + 1)
        exact = torch.linspace(-1, 1, 48).view(6, 8) * 3
        if step == 3 and rank == 0:
            tensor[2, 3] = value
        pycomm.all_reduce(tensor, compression=kept, name="w")
        finite.append(bool(tensor.isfinite().all()))
    buffers = kept.state_dict()["error_feedback"]
    assert all(each.isfinite().all() for part in buffers.values() for each in part.values())
    return not finite[3], all(finite[4:]), float((tensor - exact).abs().max())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("spec", ["int8+ef21", "topk:0.5+ef21", "randomk:0.5+ef21", "sign+ef21:m=0.5", "int8+ef"])
def test_what_is_not_finite_stays_in_no_estimate(spec: str, value: float) -> None:
    told = run_ranks(2, overflow_once, spec, value, transport="local")
    assert told[0] == told[1]
    tells, recovers, error = told[0]
    assert recovers
    assert tells
    assert error < 0.2


# -- nothing drifts away ----------------------------------------------------------------------------------------------


def drift(rank: int, spec: str) -> float:
    """Returns how far what came in 300 calls is from what was given and is not owed; EF21: the last, from the
    estimates.
    """
    kept = parse(spec)
    generator = torch.Generator().manual_seed(rank)
    given, came = torch.zeros(1024), torch.zeros(1024)
    for _ in range(300):
        tensor = torch.randn(32, 32, generator=generator)
        given += tensor.view(-1)
        pycomm.all_reduce(tensor, compression=kept, name="w")
        came += tensor.view(-1)
    expected = kept.residual("w") if "ef21" in spec else given - kept.residual("w")
    pycomm.all_reduce(expected)
    return float(((tensor.view(-1) if "ef21" in spec else came) - expected).abs().max())


@pytest.mark.parametrize("spec", ["bf16+ef", "bf16+ef21"])
def test_what_16_bit_sums_would_round_is_not_lost(spec: str) -> None:
    for distance in run_ranks(3, drift, spec, transport="local"):
        assert distance < 1e-3


# -- what "auto" gives up pays what it owes ---------------------------------------------------------------------------


def give_up(rank: int, spec: str) -> tuple[float, float]:
    """Returns how much of what this rank gave to "auto" never arrived, before and after that goes back to none."""
    numel, calls = 40_000, WARM_UP_CALLS + TRIAL_CALLS
    compressor = resolve(None).compression
    missing = torch.zeros(numel)
    shares = []
    for step in range(calls + 2):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))
        exact = tensor.clone()
        pycomm.all_reduce(exact)
        pycomm.all_reduce(tensor, compression="auto", name="w")
        missing += exact - tensor
        (kind,) = compressor._auto._kinds.values()
        if step == WARM_UP_CALLS - 1:  # as if a slow wire had been measured, which then proves to be fast
            assert kind.decision is not None
            kind.decision = kind.decision._replace(chosen=spec, measured_s=0.0)
        if step >= calls - 1:
            assert kind.decision is not None and kind.decision.chosen == "none"
            shares.append(float(missing.norm() / exact.norm()))
    assert not compressor.compressor(spec).state_dict()["error_feedback"]["residuals"]
    return shares[0], shares[-1]


@pytest.mark.parametrize("spec", STATEFUL)
def test_what_auto_gives_up_pays_what_it_owes(spec: str) -> None:
    for owed, left in run_ranks(2, give_up, spec, transport="local"):
        assert owed > 0.05
        assert left < 1e-5


def test_a_codec_that_sends_more_than_its_input_takes_no_feedback() -> None:
    for text in ("randomk:0.1,is_unbiased=true+ef", "randomk:0.1,is_unbiased=true+dgc"):
        with pytest.raises(pycomm.ConfigError, match="leave is_unbiased out"):
            parse(text)
