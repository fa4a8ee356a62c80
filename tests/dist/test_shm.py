"""What only shared memory can show: disagreement, death, Ctrl-C, forks, shared buffers, strangers, many ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import pycomm
from harness import check_sum, interrupt_once_in_a_call, is_in_a_call, run_forked, run_ranks, wait_until
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, ReduceOp, TransportError
from pycomm.transport import Patience
from pycomm.transport._handoff import share_memory

# -- ranks that disagree ---------------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "numel": (lambda t: pycomm.all_reduce(t), lambda t: pycomm.all_reduce(t[:3])),
    "large and small": (lambda t: pycomm.all_reduce(torch.ones(100_000)), lambda t: pycomm.all_reduce(t)),
    "dtype": (lambda t: pycomm.all_reduce(t), lambda t: pycomm.all_reduce(t.view(torch.int32))),
    "operator": (lambda t: pycomm.all_reduce(t), lambda t: pycomm.all_reduce(t, ReduceOp.PRODUCT)),
    "verb": (lambda t: pycomm.all_reduce(t), lambda t: pycomm.broadcast(t, 0)),
    "root": (lambda t: pycomm.broadcast(t, 0), lambda t: pycomm.broadcast(t, 1)),
    "order": (lambda t: pycomm.barrier(), lambda t: pycomm.all_reduce(t)),
    "splits": (
        lambda t: pycomm.all_to_all_single(torch.empty(4), t, [2, 2], [2, 2]),
        lambda t: pycomm.all_to_all_single(torch.empty(4), t[:3], [2, 2], [1, 2]),
    ),
}


def disagree(rank: int) -> None:
    for name, calls in CALLS.items():
        t = torch.full((4,), float(rank + 1))
        with pytest.raises(CollectiveMismatchError) as caught:
            calls[rank](t)
        assert (t == rank + 1).all(), f"{name}: the buffer was written"
        text = str(caught.value)
        assert "rank 0" in text and "rank 1" in text, text
        check_sum()  # and the group goes on


def test_ranks_that_disagree_see_both_sides_and_keep_their_buffers() -> None:
    run_ranks(2, disagree)


def one_of_three_disagrees(rank: int) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"rank 2: all_reduce\(MAX, float32, 5 elements\)"):
        pycomm.all_reduce(torch.ones(5), ReduceOp.MAX if rank == 2 else ReduceOp.SUM)
    check_sum()


def test_every_rank_sees_the_one_that_differs() -> None:
    run_ranks(3, one_of_three_disagrees)


# -- death and other ends --------------------------------------------------------------------------------------------


def lose_rank_2(rank: int, how: str) -> None:
    check_sum()
    if rank == 2:
        time.sleep(0.05)  # as a rule the others wait for it by then; nothing depends on that
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
    fate = {"exit": "exited with status 3", "kill": "killed by SIGKILL", "segv": "killed by SIGSEGV"}[how]
    with pytest.raises(PeerLostError, match=rf"lost rank 2 \(pid \d+\): {fate}") as caught:
        check_sum(numel=100_000)
    assert caught.value.rank == 2
    with pytest.raises(PeerLostError):  # and so does every later call
        pycomm.barrier()
    survivors = pycomm.new_group([0, 1, 3])
    t = torch.ones(70_000)
    pycomm.all_reduce(t, group=survivors)
    assert (t == 3).all()


@pytest.mark.parametrize("how", ["kill", "segv", "exit"])
def test_survivors_name_the_dead_rank_and_go_on_without_it(how: str) -> None:
    run_ranks(4, lose_rank_2, how, casualties=[2])


def lose_a_receiver(rank: int) -> None:
    if rank == 1:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        pycomm.recv(torch.empty(3), 1)


def test_a_message_from_a_dead_rank_raises() -> None:
    run_ranks(2, lose_a_receiver, casualties=[1])


def run_out_of_time(rank: int) -> None:
    """By the call's own timeout, and by that of a group, which holds for its short cuts too."""
    groups = {0.2: pycomm.new_group([0, 1]), None: pycomm.new_group([0, 1], timeout=0.2)}
    for timeout_s, group in groups.items():
        if rank == 1:
            pycomm.recv(torch.empty(1), 0)  # which says that its time was over
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 0"):
            pycomm.all_reduce(torch.ones(3), group=group, timeout=timeout_s if rank == 0 else None)
        if rank == 0:
            assert time.monotonic() - begin >= 0.2
            pycomm.send(torch.ones(1), 1)


def test_a_timeout_is_everybodys() -> None:
    run_ranks(2, run_out_of_time)


