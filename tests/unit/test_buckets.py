"""The layout of buckets and the planner of their size are functions of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.engines.mesh import layout_axes
from pycomm.errors import ConfigError
from pycomm.reducer.layout import Slot, assign_buckets, bucket_bytes_of
from pycomm.reducer.planner import Link, exposed_s, plan_buckets


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from("ab")), min_size=1), st.integers(1, 150), st.randoms())
def test_every_parameter_has_one_bucket_of_its_kind(slots, bucket_bytes, random) -> None:
    slots = [Slot(*slot) for slot in slots]
    order = list(range(len(slots)))
    random.shuffle(order)
    buckets = assign_buckets(slots, order, bucket_bytes, 10)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(slots)))
    for bucket in buckets:
        assert len({slots[index].kind for index in bucket}) == 1
        filled = sum(slots[index].nbytes for index in bucket)
        assert filled - slots[bucket[-1]].nbytes < bucket_bytes
        places = [order.index(index) for index in bucket]
        assert places == sorted(places)


def test_the_first_bucket_is_small() -> None:
    slots = [Slot(4, "a")] * 10
    assert [len(bucket) for bucket in assign_buckets(slots, range(10), 16, 4)] == [1, 4, 4, 1]


def test_bucket_bytes() -> None:
    assert (bucket_bytes_of("auto"), bucket_bytes_of("1MiB"), bucket_bytes_of(7)) == (None, 1 << 20, 7)
    for bad in (0, -1, "many", 1.5, True):
        with pytest.raises(ConfigError):
            bucket_bytes_of(bad)


def test_the_planner_weighs_latency_against_overlap() -> None:
    slots, arrivals = [Slot(1 << 20, "a")] * 32, [index * 1e-3 for index in range(32)]
    fast = plan_buckets(slots, arrivals, Link(0.0, 1e-10))
    slow_to_start = plan_buckets(slots, arrivals, Link(20e-3, 1e-10))
    assert fast.bucket_bytes <= 2 << 20 and slow_to_start.bucket_bytes >= 8 << 20
    for plan in (fast, slow_to_start):
        assert plan.exposed_s[plan.bucket_bytes] <= 1.02 * min(plan.exposed_s.values())
        assert min(plan.exposed_s) <= plan.bucket_bytes <= max(plan.exposed_s) and max(plan.exposed_s) >= 32 << 20
    assert exposed_s([[0], [1]], [100, 100], [0.0, 1.0], Link(0.5, 0.01)) == pytest.approx(1.5 + 1.5 - 1.0)


def test_axes_are_laid_out_by_chattiness() -> None:
    assert layout_axes(("tp", "mine", "dp", "pp")) == ("pp", "dp", "mine", "tp")
