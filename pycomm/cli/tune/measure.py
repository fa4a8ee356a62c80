"""Times calls that all ranks of a group make together, in turns, after checking what each of them gives.

[Note: what a time is]
Every algorithm is called once to warm up, and once to learn how many calls fill its turn. Then the algorithms take
turns, round after round; another one goes first in each. A turn begins at a barrier; its time is that of the slowest
rank, divided by the calls. The time of an algorithm is its median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from ...algorithms.engine import Engine
from ...algorithms.executor import Collective
from ...collectives.group import Group
from ...types import ReduceOp

__all__ = ["Call", "is_right", "make_call", "most", "time_in_turns"]

Call = Callable[[], None]

_MAX_CALLS = 500
_REDUCES = ("all_reduce", "reduce", "reduce_scatter_single")
_TIMEOUT_S = 60.0


def time_in_turns(group: Group, calls: Mapping[str, Call], rounds: int, turn_ms: float) -> dict[str, list[float]]:
    """Returns the seconds a call of each of ``calls`` takes, one figure a round: alike on all ranks."""
    for call in calls.values():
        call()
    estimates_s = most(group, [_turn(group, call, 1) for call in calls.values()])
    counts = [min(_MAX_CALLS, max(1, round(turn_ms / 1e3 / max(estimate, 1e-7)))) for estimate in estimates_s]
    names, mine = list(calls), [[0.0] * rounds for _ in calls]
    for number in range(rounds):
        for step in range(len(names)):
            at = (number + step) % len(names)
            mine[at][number] = _turn(group, calls[names[at]], counts[at])
    slowest = torch.tensor(most(group, sum(mine, [])), dtype=torch.float64, device="cpu").view(-1, rounds).tolist()
    return dict(zip(names, slowest, strict=True))


def most(group: Group, values: list[float]) -> list[float]:
    """Returns the largest value over the ranks, of each."""
    flat = torch.tensor(values, dtype=torch.float64, device="cpu")
    _agree(group, flat, ReduceOp.MAX)
    return flat.tolist()


def make_call(engine: Engine, group: Group, verb: str, nbytes: int, algorithm: str) -> Call:
    """Returns the call of ``verb`` by ``algorithm`` on float32 buffers of its own, the largest of about ``nbytes``."""
    collective = _collective(verb, group, max(1, nbytes // 4))
    choice = engine.choose(collective, algorithm)
    return lambda: engine.run(collective, choice, _TIMEOUT_S)


def is_right(engine: Engine, group: Group, verb: str, nbytes: int, algorithm: str) -> bool:
    """Says whether ``algorithm`` gives every rank the exact result of ``verb``: alike on all ranks."""
    rank, n = group.rank, group.world_size
    collective = _collective(verb, group, max(1, nbytes // 4))
    assert collective.input is not None
    collective.input.copy_(_values(rank, collective.input.numel()))
    engine.execute(collective, algorithm, _TIMEOUT_S)
    wrong = torch.zeros(1, dtype=torch.float64, device="cpu")
    if collective.output is not None:
        wrong[0] = not torch.equal(collective.output, _expected(verb, rank, n, collective))
    _agree(group, wrong, ReduceOp.MAX)
    return not wrong.item()


def _turn(group: Group, call: Call, count: int) -> float:
    group.engine.execute(Collective(verb="barrier"), None, _TIMEOUT_S)
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _agree(group: Group, flat: torch.Tensor, op: ReduceOp) -> None:
    group.engine.execute(Collective(verb="all_reduce", input=flat, output=flat, op=op), "direct", _TIMEOUT_S)


def _collective(verb: str, group: Group, numel: int) -> Collective:
    """Returns a call whose largest buffer has about ``numel`` elements; the root is rank 0."""
    n = group.world_size
    part = -(-numel // n)
    small_in, small_out = verb == "all_gather_single", verb == "reduce_scatter_single"
    input = _zeros(part if small_in else part * n if small_out else numel)
    output = input if verb in ("all_reduce", "broadcast") else _zeros(part if small_out else part * n)
    if verb == "reduce":
        output = _zeros(numel)
    is_there = verb != "reduce" or group.rank == 0
    op = ReduceOp.SUM if verb in _REDUCES else None
    return Collective(verb=verb, input=input, output=output if is_there else None, op=op)


def _zeros(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.float32, device="cpu")


def _values(rank: int, numel: int) -> torch.Tensor:
    return ((torch.arange(numel, device="cpu") * 5 + rank * 3) % 7).to(torch.float32)  # sums are exact in every order


def _expected(verb: str, rank: int, n: int, call: Collective) -> torch.Tensor:
    assert call.input is not None and call.output is not None
    numel = call.input.numel()
    if verb == "broadcast":
        return _values(0, numel)
    if verb == "all_gather_single":
        return torch.cat([_values(each, numel) for each in range(n)])
    total = torch.stack([_values(each, numel) for each in range(n)]).sum(0)
    part = call.output.numel()
    return total[rank * part : (rank + 1) * part] if verb == "reduce_scatter_single" else total
