"""Which rank comes late, and whether it is the rank or the link that is slow.

[Note: late and slow]
A collective ends soon after its last rank has come. How long after the first one each rank came is that rank's
*lateness*: what it did before the call took longer. What is left, from the last arrival to the end, is the *transfer*:
it is long where a link is slow, and no rank is late then. Both are looked at by median and median absolute deviation
over a window of calls, which a few odd calls do not move (Leys et al., "Detecting outliers", 2013). Ranks that take
turns at being late, as happens by chance, are no stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ..collectives.board import group_key
from ..collectives.context import resolve
from .boards import Board
from .timeline import Span, collect, matched, spans_of
from .watch import each_second, own_board, peer_boards

if TYPE_CHECKING:
    from ..collectives.group import Group

__all__ = ["Lateness", "StragglerReport", "find_stragglers", "on_straggler", "stragglers"]

_TO_SIGMA = 1.4826  # of a normal distribution: sigma / MAD
_DEVIATIONS = 3.0
_LEAST_US = 50.0  # less is what any two cores differ by
_LEAST_SHARE = 0.1  # of the time from call to call: less costs nobody anything
_FEWEST_CALLS = 8


class Lateness(NamedTuple):
    """How late one rank comes, over a window of calls: median and MAD in us, and in which share of calls it is last."""

    rank: int
    median_us: float
    mad_us: float
    last_share: float


class StragglerReport(NamedTuple):
    """``slow_ranks`` come late again and again. ``transfer_us`` is the median time from the last arrival to the end.

    ``slow_transfers`` says that calls now take much longer after the last arrival than the middle half of the window
    does: a link, not a rank. ``ranks`` has every rank's lateness; empty if there were too few calls.
    """

    calls: int
    ranks: tuple[Lateness, ...]
    slow_ranks: tuple[int, ...]
    transfer_us: float
    slow_transfers: bool

    def __str__(self) -> str:
        if not self.ranks:
            return f"too few calls to tell ({self.calls})"
        if self.slow_ranks:
            rows = [each for each in self.ranks if each.rank in self.slow_ranks]
            late = ", ".join(f"rank {row.rank} comes {row.median_us:.0f} us late" for row in rows)
            return f"slow rank: {late} (median of {self.calls} calls; the transfer takes {self.transfer_us:.0f} us)"
        if self.slow_transfers:
            return f"slow link: no rank is late, but the transfers have become slower than {self.transfer_us:.0f} us"
        return f"no straggler in {self.calls} calls (the transfer takes {self.transfer_us:.0f} us)"


def find_stragglers(spans: Iterable[Span], world_size: int, window: int = 256) -> StragglerReport:
    """Returns who comes late in the last ``window`` collectives that all ``world_size`` ranks of a group finished."""
    calls = [each for each in matched(spans) if len(each) == world_size][-window:]
    if len(calls) < _FEWEST_CALLS:
        return StragglerReport(len(calls), (), (), 0.0, False)
    late: dict[int, list[float]] = {span.rank: [] for span in calls[0]}
    was_last = dict.fromkeys(late, 0)
    transfers = []
    for call in calls:
        first_ns = min(span.start_ns for span in call)
        last = max(call, key=lambda span: span.start_ns)
        was_last[last.rank] += 1
        transfers.append((min(span.end_ns for span in call) - last.start_ns) / 1e3)
        for span in call:
            late[span.rank].append((span.start_ns - first_ns) / 1e3)
    ranks = tuple(
        Lateness(rank, median(values), _mad(values), was_last[rank] / len(calls))
        for rank, values in sorted(late.items())
    )
    period_us = (calls[-1][0].start_ns - calls[0][0].start_ns) / 1e3 / len(calls)
    bar_us = max(_LEAST_US, _LEAST_SHARE * period_us)
    slow = tuple(each.rank for each in ranks if _is_slow(each, ranks, bar_us))
    return StragglerReport(len(calls), ranks, slow, median(transfers), not slow and _has_slowed(transfers))


def _is_slow(one: Lateness, ranks: Sequence[Lateness], bar_us: float) -> bool:
    others = [each for each in ranks if each.rank != one.rank]
    usual_us = median(each.median_us for each in others)
    noise_us = _DEVIATIONS * _TO_SIGMA * median(each.mad_us for each in others)
    return one.median_us > usual_us + max(bar_us, noise_us) and one.last_share > 1 / len(ranks)


def _has_slowed(transfers: Sequence[float]) -> bool:
    """Whether the latest eighth takes far longer than what was usual before."""
    cut = max(4, len(transfers) // 8)
    before, now = transfers[:-cut], transfers[-cut:]
    usual = median(before)
    return median(now) > usual + max(_DEVIATIONS * _TO_SIGMA * _mad(before), usual, _LEAST_US)


def _mad(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def stragglers(group: Group | None = None, window: int = 256) -> StragglerReport | None:
    """Returns the report of the ranks of ``group`` on rank 0, None elsewhere. Called by every rank.

    On one host ``pycomm top`` and ``on_straggler`` have the same without a call.
    """
    found = resolve(group)
    spans = collect(found)
    if found.rank != 0:
        return None
    members = group_key(found.name, found.ranks)
    return find_stragglers([span for span in spans if span.members == members], found.world_size, window)


def stragglers_on(boards: Sequence[Board], members: int, world_size: int, window: int = 256) -> StragglerReport:
    """Returns the report of a group all of whose ranks have one of ``boards``: those of one host."""
    spans = [span for board in boards for span in spans_of(board) if span.members == members]
    return find_stragglers(spans, world_size, window)


def on_straggler(callback: Callable[[str, StragglerReport], None]) -> Callable[[], None]:
    """Calls ``callback(group_name, report)`` in the monitor's thread, once a second while a rank of this host's ranks
    comes late again and again; returns what stops that. Groups whose ranks are on several hosts are left out.
    """

    def look() -> None:
        own = own_board()
        boards = [*peer_boards(), *([] if own is None else [own])]
        for group in () if own is None else own.groups():
            if group.is_open and 1 < group.world_size <= len(boards):
                report = stragglers_on(boards, group.members, group.world_size)
                if report.slow_ranks:
                    callback(group.name, report)

    return each_second(look)
