"""Making arguments flat: shared memory where it can be, the right values where it cannot, errors where it may not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from harness import run_ranks
from pycomm import ConfigError
from pycomm.collectives.tensors import as_tensor, check_disjoint, check_in_place, flatten, joined

CPU = frozenset({"cpu"})


def flat_of(tensor: torch.Tensor, *, reads: bool = True, writes: bool = True) -> torch.Tensor:
    return flatten(as_tensor(tensor, "t", writes=writes), reads=reads, writes=writes, devices=CPU).tensor


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (1, 1, 4)])
def test_contiguous_memory_is_shared(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    flat = flat_of(tensor)
    assert flat.shape == (tensor.numel(),)
    assert flat.data_ptr() == tensor.data_ptr()
    array = np.zeros(shape, dtype=np.float32)
    assert flat_of(as_tensor(array, "a", writes=True)).data_ptr() == (array.ctypes.data if array.size else 0)


def test_grad_is_left_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    flat = flat_of(parameter)
    assert not flat.requires_grad and flat.data_ptr() == parameter.data_ptr()


def test_only_what_is_read_is_copied_in_and_only_what_is_written_back() -> None:
    column = torch.arange(6.0).view(3, 2)[:, 1]
    flat = flatten(column, reads=True, writes=False, devices=CPU)
    assert flat.tensor.tolist() == [1.0, 3.0, 5.0] and flat.finish is None
    flat = flatten(column, reads=False, writes=True, devices=CPU)
    flat.tensor.copy_(torch.tensor([7.0, 8.0, 9.0]))
    assert column.tolist() == [1.0, 3.0, 5.0]
    assert flat.finish is not None
    flat.finish()
    assert column.tolist() == [7.0, 8.0, 9.0]


def test_joined_lists() -> None:
    whole = torch.arange(10.0)
    parts = list(whole.split([3, 0, 5, 2]))
    flat = joined(parts, reads=True, writes=True, devices=CPU)
    assert flat.tensor.data_ptr() == whole.data_ptr() and flat.finish is None and torch.equal(flat.tensor, whole)
    for order in (
        [parts[2], parts[0]],
        [torch.ones(2), torch.zeros(3)],
        [whole.view(5, 2)[:, 0], whole.view(5, 2)[:, 1]],
    ):
        flat = joined(order, reads=True, writes=True, devices=CPU)
        assert torch.equal(flat.tensor, torch.cat(order)) and flat.finish is not None
        flat.tensor.mul_(-1)
        expected = flat.tensor.clone()
        flat.finish()
        assert torch.equal(torch.cat(order), expected)
    # Neighbours by accident, in two allocations, are not one buffer.
    two = [torch.zeros(2), torch.zeros(2)]
    assert joined(two, reads=True, writes=False, devices=CPU).tensor.untyped_storage().nbytes() == 16


def test_neighbours_whose_storages_end_elsewhere_are_joined_by_a_copy() -> None:
    """Of one NumPy array, which the first tensor's storage has only a half of."""
    array = np.arange(8, dtype=np.float32)
    lists = [torch.from_numpy(array[:4]), torch.from_numpy(array)[4:]]
    flat = joined(lists, reads=True, writes=True, devices=CPU)
    assert flat.tensor.tolist() == list(range(8))
    flat.tensor.add_(1)
    assert flat.finish is not None
    flat.finish()
    assert array.tolist() == list(range(1, 9))


def test_overlap_within_one_tensor() -> None:
    base = torch.zeros(16)
    for view in (
        base.expand(2, 16),
        base.as_strided((4, 4), (1, 1)),
        base.as_strided((3, 2), (2, 2)),
        base[:1].expand(7),
    ):
        with pytest.raises(ConfigError, match="overlap each other"):
            as_tensor(view, "t", writes=True)
        assert as_tensor(view, "t", writes=False).shape == view.shape  # an input may repeat itself
    for view in (
        base.expand(1, 16),
        base[::3],
        base.view(4, 4).t(),
        base.as_strided((2, 3), (3, 2)),
        base[:0].expand(3, 0),
    ):
        assert as_tensor(view, "t", writes=True).shape == view.shape


