"""The mixed transport without a network: its tags, and what it joins by which transport."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pycomm import CollectiveTimeoutError
from pycomm.algorithms.executor import FIRST_TAG
from pycomm.topology import Topology
from pycomm.transport import _mixed_column, _mixed_shards, mixed
from pycomm.transport._mixed_column import Column
from pycomm.transport._mixed_reduce import ColumnReduction
from pycomm.transport.base import ANNOUNCEMENT_TAG, FIRST_OWN_TAG, Request
from pycomm.transport.local import LocalTransport, LocalWorld
from pycomm.types import ReduceOp


def test_nobody_shares_a_tag() -> None:
    assert FIRST_OWN_TAG + 2 == ANNOUNCEMENT_TAG == FIRST_TAG - 1


@pytest.mark.parametrize(
    "hosts, expected", [("aaa", "inner"), ("abc", "outer"), ("aab", "both"), ("abab", "both"), ("a", "inner")]
)
def test_one_transport_where_one_carries_everything(hosts: str, expected: str) -> None:
    made: dict[str, LocalTransport] = {}

    def make(name: str, world_size: int) -> Any:
        made[name] = LocalWorld(world_size).transports[0]
        return made[name]

    topology = Topology.of_hosts(hosts)
    joined = mixed._join(topology, lambda: make("inner", len(topology.hosts[0])), lambda: make("outer", len(hosts)))
    if expected == "both":
        assert isinstance(joined, mixed.MixedTransport)
        assert (joined.inner, joined.outer) == (made["inner"], made["outer"])
    else:
        assert joined is made[expected] and len(made) == 1


def test_receives_take_messages_in_the_order_in_which_they_were_asked_for() -> None:
    """Also where the first is from any rank, and nobody has sent yet."""
    inners, outers = LocalWorld(2, 20.0).transports, LocalWorld(3, 20.0).transports
    topology = Topology.of_hosts("aab")
    receiver, sender = (mixed.MixedTransport(inners[rank], outers[rank], topology) for rank in (0, 1))
    boxes = [torch.zeros(1) for _ in range(4)]
    first = receiver.irecv(boxes[0], None, 7)
    second = receiver.irecv(boxes[1], 1, 7)
    third = receiver.irecv(boxes[2], None, 7)
    other_tag = receiver.irecv(boxes[3], 1, 8)
    with pytest.raises(CollectiveTimeoutError, match="from rank 1 with tag 7"):  # which ends nothing
        second.wait(0.01)
    assert not third.test()
    for tag, value in ((8, 4.0), (7, 1.0), (7, 2.0), (7, 3.0)):
        sender.isend(torch.tensor([value]), 0, tag).wait()
    for request in (third, second, other_tag, first):
        request.wait()
        assert request.source == 1
    assert [float(box) for box in boxes] == [1.0, 2.0, 3.0, 4.0]
    receiver.close()


def test_a_failure_to_join_the_hosts_gives_the_host_back() -> None:
    inner = LocalWorld(2).transports[0]

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        mixed._join(Topology.of_hosts("aab"), lambda: inner, fail)
    assert inner.rank in inner.hub.lost


class Alone:
    """A host of one rank."""

    world_size = 1
    rank = 0

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> None:
        output.copy_(input.view(-1))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> None:
        output.view(-1).copy_(input)


class Sent(Request):
    """A message that is read from the sender's memory when its receiver waits for it, so as late as can be."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.has_arrived = threading.Event()

    def test(self) -> bool:
        return self.has_arrived.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.has_arrived.wait(timeout_s)

    def settle(self) -> None:
        assert self.has_arrived.is_set(), "nobody knows that it has arrived"


class Awaited(Request):
    def __init__(self, flat: torch.Tensor, messages: queue.Queue[weakref.ref[Sent]]) -> None:
        self._flat = flat
        self._messages = messages

    def test(self) -> bool:
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> None:
        message = self._messages.get(timeout=timeout_s)()
        assert message is not None, "the sender has lost the handle of a message on its way"
        self._flat.copy_(message.flat)
        message.has_arrived.set()


@pytest.mark.parametrize("hosts", [2, 3])
def test_what_was_sent_is_kept_until_it_has_arrived(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and its handle, in many segments; and the results are right."""
    monkeypatch.setattr(_mixed_column, "_SHARD_BYTES", (64, 64))
    cables: defaultdict[Any, queue.Queue[weakref.ref[Sent]]] = defaultdict(queue.Queue)

    def run(host: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        def start(flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Request:
            if not is_send:
                return Awaited(flat, cables[peer, host, tag])
            message = Sent(flat)
            cables[host, peer, tag].put(weakref.ref(message))
            return message

        column = Column(Alone(), range(hosts), host, start)  # type: ignore[arg-type]
        results = []
        for numel in (0, 1, 7, 16 * 23 + 5, 16 * 9):
            ramp, whole = torch.arange(numel, dtype=torch.float32), torch.empty(hosts * numel)
            _mixed_shards.all_gather(column, whole, ramp * (host + 1), 60.0)
            results.append((whole, torch.cat([ramp * (each + 1) for each in range(hosts)])))
            total = hosts * (hosts + 1) / 2
            flat = ramp * (host + 1)
            if numel:
                ColumnReduction(column, flat, flat, ReduceOp.SUM, 1.0).run(60.0)
                results.append((flat, ramp * total))
            wide = torch.arange(hosts * numel, dtype=torch.float32)
            mine = wide[host * numel :][:numel]
            expected = mine * total
            wide *= host + 1
            _mixed_shards.reduce_scatter(column, mine, wide, ReduceOp.SUM, 1.0, 60.0)  # in place
            results.append((mine, expected))
        return results

    with ThreadPoolExecutor(hosts) as pool:
        for results in pool.map(run, range(hosts)):
            for found, expected in results:
                assert torch.equal(found, expected)
