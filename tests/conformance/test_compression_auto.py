"""``compression="auto"``: what it decides, that all ranks decide alike, and calls that no compressor takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import fingerprint

import pycomm
from harness import run_ranks
from pycomm import ConfigError, PlanError, ReduceOp, compression
from pycomm.algorithms.executor import Collective
from pycomm.collectives import auto_compression, group_compression
from pycomm.collectives.auto_compression import STATEFUL, STATELESS, WARM_UP_CALLS, _decide
from pycomm.collectives.compressed import Squeezed
from pycomm.collectives.context import resolve
from pycomm.compression import parse


class Clock(threading.local):
    """A clock of each thread's own, which stands still but for what it is told: a busy machine moves the real one."""

    now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(self.perf_counter() * 1e9)


CLOCK = Clock()
TIMED = (auto_compression, group_compression)


def slow_link(rank: int, seconds_per_byte: float, seconds_per_payload: float) -> list[str]:
    """auto on a link whose time is known: ordinary collectives cost one thing a byte, payloads may cost more."""
    for module in TIMED:
        vars(module)["time"] = CLOCK  # as the test has done for its own process
    group = resolve(None)
    run = group.engine.run

    def delayed(call: Any, *arguments: Any) -> None:
        if call.input is not None and call.input.numel() > 1000:
            is_payload = call.input.dtype != torch.float32
            CLOCK.now_s += call.input.nbytes * seconds_per_byte + seconds_per_payload * is_payload
        run(call, *arguments)

    group.engine.run = delayed
    results = []
    for step in range(WARM_UP_CALLS + 5):
        tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(rank + 10 * step))
        pycomm.all_reduce(tensor, compression="auto")
        results.append(str(fingerprint(tensor)))
    small = torch.ones(10)
    pycomm.all_reduce(small, compression="auto")
    assert torch.equal(small, torch.full((10,), float(pycomm.world_size())))
    return results + [str(decision) for decision in group.compression.decisions]


@pytest.fixture
def told_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in TIMED:
        monkeypatch.setattr(module, "time", CLOCK)


@pytest.mark.usefixtures("told_time")
@pytest.mark.parametrize("transport", ["local", "torch"])
def test_auto_compresses_where_the_link_is_slow(transport: str) -> None:
    told = run_ranks(2, slow_link, 5e-7, 0.0, transport=transport)
    assert told[0] == told[1]
    assert ": int8, because it takes" in told[0][-2]
    assert "pass name= to allow those with error feedback" in told[0][-2]
    assert ": none, because it is below 65536 bytes" in told[0][-1]


@pytest.mark.usefixtures("told_time")
def test_auto_goes_back_to_none_where_a_prediction_was_wrong() -> None:
    told = run_ranks(2, slow_link, 5e-7, 1.0, transport="local")
    assert told[0] == told[1]
    assert ": none, because int8 really took" in told[0][-2]


def auto_of_what_no_compressor_takes(rank: int) -> None:
    ranks = pycomm.world_size()
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.bool):
        tensor = torch.ones(30_000, dtype=dtype)
        pycomm.all_reduce(tensor, compression="auto", name="w")
        assert torch.equal(tensor, torch.full_like(tensor, ranks))
        assert f"got {dtype}" in str(pycomm.explain("all_reduce", 30_000, dtype, compression="auto"))
    tensor = torch.full((30_000,), rank + 0.1)
    for _ in range(WARM_UP_CALLS + 1):
        pycomm.all_reduce(tensor, ReduceOp.MAX, compression="auto", name="w")
    assert torch.equal(tensor, torch.full_like(tensor, ranks - 1 + 0.1))
    assert "got MAX" in str(pycomm.explain("all_reduce", 30_000, op=ReduceOp.MAX, compression="auto"))
    pieces = [torch.empty(each + 1) for each in range(ranks)]  # of lengths that differ: broadcasts
    pycomm.all_gather(pieces, torch.full((rank + 1,), float(rank)), compression="auto")
    assert [piece.tolist() for piece in pieces] == [[float(each)] * (each + 1) for each in range(ranks)]
    ddp = pycomm.DistributedDataParallel(torch.nn.Linear(3, 1).double(), compression="auto")
    ddp(torch.full((1, 3), rank, dtype=torch.float64)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[(ranks - 1) / 2] * 3]


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_auto_is_for_all_calls_also_those_that_no_compressor_takes(transport: str) -> None:
    run_ranks(3, auto_of_what_no_compressor_takes, transport=transport)


def test_auto_leaves_a_fast_link_alone() -> None:
    flat = torch.ones(1_000_000)
    collective = Collective(verb="all_reduce", input=flat, output=flat, op=ReduceOp.SUM)
    call = Squeezed(collective, parse("none"), (compression.Part("w", (1_000_000,)),))
    wire: Any = SimpleNamespace(inside=None, between=None, world_size=4)
    codec_s = [1e-9, 1e-9] * 4  # a nanosecond an element, to encode and to decode
    decision = _decide(call, wire, (*STATELESS, *STATEFUL), [0.001, 0.0, *codec_s])
    assert ": none, because the best compressor would take" in str(decision)
    assert [each.spec for each in decision.candidates] == ["bf16", "int8", "int4+ef", "topk:0.01+ef"]
    decision = _decide(call, wire, (*STATELESS, *STATEFUL), [1.0, 0.0, *codec_s])
    assert ": topk:0.01+ef, because it takes" in str(decision)


def decide_here(rank: int) -> str:
    assert "has not decided" in str(pycomm.explain("all_reduce", 100_000, compression="auto"))
    for _ in range(WARM_UP_CALLS + 2):
        pycomm.all_reduce(torch.ones(100_000), compression="auto", name="w")
    decision = str(resolve(None).compression.decisions[0])
    assert decision in str(pycomm.explain("all_reduce", 100_000, compression="auto"))
    assert "has not decided" in str(pycomm.explain("all_reduce", 99_999, compression="auto"))
    assert "format=int8" in str(pycomm.explain("all_reduce", 100_000, compression="int8"))
    with pytest.raises(ConfigError, match="unknown compression 'int9'"):
        pycomm.explain("all_reduce", 100_000, compression="int9")
    return decision


def test_auto_decides_alike_on_all_ranks() -> None:
    told = run_ranks(3, decide_here, transport="shm")
    assert told[0] == told[1] == told[2]


def decide_for_an_algorithm(rank: int) -> list[str]:
    numel, chosen = 100_000, []
    for algorithm in ("tree", "ring"):
        for _ in range(WARM_UP_CALLS + 2):
            tensor = torch.full((numel,), rank + 1.0)
            pycomm.all_reduce(tensor, compression="auto", name="w", algorithm=algorithm)
            assert torch.allclose(tensor, torch.full((numel,), 3.0), rtol=0.05)
        decision = resolve(None).compression.decisions[-1]
        chosen.append([each.spec for each in decision.candidates])
    with pytest.raises(PlanError, match="tree has no plan of all_gather_single"):
        pycomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), compression="auto", algorithm="tree")
    return [" ".join(each) for each in chosen]


@pytest.mark.usefixtures("told_time")  # as a busy machine once made it decide for topk, whose sums are sparse
def test_auto_takes_only_what_the_algorithm_that_is_asked_for_can_carry() -> None:
    told = run_ranks(2, decide_for_an_algorithm, transport="local")
    assert told == [["bf16", "bf16 int8 int4+ef topk:0.01+ef"]] * 2
