"""Streams: results, order, errors, and what they leave behind; every transport whose ranks are processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import pycomm
from harness import run_forked, run_ranks, transport_params, wait_until
from pycomm.overlap.cuda import CudaLane

PROCESSES = [param for param in transport_params() if param.values[0] not in ("local", "mpi")]
NUMEL = 300_007


def run_streams(rank: int) -> None:
    world = pycomm.world_size()
    with pycomm.CommStream("gradients", segment_bytes=1 << 18) as stream:
        torch.manual_seed(rank)  # the ranks submit at different moments
        works, tensors = [], []
        for number in range(12):
            time.sleep(float(torch.rand(())) * 0.005)
            numel = NUMEL if number % 3 == 0 else 100 + number
            tensors.append(torch.full((numel,), float(rank + number)))
            works.append(stream.all_reduce(tensors[-1], priority=number % 2))
            pycomm.all_reduce(torch.ones(3))  # the caller's own calls go on beside
        doubled = works[-1].then(lambda work: 2 * work.result()[0] if isinstance(work.result(), torch.Tensor) else 0)
        for number, (work, tensor) in enumerate(zip(works, tensors)):
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, world * (world - 1) / 2 + world * number)), number
        doubled.wait()
        submitted = stream.submit(lambda group: pycomm.all_reduce(tensors[0], group=group) or "done", hold=tensors[0])
        assert submitted.result() == "done"
        assert stream.synchronize(60.0)
        report = stream.step()
        assert report.comm_s > 0 and report.nbytes >= 4 * 4 * NUMEL and 0 <= report.hidden_share <= 1
        assert stream.step().comm_s == 0
        if pycomm.get_group().transport.name == "shm":  # between hosts two items are under way at a time
            check_order(stream)
        check_errors(stream, rank)
        check_residuals(stream, rank)
        check_forks(stream)
    with pytest.raises(pycomm.TransportError, match="closed"):
        stream.all_reduce(torch.ones(3))
    names = [thread.name for thread in threading.enumerate()]
    assert "pycomm-stream-gradients" not in names


class BusyGpu:
    """In place of CUDA's stream: has done its calls once it is told so."""

    def __init__(self) -> None:
        self.is_done, self.asked = threading.Event(), threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.is_done.is_set()

    def synchronize(self) -> None:
        self.asked.set()
        assert self.is_done.wait(60)


def wait_for_a_gpu(rank: int) -> None:
    stream, gpu = pycomm.CommStream("gpu"), BusyGpu()
    stream._cuda = CudaLane.__new__(CudaLane)
    stream._cuda._stream = gpu
    stream.all_reduce(torch.ones(3)).wait()
    assert not stream.synchronize(0.01)
    for wait in (stream.synchronize, partial(stream.synchronize, 60.0), stream.close):
        gpu.is_done.clear(), gpu.asked.clear()
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert gpu.asked.wait(60) and waiter.is_alive()
        gpu.is_done.set()
        waiter.join(60)
        assert not waiter.is_alive()


def test_a_stream_waits_for_what_the_gpu_has_not_done() -> None:
    run_ranks(1, wait_for_a_gpu, transport="shm")


def check_order(stream: pycomm.CommStream) -> None:
    """What is submitted runs in its turn, whoever moves what comes before it, and the urgent first."""
    is_running, all_are_there = threading.Event(), threading.Event()
    gate = stream.submit(lambda _group: is_running.set() or all_are_there.wait(500.0))
    assert is_running.wait(500.0)  # what is granted with it is settled
    ended: list[str] = []
    tensor, large = torch.ones(3), torch.ones(1 << 20)
    works = [stream.all_reduce(large).then(lambda _work: ended.append("large"))]
    works += [stream.all_reduce(tensor), stream.submit(lambda _group: tensor.clone()), stream.all_reduce(tensor)]
    works.append(stream.all_reduce(torch.ones(1024), priority=1).then(lambda _work: ended.append("urgent")))
    all_are_there.set()
    assert gate.result() is True
    first, second = works[2].result()[0].item(), works[3].result()[0].item()
    for work in works:
        work.wait()
    assert (first, second) == (pycomm.world_size(), pycomm.world_size() ** 2) and ended == ["urgent", "large"]


