"""The reference transport, alone: matching, order, sizes, timeouts, ranks that go away."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pycomm
from harness import RanksFailed, run_ranks
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, ConfigError, PeerLostError, TransportError
from pycomm.transport import ConnectSpec
from pycomm.transport.local import LocalWorld, connect


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_messages_match_by_source_and_tag_in_order() -> None:
    a, b, c = LocalWorld(3).transports
    for number in (1.0, 2.0):
        a.isend(tensor(number), 2, tag=5)
    b.isend(tensor(3.0), 2, tag=5)
    a.isend(tensor(4.0), 2, tag=6)
    into = torch.zeros(1)
    for peer, tag, value, source in ((0, 6, 4.0, 0), (1, 5, 3.0, 1), (None, 5, 1.0, 0), (0, 5, 2.0, 0)):
        request = c.irecv(into, peer, tag)
        request.wait()
        assert (into.item(), request.source) == (value, source)  # type: ignore[attr-defined]


def test_a_posted_receive_is_filled_by_the_send() -> None:
    a, b = LocalWorld(2).transports
    first, second = torch.zeros(1), torch.zeros(1)
    requests = [b.irecv(first, 0), b.irecv(second, 0)]
    assert not requests[0].test()
    a.isend(tensor(1.0), 1)
    assert requests[0].test() and not requests[1].test()
    a.isend(tensor(2.0), 1)
    requests[1].wait()
    requests[1].wait()  # may be called again
    assert (first.item(), second.item()) == (1.0, 2.0)


def test_a_sent_buffer_may_be_written_at_once() -> None:
    a, b = LocalWorld(2).transports
    data = tensor(1.0)
    a.isend(data, 1).wait()
    data.fill_(9.0)
    into = torch.zeros(1)
    b.irecv(into, 0).wait()
    assert into.item() == 1.0


def test_sends_to_self() -> None:
    (a,) = LocalWorld(1).transports
    into = torch.zeros(2)
    a.isend(tensor(1.0, 2.0), 0)
    a.irecv(into, None).wait()
    assert into.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("send_first", [True, False])
def test_another_size_is_an_error_and_writes_nothing(send_first: bool) -> None:
    a, b = LocalWorld(2).transports
    into = torch.zeros(3)
    if send_first:
        a.isend(tensor(1.0), 1)
    request = b.irecv(into, 0, tag=0)
    if not send_first:
        a.isend(tensor(1.0), 1)
    with pytest.raises(CollectiveMismatchError, match="expected 12 bytes, got 4"):
        request.wait()
    assert into.tolist() == [0.0, 0.0, 0.0]


def test_timeout_says_what_was_waited_for() -> None:
    a, _ = LocalWorld(2, timeout_s=30.0).transports
    start = time.monotonic()
    with pytest.raises(
        CollectiveTimeoutError, match="rank 0 waited 0.05 s for a message of 4 bytes from rank 1 with tag 3"
    ):
        a.irecv(torch.zeros(1), 1, tag=3).wait(0.05)
    assert time.monotonic() - start >= 0.05


def test_a_lost_rank_wakes_those_who_wait_for_it() -> None:
    a, b, c = LocalWorld(3).transports
    from_b, from_any, from_c = (a.irecv(torch.zeros(1), peer) for peer in (1, None, 2))
    timer = threading.Timer(0.05, b.fail, ["it raised ValueError: no"])
    timer.start()
    with pytest.raises(PeerLostError, match=r"rank 1 is gone \(it raised ValueError: no\)") as caught:
        from_b.wait()
    assert caught.value.rank == 1
    for call in (
        from_any.wait,
        from_c.test,
        lambda: c.isend(tensor(1.0), 0),
        lambda: c.irecv(torch.zeros(1), 0).wait(),
    ):
        with pytest.raises(PeerLostError, match="rank 1 is gone"):  # who was told makes its part of no more calls
            call()


def test_who_is_gone_breaks_nothing_for_those_who_do_not_need_it() -> None:
    a, b, c, _ = LocalWorld(4).transports
    into = torch.zeros(1)
    from_any, from_c = a.irecv(torch.zeros(1), None), a.irecv(into, 2)
    a.irecv(torch.zeros(1), 1)  # which nobody waits for
    b.close()
    assert not from_any.test() and not from_c.test()
    c.isend(tensor(5.0), 0)
    from_any.wait()
    c.isend(tensor(6.0), 0)
    from_c.wait()
    assert into.item() == 6.0


def test_nobody_is_left_who_could_send() -> None:
    a, b, c = LocalWorld(3).transports
    from_any, from_c = a.irecv(torch.zeros(1), None), a.irecv(torch.zeros(1), 2)
    b.fail("it raised ValueError: no")
    assert not from_any.test() and not from_c.test()  # others may still send
    c.close()
    for request in (from_any, from_c):
        with pytest.raises(PeerLostError):
            request.wait()
    for call in (lambda: a.isend(tensor(1.0), 1), lambda: a.irecv(torch.zeros(1), 1).wait()):
        with pytest.raises(PeerLostError):
            call()


def test_what_a_rank_sent_before_it_left_still_arrives() -> None:
    a, b = LocalWorld(2).transports
    b.isend(tensor(5.0), 0)
    b.close()
    b.close()
    into = torch.zeros(1)
    a.irecv(into, 1).wait()
    assert into.item() == 5.0
    with pytest.raises(TransportError, match="had closed"):
        b.isend(tensor(1.0), 0)


def test_a_lost_rank_is_lost_in_groups_split_off() -> None:
    world = LocalWorld(3).transports
    with ThreadPoolExecutor(3) as ranks:  # the members wait for each other
        children = list(ranks.map(lambda transport: transport.split([2, 0], 1), world))
    assert children[1] is None and children[0] is not None and children[2] is not None
    assert (children[2].rank, children[0].rank, children[0].world_size) == (0, 1, 2)
    request = children[0].irecv(torch.zeros(1), 0)
    world[0].close()  # leaving the parent does not leave the child
    children[2].isend(tensor(1.0), 1)
    request.wait()
    world[2].fail("killed")
    with pytest.raises(PeerLostError):
        children[0].irecv(torch.zeros(1), 0).wait()


def test_connect_is_for_a_world_of_one() -> None:
    spec = ConnectSpec(rank=0, world_size=1, store=None, host_ids=("h",), timeout_s=5.0)  # type: ignore[arg-type]
    assert connect(spec).world_size == 1
    spec = ConnectSpec(rank=0, world_size=2, store=None, host_ids=("h", "h"), timeout_s=5.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LocalWorld"):
        connect(spec)
    with pytest.raises(ConfigError, match="at least 1"):
        LocalWorld(0)


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    pycomm.all_reduce(torch.ones(3))


def test_a_rank_that_raises_fails_the_others_call() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, one_raises, transport="local")
    text = str(caught.value)
    assert "[rank 1] Traceback" in text and "rank 1 has had enough" in text
    assert "PeerLostError: [all_reduce, call 1, group 'world', rank 0 of 3] rank 1 is gone" in text


def add_up(rank: int) -> float:
    total = torch.tensor([float(rank)])
    pycomm.all_reduce(total)
    pycomm.barrier()
    return total.item()


def swap_unevenly(rank: int) -> None:
    """The splits of so many ranks are longer than the frame that calls begin with."""
    splits = [(rank + peer) % 3 for peer in range(pycomm.world_size())]
    received = torch.empty(sum(splits))
    pycomm.all_to_all_single(received, torch.full((sum(splits),), float(rank)), splits, splits)
    assert received.tolist() == [peer for peer, split in enumerate(splits) for _ in range(split)]
    expected = [split + (rank == 5 and peer == 7) for peer, split in enumerate(splits)]
    with pytest.raises(CollectiveMismatchError, match="rank 7 sends 0 .* rank 5 expects 1 from rank 7"):
        pycomm.all_to_all_single(torch.empty(sum(expected)), torch.ones(sum(splits)), expected, splits)


def test_a_world_of_64() -> None:
    assert run_ranks(64, add_up, transport="local") == [64 * 63 / 2] * 64
    run_ranks(64, swap_unevenly, transport="local")
