"""What ranks leave word of in a store (pycomm/transport/_notices.py), which may go with the process that keeps it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from pycomm.transport._crossings import Making
from pycomm.transport._notices import Notices
from pycomm.transport._tally import Done
from pycomm.transport._wording import Failure

DONE = Done(3, {"0/7": 2}, {})


def test_a_store_that_has_gone_says_nothing_and_raises_nothing() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", kept.port, timeout=timedelta(seconds=5)) for _ in range(2)]
    mine, other = (Notices(store, rank, 2) for rank, store in enumerate(stores))
    other.say_closed(DONE)
    other.say_done(DONE)
    other.say_making([0, 1], 5)
    other.say_ended(1)
    assert mine.has_news() and mine.is_open
    assert mine.closed() == {1: DONE} and mine.done_by(1) == DONE
    assert mine.made_by(1) == Making(frozenset({0, 1}), 5) and mine.ended() == {1}
    mine.close()
    assert not mine.is_open and mine.ended() == {1}, "groups are made of it yet"

    del kept
    for notices in (mine, other):
        assert notices.ended() == frozenset() and notices.made_by(1) == Making()
        notices.say_making([0], 6)
        assert not notices.is_open and not notices.has_news() and notices.closed_by(1) is None
        assert notices.declare(Failure("lost", 1)) == Failure("lost", 1), "at once: nobody else will say it"
    third = Notices(stores[0], 0, 2)
    assert third.is_open, "nobody has asked yet"
    assert third.declare(Failure("lost", 1)) == Failure("lost", 1) and not third.is_open
    third.job.go_on()
    assert not third.job.has_anyone_gone_on()