def refused_in_a_fork(call: Callable[[], object]) -> None:
    with pytest.raises(pycomm.TransportError, match="forked"):
        call()


def check_forks(stream: pycomm.CommStream) -> None:
    """A forked child is no rank, and has no thread that would move anything: it is told so.

    Also if one of the parent's threads completes an item at that moment.
    """
    is_held, is_forked = threading.Event(), threading.Event()

    def complete() -> None:
        with stream._changed:
            is_held.set()
            is_forked.wait(500.0)

    thread = threading.Thread(target=complete)
    thread.start()
    assert is_held.wait(500.0)
    for call in (lambda: stream.all_reduce(torch.ones(3)), stream.synchronize):
        run_forked(partial(refused_in_a_fork, call))
    is_forked.set()
    thread.join()


def check_residuals(stream: pycomm.CommStream, rank: int) -> None:
    """What one compressed call leaves out, the next one of that name sends, whatever runs between them."""
    options = {"compression": "topk:0.01+ef", "name": "weight"}
    with pycomm.new_group(list(range(pycomm.world_size()))) as alone:
        for step in range(4):
            expected = torch.arange(1000.0) * (rank + 1) % (100 + step)
            tensor = expected.clone()
            pycomm.all_reduce(expected, group=alone, **options)
            work = stream.all_reduce(tensor, **options)
            for _ in range(step):
                stream.all_reduce(torch.ones(7))
            work.wait()
            assert torch.equal(tensor, expected), step


def check_errors(stream: pycomm.CommStream, rank: int) -> None:
    """An exception goes to whoever waits, and the stream goes on."""

    def fail(_group: pycomm.Group) -> None:
        raise ValueError("mine")

    work = stream.submit(fail)
    with pytest.raises(ValueError, match="mine"):
        work.wait()
    assert not work.is_success()
    tensor = torch.ones(5)
    stream.all_reduce(tensor).wait()
    assert tensor[0] == pycomm.world_size()


@pytest.mark.parametrize("transport", PROCESSES)
def test_streams(transport: str) -> None:
    run_ranks(3, run_streams, transport=transport)


def submit_what_differs(rank: int) -> None:
    """Ranks that submit different things all learn it, nothing of them moves, and what follows is as ever."""
    world = pycomm.world_size()
    is_odd = rank == world - 1
    with pycomm.CommStream("other", segment_bytes=1 << 12) as stream:

        def reduce(numel: int, priority: int = 0, **options: object) -> tuple[pycomm.Work, torch.Tensor]:
            tensor = torch.ones(numel)
            return stream.all_reduce(tensor, priority=priority, **options), tensor

        def barrier(nbytes: int) -> tuple[pycomm.Work, None]:
            return stream.submit(pycomm.barrier, nbytes=nbytes), None

        pairs = [
            (lambda: reduce(5), lambda: reduce(6), "float32, 6 elements), priority 0"),
            (lambda: reduce(1 << 15), lambda: reduce(1 << 13), "8192 elements) in segments of 1024"),  # which fit
            (lambda: reduce(1 << 15), lambda: reduce(1 << 15, priority=1), "priority 1"),
            (lambda: reduce(7, compression="int8"), lambda: reduce(7), "7 elements), priority 0"),
            (lambda: reduce(9, op=pycomm.ReduceOp.MAX), lambda: reduce(9), "SUM, float32, 9 elements"),
            (lambda: reduce(8), lambda: barrier(0), "barrier, by submit(nbytes=0), priority 0"),
            (lambda: barrier(1), lambda: barrier(1), ""),
        ]
        fine = [reduce(1 << 14)]
        differing = []
        for usual, odd, words in pairs:
            differing.append((*(odd if is_odd else usual)(), words))
            fine.append(reduce(1 << 14, priority=len(fine) % 2))
        for work, tensor, words in differing:
            if not words:
                work.wait()
                continue
            with pytest.raises(pycomm.CollectiveMismatchError) as raised:
                work.wait()
            assert (
                f"rank {world - 1}: " in str(raised.value)
                and words in str(raised.value).split(f"rank {world - 1}: ")[1]
            )
            assert tensor is None or (tensor == 1).all()
        for work, tensor in fine:
            work.wait()
            assert (tensor == world).all()
    with pycomm.CommStream("ahead") as stream:  # by more than fits into what the ranks tell one another at a time
        works = [] if is_odd else [stream.all_reduce(torch.ones(3)) for _ in range(150)]
        pycomm.barrier()
        works += [stream.all_reduce(torch.ones(3 + (number == 140))) for number in range(150 if is_odd else 0)]
        assert stream.synchronize(300.0)
        refused = [number for number, work in enumerate(works) if work.exception() is not None]
        assert refused == [140]


