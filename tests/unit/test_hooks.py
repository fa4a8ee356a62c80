"""Short cuts and observers: which calls take a transport's short cut, and what hooks learn of those that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm
from pycomm import ConfigError, ReduceOp
from pycomm.collectives.short_cuts import not_now
from pycomm.transport.local import LocalTransport, LocalWorld

FAST = {  # how many arguments they take
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather_single": 2,
    "reduce_scatter_single": 3,
    "barrier": 0,
    "reduce": 3,
    "all_to_all_single": 2,
    "gather": 3,
    "scatter": 3,
}


class Counting(LocalTransport):
    """A world of one whose short cuts take contiguous tensors, and count."""

    def __init__(self) -> None:
        (local,) = LocalWorld(1).transports
        super().__init__(local.hub, 0, 60.0)
        self.taken: list[str] = []
        self.fast = {verb: self.short_cut(verb) for verb in FAST}

    def short_cut(self, verb: str) -> Callable[..., bool]:
        def fast(*arguments: Any) -> bool:
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            others = [each for each in arguments if not isinstance(each, (torch.Tensor, list))]
            is_ordinary = len(arguments) <= FAST[verb] and all(isinstance(each, int) for each in others)
            is_ordinary = is_ordinary and all(each.is_contiguous() for each in tensors)
            if is_ordinary:
                self.taken.append(verb)
            return is_ordinary

        return fast


def ordinary_calls(group: Any) -> None:
    t = torch.ones(6)
    pycomm.all_reduce(t, group=group)
    pycomm.broadcast(t, 0, group)
    pycomm.all_gather_single(t.clone(), t, group)
    pycomm.reduce_scatter_single(t.clone(), t, ReduceOp.MAX, group)
    pycomm.barrier(group)
    pycomm.reduce(t, 0, ReduceOp.MIN, group)
    pycomm.all_to_all_single(t.clone(), t, group=group)
    pycomm.gather(t, [t.clone()], 0, group)
    pycomm.scatter(t, [t.clone()], 0, group)


@pytest.mark.parametrize("by_default", [True, False])
def test_ordinary_calls_take_the_short_cut(by_default: bool) -> None:
    transport = Counting()
    with pycomm.init(transport) as group:
        ordinary_calls(None if by_default else group)
        assert transport.taken == list(FAST)
        # torch's operator is translated first.
        pycomm.all_reduce(torch.ones(3), torch.distributed.ReduceOp.SUM)
        assert len(transport.taken) == len(FAST) + 1


def test_other_calls_do_not() -> None:
    transport = Counting()
    with pycomm.init(transport) as group:
        t = torch.ones(6)
        pycomm.all_reduce(t[::2])
        pycomm.all_reduce(t, timeout=600)
        pycomm.all_reduce(t, algorithm="direct")
        pycomm.all_reduce(t, pycomm.premul_sum(2.0))
        assert (t[1::2] == 2).all()
        with pycomm.coalescing():
            pycomm.all_reduce(t)
        work = pycomm.all_reduce(t, async_op=True)
        assert transport.taken == [] and group.fast_all_reduce is not_now
        assert work is not None
        work.wait()
        pycomm.barrier()  # its turn comes, and with it the short cuts
        pycomm.barrier()
        assert transport.taken == ["barrier"]
        pycomm.all_reduce(t)
        assert transport.taken == ["barrier", "all_reduce"]
    assert group.fast_all_reduce is not_now


def test_hooks_learn_of_short_cuts() -> None:
    transport = Counting()
    records: list[pycomm.CollectiveRecord] = []
    with pycomm.init(transport) as group:
        group.add_hook(records.append)
        ordinary_calls(group)
        pycomm.all_reduce(torch.ones(6, dtype=torch.float64)[::2])
        group.remove_hook(records.append)
        pycomm.barrier()
        with pytest.raises(ConfigError, match="not attached"):
            group.remove_hook(records.append)
    assert transport.taken == [*FAST, "barrier"]
    assert [(r.verb, r.op, r.dtype, r.nbytes, r.algorithm) for r in records] == [
        ("all_reduce", "SUM", "float32", 24, "native"),
        ("broadcast", None, "float32", 24, "native"),
        ("all_gather_single", None, "float32", 24, "native"),
        ("reduce_scatter_single", "MAX", "float32", 24, "native"),
        ("barrier", None, "uint8", 0, "native"),
        ("reduce", "MIN", "float32", 24, "native"),
        ("all_to_all_single", None, "float32", 24, "native"),
        ("gather", None, "float32", 24, "native"),
        ("scatter", None, "float32", 24, "native"),
        ("all_reduce", "SUM", "float64", 24, "direct"),
    ]
    assert [r.seq for r in records] == list(range(1, len(FAST) + 2))
