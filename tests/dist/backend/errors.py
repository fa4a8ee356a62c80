"""What goes wrong has to reach whoever waits, on every rank, by whichever way torch waits; and no call blocks for ever.

A case that breaks its group makes one for itself.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.monitor import watch
from pycomm.torch_backend import Options

SECONDS = 60  # to wait for the others, who may be stopped for a while on a machine that is busy


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def own_group(seconds: float = SECONDS, **options: object) -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=seconds), pg_options=Options(**options) if options else None)


def pycomm_side(group: dist.ProcessGroup) -> object:
    return group._get_backend(torch.device("cpu"))


def case_mismatched_calls_raise_everywhere() -> None:
    group = own_group()
    with pytest.raises(pycomm.CollectiveMismatchError, match="all_reduce"):
        dist.all_reduce(torch.ones(4 + rank()), group=group)
    tensor = torch.ones(3) if rank() else torch.ones(3, dtype=torch.int32)
    with pytest.raises(pycomm.CollectiveMismatchError):
        dist.all_reduce(tensor, group=own_group())


def case_errors_are_caught_as_torchs_are() -> None:
    """By who knows torch alone: RuntimeError is what its backends raise."""
    with pytest.raises(RuntimeError) as mismatch:
        dist.all_reduce(torch.ones(4 + rank()), group=own_group())
    assert type(mismatch.value) is pycomm.CollectiveMismatchError
    group = own_group(1)
    if rank() == 0:
        with pytest.raises(RuntimeError) as late:
            dist.all_reduce(torch.ones(4), group=group)
        assert type(late.value) is pycomm.CollectiveTimeoutError
    dist.barrier()


def case_asynchronous_errors_reach_wait_and_futures() -> None:
    work = dist.all_reduce(torch.ones(4 + rank()), group=own_group(), async_op=True)
    future = work.get_future()
    with pytest.raises(Exception, match="CollectiveMismatchError"):
        future.wait()
    following = future.then(lambda done: done.value())
    with pytest.raises(Exception, match="CollectiveMismatchError"):
        following.wait()
    with pytest.raises(Exception, match="all_reduce"):
        work.wait()


def case_errors_reach_the_backward_pass() -> None:
    group = own_group()
    model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    if rank() == 0:  # which goes another way than the others
        with pytest.raises(pycomm.CollectiveMismatchError):
            dist.all_reduce(torch.ones(5), group=group)
    else:
        with pytest.raises(Exception, match="CollectiveMismatchError|all_reduce"):
            model(torch.ones(2, 8)).sum().backward()


def case_a_call_runs_out_of_time() -> None:
    """The timeout is that of ``new_group`` until it is set anew. Its ranks may need longer to make the group."""
    group = own_group()
    side = pycomm_side(group)
    assert side.pycomm_group.timeout_s == SECONDS
    side.set_timeout(timedelta(seconds=0.3))
    if rank() == 0:
        start = time.monotonic()
        with pytest.raises((pycomm.TransportError, RuntimeError), match="all_reduce|timeout|timed out") as caught:
            dist.all_reduce(torch.ones(2), group=group)
        assert time.monotonic() - start >= 0.3
        assert re.search("Verdict: rank 1.* never entered all_reduce", str(caught.value)), str(caught.value)
    dist.barrier()


def calls_on_the_board(group: dist.ProcessGroup) -> int:
    name = pycomm_side(group).pycomm_group.name
    entries = pycomm.monitor.snapshot()
    return sum(entry["calls"] for entry in entries if (entry["group"], entry["verb"]) == (name, "all_reduce"))


def case_calls_are_on_the_board() -> None:
    """Those of the default group and of others, in the figures of this rank and in the sight of the other ones."""
    for group in (dist.group.WORLD, own_group()):
        before = calls_on_the_board(group)
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        assert calls_on_the_board(group) == before + 2
    assert len(watch.peer_boards()) == world() - 1


def case_waiting_has_a_timeout() -> None:
    group = own_group()
    if rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        with pytest.raises((pycomm.CollectiveTimeoutError, RuntimeError)):
            work.wait(timedelta(milliseconds=50))
        dist.barrier()
        assert work.wait()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(2), group=group)


def case_abort_wakes_the_others() -> None:
    group = own_group()
    dist.barrier(group)
    if rank() == 0:
        time.sleep(0.05)  # as a rule the others wait by then; nothing depends on that
        pycomm_side(group).abort()
    else:
        with pytest.raises((pycomm.TransportError, RuntimeError)):
            dist.all_reduce(torch.ones(2), group=group)


def case_a_closed_group_says_so() -> None:
    group = own_group()
    dist.barrier(group)
    side = pycomm_side(group)
    side.shutdown()
    with pytest.raises((pycomm.TransportError, RuntimeError), match="closed"):
        side.allreduce([torch.ones(2)]).wait()


def case_monitored_barrier_names_who_is_missing() -> None:
    side = pycomm_side(own_group())
    side.monitored_barrier(timedelta(seconds=SECONDS))
    last = world() - 1
    if rank() == last:
        return
    missing = rf"rank {last} did not come" if rank() == 0 else rf"rank (0|{last}) did not come"  # rank 0 may be late
    with pytest.raises((pycomm.CollectiveTimeoutError, RuntimeError), match=missing):
        side.monitored_barrier(timedelta(seconds=5), wait_all_ranks=True)  # a busy machine may hold a rank up for 2


def case_options() -> None:
    tensor = torch.arange(5000.0) + rank()
    expected = sum(torch.arange(5000.0) + each for each in range(world()))
    for options in ({"algorithm": "ring"}, {"transport": "torch"}, {"compression": "bf16"}, {"timeout": 50}):
        group = own_group(**options)
        mine = tensor.clone()
        dist.all_reduce(mine, group=group)
        tolerance = 0.02 if "compression" in options else 0
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=0)
        assert ("compression" in options) != torch.equal(mine, expected)
        inside = pycomm_side(group).pycomm_group
        assert inside.transport.name == options.get("transport", "shm")
        assert inside.timeout_s == options.get("timeout", SECONDS)
        dist.destroy_process_group(group)


def case_options_that_cannot_be() -> None:
    for options, words in (
        ({"compression": "int4+ef"}, "ddp_hook"),
        ({"compression": "int5"}, "unknown compression"),
        ({"algorithm": "rinf"}, "rinf"),
        ({"timeout": -1}, "timeout"),
    ):
        with pytest.raises(pycomm.ConfigError, match=words):
            Options(**options)
    with pytest.raises(pycomm.ConfigError, match="nosuch"):
        own_group(transport="nosuch")
    with pytest.raises(Exception, match="pycomm.torch_backend.Options"):
        dist.new_group(pg_options={"timeout": 3})


def case_mixed_backends() -> None:
    is_new = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    for backend in ("cpu:gloo,cuda:pycomm", "cpu:pycomm,cuda:gloo"):
        if is_new:
            group = dist.new_group(backend=backend)
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [world()] * 2
        else:
            with pytest.raises(pycomm.ConfigError, match="would leave out gloo"):
                dist.new_group(backend=backend)
    with pytest.raises(pycomm.ConfigError, match="not xpu"):
        dist.new_group(backend="xpu:pycomm")
    group = dist.new_group(backend="cpu:pycomm")
    dist.barrier(group)


def case_split_group() -> None:
    parent = dist.group.WORLD
    name = f"split of {world()}"
    side = pycomm_side(parent)
    half = [[0], list(range(1, world()))][rank() > 0]
    child = side.split_group(half, group_name=name) if hasattr(side, "split_group") else side.split(None, half, None)
    tensor = torch.ones(2)
    child.allreduce([tensor]).wait()
    assert tensor.tolist() == [len(half)] * 2
    if hasattr(side, "split_group"):
        for wrong, words in (
            (3, "pg_options: expected"),
            (Options(transport="torch"), "expected the transport of the group"),
        ):
            with pytest.raises(pycomm.ConfigError, match=words):
                side.split_group(half, opts=wrong)
        child = side.split_group(half, opts=Options(timeout=7, compression="int8"))
        assert child.pycomm_group.timeout_s == 7 and child.pycomm_options.compression == "int8"