@pytest.mark.parametrize("transport", PROCESSES)
def test_what_differs_between_ranks_is_refused(transport: str) -> None:
    run_ranks(3, submit_what_differs, transport=transport)


def laid_out(values: torch.Tensor, number: int) -> torch.Tensor:
    """Returns ``values (2, 3, 20, 50)`` in one of several layouts."""
    tensor = torch.empty_like(values)
    layouts = [
        tensor,
        values.new_empty((2, 3, 20, 100))[..., ::2],
        values.new_empty((2, 3, 50, 20)).transpose(2, 3),
        tensor.to(memory_format=torch.channels_last),
        tensor.conj() if values.is_complex() else tensor,
        torch._neg_view(tensor) if values.dtype == torch.float32 else tensor,
    ]
    return layouts[number % len(layouts)].copy_(values)


def lay_out_differently(rank: int) -> None:
    """What the ranks agree on, and an item's segments, do not depend on how a tensor lies on one of them."""
    world = pycomm.world_size()
    with pycomm.CommStream("layouts", segment_bytes=1 << 12) as stream:
        for dtype in (torch.float32, torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
            wide = torch.complex64 if dtype.is_complex else torch.float32  # float8 has no arithmetic
            values = (torch.arange(6000).view(2, 3, 20, 50) % 2).to(wide) * (1 + 1j if dtype.is_complex else 1)
            for number in range(6):  # rank 0 has the contiguous ones, which the native core may move
                tensor, urgent = (laid_out(values.to(dtype), rank * (number + more)) for more in (0, 1))
                work = stream.all_reduce(tensor.requires_grad_(dtype == torch.float32))
                stream.all_reduce(urgent, priority=1).wait()
                assert work.result() is tensor
                for each in (tensor, urgent):
                    assert torch.equal(each.detach().to(wide), values * world), (dtype, number)
        for tensor in (torch.ones(()), torch.ones(4)[2:3:2], torch.ones(3, 0).t() if rank else torch.ones(0, 3)):
            stream.all_reduce(tensor).wait()
            assert (tensor == world).all()
        options = {"compression": "none"} if rank else {}  # which says nothing either
        stream.all_reduce(tensor := torch.ones(6000), **options).wait()
        assert (tensor == world).all()
        with torch.inference_mode():  # the copy is written by other threads
            work = stream.all_reduce(tensor := laid_out(torch.ones(2, 3, 20, 50), rank))
        work.wait()
        assert (tensor == world).all()
        check_functions(stream, rank)
        for wrong in (
            torch.ones(1).expand(6000),
            torch.ones(6001).as_strided((6000, 2), (1, 1)),
            torch.eye(3).to_sparse(),
        ):
            with pytest.raises(pycomm.ConfigError, match="overlap each other|dense"):
                stream.all_reduce(wrong)
        if pycomm.get_group().transport.name == "shm":  # between hosts two items are under way at a time
            tensor = laid_out(torch.ones(2, 3, 20, 50), rank + 3)
            works = [stream.all_reduce(tensor) for _ in range(3)]  # each reads what the one before it has left
            for work in works:
                work.wait()
            assert (tensor == world**3).all()


def check_functions(stream: pycomm.CommStream, rank: int) -> None:
    """The other verbs, each whole, as ``submit`` has them."""
    world = pycomm.world_size()
    part, whole = torch.full((2, 3, 20, 50), float(rank)), torch.ones(world * 2, 3, 20, 50)
    if rank:
        part, whole = part.to(memory_format=torch.channels_last), whole.to(memory_format=torch.channels_last)
    stream.submit(lambda group: pycomm.all_gather_single(whole, part, group)).wait()
    assert whole[::2, 0, 0, 0].tolist() == list(range(world))
    stream.submit(lambda group: pycomm.reduce_scatter_single(part, whole, group=group)).wait()
    assert (part == world * rank).all()
    stream.submit(lambda group: pycomm.broadcast(part, world - 1, group)).wait()
    assert (part == world * (world - 1)).all()


@pytest.mark.parametrize("transport", PROCESSES)
def test_layouts_that_differ_between_ranks(transport: str) -> None:
    run_ranks(3, lay_out_differently, transport=transport)


def compute_without_a_break(_rank: int) -> None:
    """Over shared memory a stream moves on while another thread keeps Python's lock."""
    world = pycomm.world_size()
    with pycomm.CommStream("gradients") as stream:
        for _ in range(3):
            stream.all_reduce(torch.ones(3)).wait()  # its thread is there
        works, tensors = [], [torch.ones(3_000_000) for _ in range(3)]
        last = tensors[-1].numpy()
        usual_s = sys.getswitchinterval()
        try:
            works = [stream.all_reduce(tensor) for tensor in tensors]
            sys.setswitchinterval(1000.0)
            deadline = time.monotonic() + 100.0
            while last[-1] != world and time.monotonic() < deadline:
                pass
            assert last[-1] == world
        finally:
            sys.setswitchinterval(usual_s)
        for work, tensor in zip(works, tensors):
            assert work.result() is tensor and (tensor == world).all()


def test_a_stream_needs_no_turn_of_python() -> None:
    run_ranks(2, compute_without_a_break)


def be_interrupted(rank: int, path: str) -> None:
    """Who waits can be interrupted, or give up; the item goes on. Then a rank dies, and all that is submitted ends."""
    stream = pycomm.CommStream("gradients")
    tensor = torch.ones(1_000_000)
    if rank == 0:
        work = stream.all_reduce(tensor)
        with pytest.raises(pycomm.CollectiveTimeoutError):
            work.wait(0.05)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            work.wait()
        Path(path).touch()
    else:
        wait_until(Path(path).exists)
        work = stream.all_reduce(tensor)
    work.wait()
    assert (tensor == 3).all()
    if rank == 1:
        stream.all_reduce(torch.ones(30_000_000))
        os.kill(os.getpid(), signal.SIGKILL)
    works = [stream.all_reduce(torch.ones(30_000_000)) for _ in range(3)]
    works += [stream.submit(lambda group: pycomm.barrier(group)), stream.all_reduce(torch.ones(3), priority=1)]
    for work in works[1:]:  # the first may have gone well
        with pytest.raises(pycomm.PeerLostError) as lost:
            work.wait()
        assert lost.value.rank == 1 and "rank 1" in str(lost.value)
    assert stream.synchronize(60.0)
    with pytest.raises(pycomm.PeerLostError):
        stream.all_reduce(torch.ones(3)).wait()
    stream.close()


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_wait_is_interrupted_and_a_death_ends_every_item(tmp_path, transport: str) -> None:
    run_ranks(3, be_interrupted, str(tmp_path / "interrupted"), transport=transport, casualties=[1])


def observe(rank: int) -> None:
    """The monitor from inside: verify, checks, gradient norms, stragglers, trace."""
    world = pycomm.world_size()
    model = torch.nn.Linear(4, 3)
    for parameter in model.parameters():
        pycomm.broadcast(parameter.data, 0)
    assert pycomm.verify(model)
    if rank == 1:
        model.bias.data[0] += 1e-7
    report = pycomm.verify(model)
    assert not report and report.first == "bias" and report.ranks == (1,), report
    halves = torch.full((4,), complex(1, 2)).conj()
    assert pycomm.verify([halves, halves.imag, torch.ones(4)[1::2][:1], torch.ones(3, 2).t()])
    norms = pycomm.monitor.gradient_norms([torch.full((4,), float("nan") if rank == 2 else 1.0)])
    assert norms.suspects == (2,)
    said: list[str] = []
    with pycomm.monitor.checked(on_nan=said.append):
        tensor = torch.tensor([1.0, float("inf") if rank == 0 else 1.0])
        pycomm.all_reduce(tensor)
    assert len(said) == 1 and ("the input" if rank == 0 else "the result") in said[0], said
    said.clear()
    lengths = [3, 5, 2][:world]
    with pycomm.monitor.checked(on_nan=said.append):  # one collective for each rank, all begun before the first ends
        mine = torch.full((lengths[rank],), float("nan") if rank == 0 else 1.0)
        pycomm.all_gather([torch.full((length,), float("nan")) for length in lengths], mine)  # only the roots' count
    assert ["the input" in each for each in said] == [rank == 0], said
    late: list[pycomm.monitor.StragglerReport] = []  # those that name rank 1
    stop = pycomm.monitor.on_straggler(lambda _name, found: late.append(found) if 1 in found.slow_ranks else None)
    is_said = torch.zeros(1)
    while not is_said.item():  # a busy machine makes the others late too, now and then
        for _ in range(20):
            if rank == 1:
                time.sleep(0.01)
            pycomm.all_reduce(torch.ones(1))
        found = pycomm.monitor.stragglers()
        assert (found is None) == (rank != 0)
        is_said[0] = float(bool(late) and (found is None or 1 in found.slow_ranks))
        pycomm.all_reduce(is_said, pycomm.ReduceOp.MIN)
    stop()
    entries = pycomm.monitor.snapshot()
    assert sum(entry["calls"] for entry in entries if entry["verb"] == "all_reduce") > 10 and world == 3


def test_the_monitor_from_inside() -> None:
    run_ranks(3, observe)


def profile(rank: int, path: str) -> None:
    with pycomm.monitor.profiler_ranges(), torch.profiler.profile() as profiler:
        pycomm.all_reduce(torch.ones(100))
        pycomm.barrier()
    names = [event.name for event in profiler.events()]
    assert names.count("pycomm::all_reduce") == 1 and names.count("pycomm::barrier") == 1
    assert (pycomm.monitor.write_trace(path) > 4) == (rank == 0)


def fail_in_a_session(rank: int) -> None:
    """The range of a call that failed ended in the next session, in memory of the last one: SIGABRT, or SIGSEGV."""
    for _ in range(12):
        with pycomm.monitor.profiler_ranges():
            with torch.profiler.profile() as profiler, pytest.raises(pycomm.CollectiveMismatchError):
                pycomm.all_reduce(torch.ones(4 + rank))
            assert [event.name for event in profiler.events()].count("pycomm::all_reduce") == 1
            del profiler
            gc.collect()
            held = [bytes(length % 128) for length in range(5000)]
            with torch.profiler.profile():
                pycomm.all_reduce(torch.ones(3))
            del held


def test_a_call_may_fail_while_a_profiler_runs() -> None:
    run_ranks(2, fail_in_a_session)


@pytest.mark.parametrize("transport", [param for param in PROCESSES if param.values[0] in ("shm", "mixed")])
def test_profiler_ranges_and_a_trace_over_all_ranks(tmp_path, transport: str) -> None:
    import json

    path = tmp_path / "trace.json"
    run_ranks(3, profile, str(path), transport=transport)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["name"] == "barrier"]
    assert {event["pid"] for event in slices} == {0, 1, 2}
    first = [event for event in slices if event["args"]["seq"] == max(each["args"]["seq"] for each in slices)]
    starts, ends = [event["ts"] for event in first], [event["ts"] + event["dur"] for event in first]
    assert len(first) == 3 and max(starts) <= min(ends), "a barrier ends nowhere before the last rank has come"
