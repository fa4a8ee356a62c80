"""Who counts as gone (pycomm/transport/_watch.py), where no process dies: ranks that close a group, in one process."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pycomm import CollectiveTimeoutError, TransportError
from pycomm.monitor import watch
from pycomm.transport import Patience
from pycomm.transport._notices import Notices
from pycomm.transport._processes import Processes
from pycomm.transport._tally import Message
from pycomm.transport._watch import Watch
from pycomm.transport._watched import WatchedTransport
from pycomm.transport._wording import NO_STATUS, Failure
from pycomm.transport.base import ANNOUNCEMENT_TAG

TAG = 7


def watches(number: int = 2) -> list[Watch]:
    """Returns the watches of ``number`` ranks that are all this process."""
    store = dist.HashStore()
    return [watch_of(dist.PrefixStore("watch", store), rank, number) for rank in range(number)]


def watch_of(store: Any, rank: int, number: int) -> Watch:
    return Watch(Processes(()), range(number), rank, Notices(store, rank, number))


def asked(watch: Watch, call: int, message: Message | None = None) -> str | None:
    """Returns how ``watch`` finds the group broken, in a wait long enough to ask the store."""
    watch.start_wait()
    watch._next_ask = 0.0
    failure = watch.look(call, message)
    return None if failure is None else failure.kind


@pytest.mark.parametrize(("made", "call", "expected"), [(3, 3, None), (4, 3, None), (2, 3, "closed")])
def test_a_call_misses_who_did_not_make_it(made: int, call: int, expected: str | None) -> None:
    mine, other = watches()
    assert asked(mine, call) is None
    other.close(made)
    assert asked(mine, call) == expected


def test_a_message_that_was_sent_is_awaited_though_its_sender_has_left() -> None:
    mine, other = watches()
    for _ in range(2):
        other.tally.send(0, TAG)
    other.close(0)
    for _ in range(2):
        assert asked(mine, 0, Message(1, TAG)) is None
        mine.tally.receive(1, TAG)
    assert asked(mine, 0, Message(1, TAG)) == "closed"


def test_a_message_from_any_rank_is_awaited_until_all_have_left_and_nothing_is_on_its_way() -> None:
    mine, second, third = watches(3)
    anybody = Message(-1, TAG)
    second.close(0)
    assert asked(mine, 0, anybody) is None
    third.tally.send(0, TAG)
    third.close(0)
    assert asked(mine, 0, anybody) is None
    mine.tally.receive(2, TAG)
    assert asked(mine, 0, Message(-1, ANNOUNCEMENT_TAG)) is None, "which nobody waits for in earnest"
    assert asked(mine, 0, anybody) == "closed"


def test_who_waits_in_vain_to_connect_says_so() -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1 of 2: .* did not come to connect within 0.05 s"):
        Watch.connect(dist.HashStore(), 1, 2, Patience(0.05))


def test_who_goes_on_leaves_word_of_what_it_has_done() -> None:
    mine, other = watches()
    assert not mine.is_owed_by(1, 3, None), "it has not said"
    other.tally.send(0, TAG)
    other.tally.receive(0, TAG)
    other.tell_done(2)
    assert mine.is_owed_by(1, 3, None) and not mine.is_owed_by(1, 2, None), "a collective"
    for peer in (1, -1):
        assert not mine.is_owed_by(1, 2, Message(peer, TAG)), "a message that is on its way"
    mine.tally.receive(1, TAG)
    for peer in (1, -1):
        assert mine.is_owed_by(1, 2, Message(peer, TAG))
    assert not mine.is_owed_by(1, 2, mine.tally.send(1, TAG)) and mine.is_owed_by(1, 2, mine.tally.send(1, TAG)), (
        "one is here"
    )
    other.tell_done(3)
    assert not mine.is_owed_by(1, 3, None)
    mine.close(3)
    assert not mine.is_owed_by(1, 4, None)


def test_that_somebody_goes_on_is_told_to_all_groups_once_one_is_broken() -> None:
    store = dist.HashStore()
    whole = [watch_of(dist.PrefixStore("watch", store), rank, 3) for rank in range(3)]
    pair = whole[0].split([0, 1], 0, "pair")
    whole[1].tell_making([0, 1], 5)
    assert not pair.has_anyone_gone_on(), "all make it together"
    pair._notices.job._next_ask_s = 0.0
    whole[1].announce("lost", 2, 0)
    whole[1].tell_making([], 0)
    assert not pair.has_anyone_gone_on()
    whole[1].tell_making([0, 1], 6)
    assert not pair.has_anyone_gone_on(), "it asks now and then"
    pair._notices.job._next_ask_s = 0.0
    assert pair.has_anyone_gone_on() and whole[0].has_anyone_gone_on()
    nobody = Watch.nobody(0)
    nobody.failure = Failure("lost", 1)
    nobody.tell_making([0], 5)
    assert not nobody.has_anyone_gone_on()


class ClosingStore:
    """A store whose watch another thread closes while it is asked."""

    def __init__(self, watch: Watch) -> None:
        self._notices, self._store = watch._notices, watch._notices._kept.store

    def check(self, keys: list[str]) -> bool:
        self._notices.close()
        return self._store.check(keys)

    def add(self, key: str, number: int) -> int:
        self._notices.close()
        return self._store.add(key, number)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def test_an_observer_that_raises_keeps_nobody_from_the_end(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def raises() -> None:
        raise ValueError("on purpose")

    watch.before_stop(lambda: called.append("the other"))
    watch.before_stop(raises)  # called first
    watch.stop()
    assert called == ["the other"]
    assert "on purpose" in caplog.text and "raises" in caplog.text


def test_a_watch_may_be_closed_while_it_asks() -> None:
    mine, other, third = watches(3)
    third.announce("aborted", 1, 5)
    mine._notices._kept.store, other._notices._kept.store = ClosingStore(mine), ClosingStore(other)
    assert asked(mine, 0) == "aborted"
    other.announce("lost", 0, 6)
    assert other.failure is not None and other.failure.kind == "aborted", "who was first is right"


class SlowlyTold:
    """The store of a rank that is asked for what broke the group while another one is about to say it."""

    def __init__(self, store: Any, first: int) -> None:
        self._store, self._first = store, first
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        if self.looks == 3:
            self._store.set("failure", json.dumps(Failure("timeout", self._first, 0, NO_STATUS, 5)))
        return self._store.check(keys)


def test_who_is_second_to_find_the_group_broken_waits_for_the_word_of_the_first() -> None:
    mine, other = watches()
    other._notices._kept.store.add("failures", 1)
    mine._notices._kept.store = SlowlyTold(mine._notices._kept.store, 1)
    mine.announce("lost", 1, 6)
    assert mine.failure is not None and mine.failure.kind == "timeout", "and a third would find that this one has gone"


@pytest.mark.parametrize("tag", [TAG, TAG + 1])
def test_a_message_that_was_not_sent_is_not_awaited(tag: int) -> None:
    mine, other, third = watches(3)
    other.tally.send(0, TAG + 2)
    other.tally.send(2, tag)
    other.close(0)
    assert asked(mine, 0, Message(2, tag)) is None, "the third rank has not left"
    assert asked(mine, 0, Message(1, tag)) == "closed"
    assert asked(third, 0, Message(1, tag)) is None


def test_a_send_is_done_with_who_received_it() -> None:
    mine, other = watches()
    first, second = mine.tally.send(1, TAG), mine.tally.send(1, TAG)
    other.tally.receive(0, TAG)
    other.close(0)
    assert asked(mine, 0, first) is None
    assert asked(mine, 0, second) == "closed"


def test_a_wait_goes_on_for_a_message_that_its_peer_took_before_it_left() -> None:
    """Whichever thread of this rank has found the group broken: another one may not have heard yet of the message."""
    mine, other = watches()
    taken, not_taken = mine.tally.send(1, TAG), mine.tally.send(1, TAG)
    other.tally.receive(0, TAG)
    other.close(1)
    assert mine.explain(0, 1).kind == "closed" and mine.has_taken(taken) and not mine.has_taken(not_taken)
    transport: Any = SimpleNamespace(watch=mine, calls=1, failed=lambda _doing, failure: TransportError(failure.kind))
    transport._look_why = partial(WatchedTransport._look_why, transport)  # for who gave a call up, which nobody did
    check = partial(WatchedTransport.check, transport, "sending")
    check(taken, lambda: False)
    check(not_taken, lambda: True)
    with pytest.raises(TransportError, match="closed"):
        check(not_taken, lambda: False)


def test_a_connection_that_broke_is_explained_by_who_left() -> None:
    mine, other = watches()
    other.tally.send(0, TAG)
    other.close(0)
    assert asked(mine, 0, Message(1, TAG)) is None
    assert mine.explain(0, 1).kind == "closed"


def test_who_leaves_because_another_left_says_so() -> None:
    mine, other, third = watches(3)
    other.close(0)
    assert asked(third, 1) == "closed"
    third.close(1)
    failure = mine.search(1, 2)
    assert failure is not None and failure.rank == 1, "the third rank made the call"


def test_who_leaves_is_told_to_those_who_do_not_wait_for_it() -> None:
    mine, other, third = watches(3)
    other.close(0)
    assert asked(third, 0, Message(0, TAG)) is None, "nobody waits for it"
    assert mine.search(0, 1) == Failure("closed", 1)
    assert asked(third, 0, Message(0, TAG)) == "closed"
    assert third.failure == Failure("closed", 1)


def test_a_message_that_comes_while_it_is_looked_for_breaks_nothing() -> None:
    """Its sender has left, and another thread counts the message before this one comes to compare."""
    mine, other = watches()
    other.tally.send(0, TAG)
    other.close(0)
    mine.tally.receive(1, TAG)
    transport: Any = SimpleNamespace(watch=mine, calls=0)
    assert asked(mine, 0, Message(1, TAG)) == "closed"
    mine._next_ask = 0.0
    WatchedTransport.check(transport, "receiving", Message(1, TAG), lambda: True)
    assert mine.failure is None


def test_a_new_tag_in_each_step_takes_no_more_memory() -> None:
    mine, other = watches()
    for step in range(100_000):
        mine.tally.send(1, step)
        other.tally.receive(0, step)
    assert len(mine.tally._sent) == len(other.tally._received) == 1 << 15
    other.close(0)
    assert asked(mine, 0, mine.tally.send(1, 7)) == "closed"


def test_numbers_of_messages_do_not_mix_tags_and_peers() -> None:
    (mine, _) = watches()
    assert [mine.tally.send(1, TAG), mine.tally.send(0, TAG), mine.tally.send(1, TAG), mine.tally.send(1, TAG + 1)] == [
        Message(1, TAG, 0),
        Message(0, TAG, 0),
        Message(1, TAG, 1),
        Message(1, TAG + 1, 0),
    ]
