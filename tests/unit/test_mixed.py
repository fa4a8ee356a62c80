"""The mixed transport without a network: its tags, and what it joins by which transport."""

from __future__ import annotations

from typing import Any

import pytest

from pycomm.algorithms.executor import FIRST_TAG
from pycomm.topology import Topology
from pycomm.transport import mixed
from pycomm.transport.local import LocalTransport, LocalWorld


def test_announcements_have_a_tag_that_nobody_else_has() -> None:
    assert mixed.FIRST_OWN_TAG == FIRST_TAG - 1


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


def test_a_failure_to_join_the_hosts_gives_the_host_back() -> None:
    inner = LocalWorld(2).transports[0]

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        mixed._join(Topology.of_hosts("aab"), lambda: inner, fail)
    assert inner.rank in inner.hub.lost