def close_early(rank: int) -> None:
    if rank == 1:
        return
    time.sleep(0.1)  # before or after it has closed: the error is the same
    with pytest.raises(PeerLostError, match="rank 1 .* has closed the group"):
        pycomm.barrier()


def test_a_rank_that_left_is_named() -> None:
    run_ranks(2, close_early)


def be_interrupted(rank: int, path: str) -> None:
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupt_once_in_a_call()
            pycomm.all_reduce(torch.ones(3))
        Path(path).touch()
    else:
        wait_until(Path(path).exists)


def test_ctrl_c_ends_a_blocked_call(tmp_path: Path) -> None:
    run_ranks(2, be_interrupted, str(tmp_path / "interrupted"))


def stop_and_go_on(rank: int) -> float:
    """Returns the share of a core that waiting took; of the best of ten turns: other work takes part."""
    pids = torch.zeros(2, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    share = torch.ones(1)
    for _ in range(10):
        if rank == 0:
            os.kill(int(pids[1]), signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (int(pids[1]), signal.SIGCONT)).start()
        begin, before_s = time.monotonic(), time.process_time()
        check_sum()
        share[0] = min(share.item(), (time.process_time() - before_s) / max(1.0, time.monotonic() - begin))
        pycomm.broadcast(share, 0)
        if share < 0.2:
            break
    return share.item()


def test_a_stopped_rank_is_waited_for_without_burning_a_core() -> None:
    assert run_ranks(2, stop_and_go_on)[0] < 0.2


def let_threads_run(rank: int, path: str) -> None:
    """Rank 1 comes when a thread of rank 0 has run, which a collective that kept Python's lock would prevent."""
    if rank == 1:
        wait_until(Path(path).exists)
        return pycomm.barrier()

    def run() -> None:
        wait_until(is_in_a_call)
        for _ in range(10):
            time.sleep(0.001)
        Path(path).touch()

    thread = threading.Thread(target=run)
    thread.start()
    pycomm.barrier()
    thread.join()


def test_other_threads_run_while_a_rank_waits(tmp_path: Path) -> None:
    run_ranks(2, let_threads_run, str(tmp_path / "ran"))


def fork_a_child(rank: int) -> None:
    shared = pycomm.empty(8, shared=True).fill_(3.0)
    group = pycomm.new_group([0, 1])

    def body() -> None:
        assert shared.sum() == 24  # its memory is still there to read
        with pytest.raises(TransportError, match="forked"):
            pycomm.all_reduce(torch.ones(3), group=group)

    run_forked(body)
    check_sum()


def test_a_forked_child_is_not_a_rank() -> None:
    run_ranks(2, fork_a_child)


# -- shared buffers --------------------------------------------------------------------------------------------------


def reduce_shared(rank: int, ranks: int) -> None:
    for numel in (1, 600, 1025, 70_001, 1_000_003):
        for who in ("all", "some", "none"):
            is_shared = who == "all" or (who == "some" and rank != 0)
            t = pycomm.empty(numel, shared=True) if is_shared else torch.empty(numel)
            for op, expected in ((ReduceOp.SUM, sum(range(ranks))), (ReduceOp.MAX, ranks - 1)):
                t.fill_(rank)
                pycomm.all_reduce(t, op)
                assert (t == expected).all(), (numel, who, op)
            t.fill_(1)
            pycomm.all_reduce(t, pycomm.premul_sum(rank + 1.0))
            assert (t == sum(range(ranks + 1))).all(), (numel, who)
    pair = pycomm.new_group([ranks - 1, 0])  # ranks that are numbered otherwise than on the host
    if rank in (0, ranks - 1):
        t = pycomm.empty(50_000, shared=True).fill_(rank + 1)
        pycomm.all_reduce(t, group=pair)
        assert (t == ranks + 1).all()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shared_buffers_alone_and_beside_private_ones(ranks: int) -> None:
    run_ranks(ranks, reduce_shared, ranks)


def scatter_in_place_on_one(rank: int) -> None:
    numel = 3_000_001
    for _ in range(3):
        whole = torch.arange(2.0 * numel) % 1000 + rank
        part = whole[rank * numel :][:numel] if rank == 0 else torch.empty(numel)
        pycomm.reduce_scatter_tensor(part, whole)
        assert torch.equal(part, torch.arange(2.0 * numel)[rank * numel :][:numel] % 1000 * 2 + 1)


def test_long_results_written_in_place_by_one_rank_and_not_by_the_other() -> None:
    run_ranks(2, scatter_in_place_on_one)


def reuse_heap(rank: int) -> None:
    addresses = set()
    for _ in range(200):
        t = pycomm.empty(1 << 20, shared=True)
        t[-1] = 1.0
        addresses.add(t.data_ptr())
        del t
    assert len(addresses) == 1
    several = [pycomm.empty(numel, shared=True).fill_(numel) for numel in (1, 100, 5000, 1 << 19, 1 << 20, 3)]
    assert all((t == t.numel()).all() for t in several)


def test_freed_shared_buffers_are_used_again() -> None:
    run_ranks(1, reuse_heap)


# -- many ------------------------------------------------------------------------------------------------------------


def make_groups(rank: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        with pycomm.new_group([0, 1, 2] if number % 2 else [2, 0]) as group:
            if group:
                t = torch.ones(3000)
                pycomm.all_reduce(t, group=group)
                assert (t == group.world_size).all()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_groups_come_and_go() -> None:
    run_ranks(3, make_groups)


def nest_groups(rank: int) -> None:
    half = pycomm.split(rank % 2)
    inner = pycomm.split(half.rank, group=half)
    again = pycomm.split(0, group=half)
    for group, size in ((half, 2), (inner, 1), (again, 2)):
        t = torch.ones(5000)
        pycomm.all_reduce(t, group=group)
        assert (t == size).all()


def leave_at_once(rank: int) -> None:
    for _ in range(10):
        with pycomm.new_group(list(range(pycomm.world_size()))) as group:
            one = torch.ones(1)
            pycomm.all_reduce(one, group=group, algorithm="ring")
            pycomm.all_reduce(one, group=group)
            assert one.item() == pycomm.world_size() ** 2


def test_a_rank_that_leaves_after_its_last_part_breaks_nothing() -> None:
    """More ranks than cores: who waits may see that a rank has left before it sees what that rank had sent."""
    run_ranks(8, leave_at_once)


def test_groups_of_groups() -> None:
    run_ranks(4, nest_groups)


def reduce_often(rank: int, calls: int) -> None:
    t = torch.zeros(4, dtype=torch.int64)
    for number in range(calls):
        t.fill_(number + rank)
        pycomm.all_reduce(t)
        if number % 1000 == 0:
            assert (t == 4 * number + 6).all()
    assert (t == 4 * (calls - 1) + 6).all()


@pytest.mark.slow
@pytest.mark.alone
def test_a_million_small_all_reduces() -> None:
    """10 s on two free cores; minutes beside other work, as each of four ranks waits for a core in every call."""
    run_ranks(4, reduce_often, 1_000_000, timeout_s=1500)


def reduce_thrice(rank: int) -> None:
    for numel in (1, 1000, 100_000):
        check_sum(numel=numel)
    pycomm.barrier()


def test_64_ranks() -> None:
    run_ranks(64, reduce_thrice)


def reduce_beyond_int32(rank: int) -> None:
    numel = 2**31 + 5
    t = torch.ones(numel, dtype=torch.int8)
    t[-1] = rank
    pycomm.all_reduce(t)
    assert t[:1000].eq(2).all() and t[2**31 - 500 : -1].eq(2).all() and t[-1] == 1


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib() -> None:
    run_ranks(2, reduce_beyond_int32)


# -- strangers -------------------------------------------------------------------------------------------------------


def names_of_sockets() -> set[str]:
    words = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return {word for word in words if word.startswith("@pycomm-")}


def test_strangers_at_the_socket_learn_nothing_and_stop_nothing() -> None:
    store = HashStore()
    results: list[Any] = [None, None]

    def join(rank: int) -> None:
        results[rank] = share_memory(store, "host", rank, 2, Patience(600.0))

    leader = threading.Thread(target=join, args=(0,))
    leader.start()
    name = bytes.fromhex(store.get("host/socket").decode().partition(":")[0])
    for message in (b"", b"x", os.urandom(40), os.urandom(168), os.urandom(5000)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(name)
            try:
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except ConnectionError:
                pass
    follower = threading.Thread(target=join, args=(1,))
    follower.start()
    leader.join(600)
    follower.join(600)
    assert results[0].pids == results[1].pids == (os.getpid(), os.getpid())
    assert results[0].cores == results[1].cores >= 1
    assert "@" + name[1:].decode() not in names_of_sockets(), "the socket outlives the handover"
    for memory in results:
        for fd in (memory.fd, *memory.pidfds):
            if fd >= 0:
                assert not os.get_inheritable(fd)
                os.close(fd)
