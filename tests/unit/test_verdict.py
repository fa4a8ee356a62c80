"""The verdict: a pure function of where the ranks stand. One row a symptom."""

from __future__ import annotations

from typing import Any

import pytest

from pycomm.monitor.traffic import Flow, Traffic
from pycomm.monitor.verdict import Standing, find_culprit

CALL = "all_reduce(SUM, float32, 8 elements)"


def standing(rank: int, **changes: Any) -> Standing:
    """A rank that waits in all_reduce #412 for rank 3."""
    usual = Standing(rank, 100 + rank, "alive", 412, "all_reduce", CALL, is_in=True, peer=3)
    return usual._replace(**changes)


OUTSIDE = {"seq": 411, "verb": "broadcast", "is_in": False, "peer": -1}
CASES = {
    "absent, outside": (
        {"line": "train.py:88 in load", **OUTSIDE},
        "absent",
        "rank 3 (pid 103) never entered all_reduce #412 on group 'dp': its last call was broadcast #411, which has "
        "ended, at train.py:88 in load",
    ),
    "absent, in the call before": (
        {**OUTSIDE, "is_in": True},
        "absent",
        "rank 3 (pid 103) never entered all_reduce #412 on group 'dp': it is in broadcast #411",
    ),
    "absent, in another group": (
        {**OUTSIDE, "elsewhere": "all_gather_single #7 on group 'tp'"},
        "absent",
        "rank 3 (pid 103) never entered all_reduce #412 on group 'dp': it is in all_gather_single #7 on group 'tp'",
    ),
    "absent from the first call on": (
        {**OUTSIDE, "seq": 0, "verb": ""},
        "absent",
        "rank 3 (pid 103) never entered all_reduce #412 on group 'dp': it has made no call on this group",
    ),
    "dead inside": ({"state": "dead"}, "dead", "rank 3 (pid 103) is dead; it ended in all_reduce #412 on group 'dp'"),
    "dead outside": (
        {"state": "dead", **OUTSIDE},
        "dead",
        "rank 3 (pid 103) is dead; it ended after broadcast #411 on group 'dp'",
    ),
    "stopped": (
        {"state": "stopped", **OUTSIDE},
        "stopped",
        "rank 3 (pid 103) is stopped (SIGSTOP, or a debugger) outside of pycomm's calls",
    ),
    "slow": (
        {"peer": -1},
        "slow",
        "everyone has entered all_reduce #412 on group 'dp'; rank 3 (pid 103) waits for nobody, and ranks 0, 1, 2 wait "
        "for it: that rank, or the link to it, is slow",
    ),
    "unknown": ({"state": "unknown", "pid": 0, "seq": 0}, "unknown", "rank 3 (pid 0) does not answer"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_culprit_is_named(name: str) -> None:
    changes, kind, text = CASES[name]
    verdict = find_culprit("dp", [*(standing(rank) for rank in range(3)), standing(3, **changes)])
    assert (verdict.kind, verdict.ranks, verdict.text) == (kind, (3,), text)


def test_ranks_that_disagree_are_named_with_what_they_call() -> None:
    other = CALL.replace("SUM", "MAX")
    verdict = find_culprit("dp", [standing(0, peer=1), standing(1, call=other, peer=0)])
    assert verdict == (
        "disagree",
        (0, 1),
        f"the ranks disagree about #412: rank 0 called {CALL}; rank 1 called {other}",
    )


def test_a_failed_call_that_all_have_left_explains_its_own_errors_alone() -> None:
    left = [standing(rank, is_in=False, has_failed=True, call=f"{CALL} of {rank}", peer=-1) for rank in range(2)]
    assert find_culprit("dp", left).kind == find_culprit("dp", left, 413).kind == "idle"
    assert find_culprit("dp", left, 412).kind == "disagree"
    assert find_culprit("dp", [left[0], left[1]._replace(is_in=True)]).kind == "disagree", "one is still in it"
    assert find_culprit("dp", [*left, standing(2, state="stopped", **OUTSIDE)]).kind == "stopped"
    assert find_culprit("dp", [*left, standing(2, **OUTSIDE)]).ranks == (2,), "who never came to it is missed still"


def test_a_cycle_of_waits_is_a_slow_link_and_nobody_in_a_call_is_idle() -> None:
    verdict = find_culprit("dp", [standing(0, peer=1), standing(1, peer=0)])
    assert verdict.kind == "slow" and "0 waits for 1, 1 waits for 0" in verdict.text
    verdict = find_culprit("dp", [standing(rank, is_in=False) for rank in range(2)])
    assert verdict.kind == "idle" and "all_reduce #412" in verdict.text
    assert find_culprit("dp", [standing(0, is_in=False), standing(1, is_in=False, state="dead")]).kind == "dead"


def test_of_links_that_are_full_the_slow_ones_are_named_with_their_rate() -> None:
    """Rank r sends to rank r + 1 over a connection from port r, and to the store over another one."""
    rates = {0: 2.9e9, 1: 3.0e6, 2: 4.1e6, 3: 1e6}
    standings = []
    for rank, rate in rates.items():
        ends = f"h:{rank}", f"h:{(rank - 1) % 4 + 10}", f"h:{rank + 20}"
        flows = Flow(f"h:{rank + 10}", rate, rank != 3), Flow("store:1", 5.0, True)
        standings.append(standing(rank, peer=-1, traffic=Traffic(ends, flows)))
    text = "everyone has entered all_reduce #412 on group 'dp', but the link 1->2 moves 3 MB/s, and 2->3 4.1 MB/s"
    assert find_culprit("dp", standings) == ("slow", (1, 2, 3), text)