def test_overlap_between_tensors() -> None:
    base = torch.zeros(12)
    check_disjoint([("a", base[:4]), ("b", base[8:]), ("c", base[4:8]), ("empty", base[5:5])])
    with pytest.raises(ConfigError, match="b shares memory with a"):
        check_disjoint([("b", base[3:6]), ("a", base[:4])])
    board = base.view(3, 4)
    check_disjoint([("a", board[:, 0]), ("b", board[:, 1]), ("c", board[:, 2:])])
    check_disjoint([("a", board[::2, :2]), ("b", board[1]), ("c", board[:, 2:][0]), ("d", board[2:, 2:])])
    pairs = torch.zeros(3, dtype=torch.complex64)
    check_disjoint([("real", pairs.real), ("imaginary", pairs.imag)])
    for one, two in ((board[:, 0], board[:, 0]), (board[:, 1:3], board.t()[2]), (board[1], board[:, 3])):
        with pytest.raises(ConfigError, match="shares memory with"):
            check_disjoint([("other", torch.zeros(3)), ("a", one), ("b", two)])
    with pytest.raises(ConfigError, match="shares memory with"):
        check_disjoint([("all", pairs), ("imaginary", pairs.imag)])
    check_in_place(base, base[4:8], 1, 3, "x")
    check_in_place(base[:8], base[8:], 0, 2, "x")
    check_in_place(base, torch.zeros(4), 0, 3, "x")
    for part, slot in ((base[4:8], 0), (base[3:7], 1), (base[4:8], None)):
        with pytest.raises(ConfigError, match="share memory"):
            check_in_place(base, part, slot, 3, "x and y")


def test_sub_byte_and_quantized_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be moved"):
        as_tensor(torch.empty(4, dtype=torch.bits8), "t", writes=False)


def test_wrappers_without_memory_are_refused() -> None:
    class Wrapper(torch.Tensor):
        """What DTensor and its like are: a shape, and tensors elsewhere."""

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    with pytest.raises(ConfigError, match=r"memory of its own, got Wrapper"):
        as_tensor(wrapper, "t", writes=True)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[slice]]:
    """A base shape, a permutation of its dimensions, and a slice of each."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    slices = [slice(draw(st.integers(0, 2)), draw(st.integers(0, 6)), draw(st.integers(1, 3))) for _ in shape]
    return shape, order, slices


def view_of(base: torch.Tensor, order: tuple[int, ...], slices: list[slice]) -> torch.Tensor:
    return base.permute(order)[tuple(slices[axis] for axis in order)] if order else base


def reduce_view(rank: int, shape: tuple[int, ...], order: tuple[int, ...], slices: list[slice]) -> None:
    n = pycomm.world_size()
    base = torch.full(shape, -7, dtype=torch.int32)
    view = view_of(base, order, slices)
    counting = torch.arange(view.numel(), dtype=torch.int32).view(view.shape)
    view.copy_(counting + rank)
    expected = torch.full(shape, -7, dtype=torch.int32)
    view_of(expected, order, slices).copy_(n * counting + n * (n - 1) // 2)
    pycomm.all_reduce(view)
    assert torch.equal(base, expected)  # also what lies beside the view
    # Broadcast into it, and gather it.
    view.fill_(rank)
    pycomm.broadcast(view, n - 1)
    view_of(expected, order, slices).fill_(n - 1)
    assert torch.equal(base, expected)
    view.copy_(counting + 10 * rank)
    gathered = torch.empty((n, *view.shape), dtype=torch.int32)
    pycomm.all_gather_single(gathered, view)
    assert torch.equal(gathered, torch.stack([counting + 10 * r for r in range(n)]))


@settings(max_examples=60)
@given(views())
def test_any_view(case: tuple[tuple[int, ...], tuple[int, ...], list[slice]]) -> None:
    run_ranks(3, reduce_view, *case, transport="local")


@given(views(), views())
def test_two_views_share_memory_if_an_element_of_both_is_the_same(one: Any, two: Any) -> None:
    memory = torch.arange(5**4)
    a, b = (view_of(memory[: math.prod(shape)].view(shape), order, slices) for shape, order, slices in (one, two))
    if set(a.flatten().tolist()) & set(b.flatten().tolist()):
        with pytest.raises(ConfigError, match="shares memory"):
            check_disjoint([("a", a), ("b", b)])
    else:
        check_disjoint([("a", a), ("b", b)])
