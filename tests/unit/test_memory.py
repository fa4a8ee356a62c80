"""Tensors in shared memory."""

from __future__ import annotations

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import ConfigError


def test_ordinary_memory_needs_no_group() -> None:
    assert pycomm.empty(2, 3).shape == (2, 3)
    assert pycomm.empty((2, 3), dtype=torch.int8).dtype == torch.int8
    assert pycomm.empty(torch.Size([4])).shape == (4,)
    assert pycomm.empty(()).shape == () and pycomm.empty().shape == ()
    assert torch.equal(pycomm.zeros(5), torch.zeros(5))
    for bad in ((-1,), (2.5,), ("a",)):
        with pytest.raises(ConfigError, match="size"):
            pycomm.empty(*bad)  # type: ignore[arg-type]


def test_a_transport_without_shared_memory_says_so() -> None:
    with pycomm.init("local"), pytest.raises(ConfigError, match=r"transport 'local' .* has no memory to share"):
        pycomm.empty(3, shared=True)


def shared(rank: int) -> None:
    n = pycomm.world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex64):
        tensor = pycomm.zeros(3, 1000, dtype=dtype, shared=True)
        assert tensor.shape == (3, 1000) and tensor.dtype == dtype and not tensor.any()
        tensor += rank + 1
        pycomm.all_reduce(tensor)
        assert (tensor == n * (n + 1) // 2).all()
    assert pycomm.empty(0, 4, shared=True).shape == (0, 4)
    # A view keeps the memory after the tensor itself is gone.
    view = pycomm.zeros(1000, shared=True)[::2]
    view += rank
    others = [pycomm.zeros(1000, shared=True) for _ in range(20)]
    for other in others:
        other += 7
    assert (view == rank).all()
    pycomm.all_reduce(view)
    assert (view == n * (n - 1) / 2).all()


def test_collectives_in_shared_memory() -> None:
    run_ranks(3, shared, transport="shm")
