"""Who is to blame that a group waits: a pure function of where each of its ranks stands.

[Note: the verdict]
A collective needs every rank. So of ranks that wait, those are the cause that (1) have ended or are stopped, (2) have
not entered the call that the others are in, or (3) have entered another one. If all are in the same call, (4) the cause
is a link that is full (``traffic.py``), or the rank at the end of the chain of who waits for whom, or the link to it.
A call that has failed and that all ranks have left is over: it explains its own errors alone, not those of what came
after, such as a message that is waited for.
But for a link's rate the text holds nothing that changes while the ranks stand still, so every rank that works it out
says the same; of an error the first rank's verdict is everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .traffic import Link, Traffic, full_links

__all__ = ["Standing", "Verdict", "find_culprit"]

_ALIKE = 2.0  # links are equally slow up to this factor
_MOST_LINKS = 4


class Standing(NamedTuple):
    """Where one rank of a group stands.

    ``state`` is the process's: "alive", "stopped", "dead", or "unknown" (on a host that did not answer). ``seq`` is the
    last call that it has begun in the group, ``call`` describes it, ``is_in`` says whether it is still in it.
    ``elsewhere`` is a call of another group that it is in; ``line`` where its Python stands; ``peer`` whom it waits
    for; ``traffic`` what its connections move, where that was asked.
    """

    rank: int
    pid: int
    state: str = "alive"
    seq: int = 0
    verb: str = ""
    call: str = ""
    is_in: bool = False
    has_failed: bool = False
    peer: int = -1
    elsewhere: str = ""
    line: str = ""
    traffic: Traffic = Traffic()


class Verdict(NamedTuple):
    """``kind`` is "dead", "stopped", "absent", "disagree", "slow", "idle" or "unknown"; ``ranks`` are the culprits."""

    kind: str
    ranks: tuple[int, ...]
    text: str


def find_culprit(group: str, standings: Sequence[Standing], failing: int = 0) -> Verdict:
    """Returns who keeps the ranks of ``group`` waiting; ``standings`` has one entry a rank, in rank order.

    ``failing`` is the number of the call whose error is being raised, 0 if that is no call's.
    """
    newest = max((each.seq for each in standings), default=0)
    in_call = [each for each in standings if each.seq == newest and (each.is_in or each.has_failed)]
    is_over = len(in_call) == len(standings) and not any(each.is_in for each in in_call)
    if not in_call or (is_over and newest != failing):
        lost = [each for each in standings if each.state in ("dead", "stopped")]
        if lost:
            return _of(lost[0].state, lost, [_describe(each, newest, "", group) for each in lost])
        return Verdict("idle", (), f"no rank is in a call of group {group!r}; its last was {_name(standings, newest)}")
    what = f"{in_call[0].verb} #{newest} on group {group!r}"
    gone = [each for each in standings if each.state == "dead"]
    stopped = [each for each in standings if each.state == "stopped"]
    absent = [each for each in standings if each.seq < newest]
    if gone:
        return _of("dead", gone, [_describe(each, newest, what, group) for each in gone])
    unknown = [each for each in standings if each.state == "unknown"]
    if stopped:
        return _of("stopped", stopped, [_describe(each, newest, what, group) for each in stopped])
    if [each for each in absent if each.state != "unknown"]:
        known = [each for each in absent if each.state != "unknown"]
        return _of("absent", known, [_describe(each, newest, what, group) for each in known])
    if unknown:
        return _of("unknown", unknown, [f"{_who(each)} does not answer" for each in unknown])
    calls = {each.call for each in in_call}
    if len(calls) > 1:
        rows = "; ".join(f"rank {each.rank} called {each.call}" for each in in_call)
        return Verdict("disagree", tuple(each.rank for each in in_call), f"the ranks disagree about #{newest}: {rows}")
    return _slowest(what, in_call)


def _of(kind: str, culprits: Sequence[Standing], sentences: Sequence[str]) -> Verdict:
    return Verdict(kind, tuple(each.rank for each in culprits), "; ".join(sentences))


def _who(standing: Standing) -> str:
    return f"rank {standing.rank} (pid {standing.pid})"


def _describe(standing: Standing, newest: int, what: str, group: str) -> str:
    """Says of one culprit what it did not do, and where it is instead."""
    who = _who(standing)
    inside = f"in {standing.verb} #{standing.seq}" if standing.verb else "in no call yet"
    if standing.state == "dead":
        after = inside if standing.is_in or standing.has_failed else f"after {standing.verb} #{standing.seq}"
        return f"{who} is dead; it ended {after if standing.verb else 'before its first call'} on group {group!r}"
    if standing.state == "stopped":
        after = inside if standing.is_in else "outside of pycomm's calls" if not standing.elsewhere else ""
        return f"{who} is stopped (SIGSTOP, or a debugger) {after or 'in ' + standing.elsewhere}"
    if standing.is_in:
        place = f"it is {inside}"
    elif standing.elsewhere:
        place = f"it is in {standing.elsewhere}"
    elif standing.verb:
        place = f"its last call was {standing.verb} #{standing.seq}, which has ended"
    else:
        place = "it has made no call on this group"
    return f"{who} never entered {what}: {place}{f', at {standing.line}' if standing.line else ''}"


def _slowest(what: str, standings: Sequence[Standing]) -> Verdict:
    """Everybody is in the same call: looks for links that are full, then for those that wait for nobody."""
    links = full_links({each.rank: each.traffic for each in standings})
    if links:
        return _slow_links(what, [link for link in links if link.bytes_per_s <= _ALIKE * links[0].bytes_per_s])
    waits_for = {each.rank: each.peer for each in standings if each.peer >= 0}
    ends = [each for each in standings if each.rank not in waits_for and each.rank in waits_for.values()]
    if len(ends) == 1:
        waiting = sorted(rank for rank, peer in waits_for.items() if peer == ends[0].rank)
        line = f", at {ends[0].line}" if ends[0].line else ""
        text = (
            f"everyone has entered {what}; {_who(ends[0])} waits for nobody{line}, and "
            f"{_ranks(waiting)} for it: that rank, or the link to it, is slow"
        )
        return Verdict("slow", (ends[0].rank,), text)
    pairs = ", ".join(f"{rank} waits for {peer}" for rank, peer in sorted(waits_for.items()))
    hint = f" ({pairs})" if pairs else ""
    return Verdict(
        "slow", (), f"everyone has entered {what}{hint}: the link is slow; `pycomm probe` measures all of them"
    )


def _slow_links(what: str, links: Sequence[Link]) -> Verdict:
    first, *others = [f"{link.sender}->{link.receiver}" for link in links[:_MOST_LINKS]]
    rates = [_rate(link.bytes_per_s) for link in links]
    text = f"everyone has entered {what}, but the link {first} moves {rates[0]}"
    text += "".join(f", and {each} {rate}" for each, rate in zip(others, rates[1:]))
    return Verdict("slow", tuple(sorted({rank for link in links for rank in link[:2]})), text)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s else "nothing"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"


def _name(standings: Sequence[Standing], newest: int) -> str:
    verb = next((each.verb for each in standings if each.seq == newest and each.verb), "none")
    return f"{verb} #{newest}" if newest else "none"
