"""The board and the figures that are read from it: classes, sums, quantiles, windows, exports, timeline, stragglers."""

from __future__ import annotations

import io
import json
import os
import time
from typing import Any

import pytest
from rich.console import Console

from pycomm.cli import _jobs
from pycomm.cli.top import Rates, frame, share_in_calls
from pycomm.monitor import bandwidth, export
from pycomm.monitor.boards import Board, name_on_board
from pycomm.monitor.lateness import find_stragglers
from pycomm.monitor.timeline import Span, spans_of, trace_events
from pycomm.ops import native

ALL_REDUCE, BROADCAST, FLOAT32 = 1, 4, 11
OFF_NS = 1_000_000  # what a young board's clock may be off: see Board.ns_per_tick


class Written:
    """A board of this process with one group, and the view of a reader."""

    def __init__(self, world_size: int = 4) -> None:
        self.native = native().Board()
        self.native.set_job(7, 1, world_size)
        self.log = self.native.add_group("dp", "shm", 99, 1, world_size)
        self.view = Board(os.dup(self.native.fd))
        self.seq = 0

    def call(self, verb: int = ALL_REDUCE, nbytes: int = 1024, sleeps_s: float = 0.0, wire_bytes: int = 0) -> None:
        self.seq += 1
        assert self.log.begin(verb, 0, FLOAT32, 0, False, 0, nbytes // 4, nbytes, self.seq)
        time.sleep(sleeps_s)
        self.log.end(wire_bytes, False)

    def snapshot(self) -> list[bandwidth.CollectiveStats]:
        return bandwidth.snapshot(self.view)


@pytest.fixture
def board() -> Any:
    made = Written()
    yield made
    made.view.close()


def test_the_header_says_whose_board_it_is(board: Written) -> None:
    view = board.view
    assert (view.pid, view.job, view.rank, view.world_size, view.is_alive) == (os.getpid(), 7, 1, 4, True)
    (group,) = view.groups()
    assert (group.name, group.transport, group.members, group.rank, group.world_size) == ("dp", "shm", 99, 1, 4)


def test_a_closed_group_leaves_its_place_for_good(board: Written) -> None:
    def add(name: str) -> Any:
        return board.native.add_group(name, "shm", 1, 0, 1)

    others = [add("filler")]
    while others[-1] is not None:
        others.append(add("filler"))
    board.log.close()
    heir = add("heir")
    del board.log  # its end closed the heir's place
    assert heir is not None and "heir" in {group.name for group in board.view.groups() if group.is_open}


def test_a_call_under_way_is_seen_with_whom_it_waits_for_and_its_end(board: Written) -> None:
    before_ns = time.monotonic_ns()
    board.log.begin(ALL_REDUCE, 3, FLOAT32, board.native.intern("ring"), True, 0, 8, 32, 412)
    after_ns = time.monotonic_ns()
    board.log.waits_for(3)
    (group,) = board.view.groups()
    record = board.view.latest(group)
    assert record is not None and group.seq == 412 and group.ended == 0
    assert (record.describe(), record.algorithm) == ("all_reduce(MAX, float32, 8 elements)", "ring")
    assert record.peer == 3 and record.end_ns == 0
    assert before_ns - OFF_NS <= record.start_ns <= after_ns + OFF_NS
    assert not board.log.begin(BROADCAST, 0, FLOAT32, 0, False, 0, 1, 4, 1), "a call inside a call is not another one"
    board.log.end(0, True)
    record = board.view.latest(group)
    assert record is not None and record.end_ns >= record.start_ns and record.has_failed and record.peer == 3
    assert board.snapshot() == [], "a failed call says nothing of bandwidth"


def test_the_last_4096_calls_are_kept(board: Written) -> None:
    for _ in range(5000):
        board.call()
    records = board.view.records()
    assert [record.seq for record in records] == list(range(5001 - 4096, 5001)) and board.view.calls == 5000
    assert board.snapshot()[0]["calls"] == 5000


def test_calls_are_summed_by_verb_and_size_class(board: Written) -> None:
    for nbytes in (1024, 1000, 1025):
        board.call(nbytes=nbytes)
    board.call(verb=BROADCAST, wire_bytes=10)
    entries = board.snapshot()
    assert [(e["verb"], e["max_bytes"], e["calls"], e["bytes"]) for e in entries] == [
        ("all_reduce", 1024, 2, 2024),
        ("all_reduce", 4096, 1, 1025),
        ("broadcast", 1024, 1, 1024),
    ]
    assert entries[0]["wire_bytes"] == 2024 * 1.5 and entries[2]["wire_bytes"] == 10
    assert entries[0]["busbw_gbps"] == pytest.approx(entries[0]["algbw_gbps"] * 1.5)
    assert entries[0]["window_calls"] == 2 and (entries[0]["window_algbw_gbps"] or 0) > 0


@pytest.mark.parametrize(
    ("nbytes", "max_bytes"), [(0, 0), (1, 1), (4, 4), (5, 16), (16, 16), (17, 64), (64 << 20, 4**13)]
)
def test_size_classes_end_at_powers_of_four(board: Written, nbytes: int, max_bytes: int) -> None:
    board.call(nbytes=nbytes)
    (entry,) = board.snapshot()
    assert entry["max_bytes"] == max_bytes and entry["window_calls"] == 1


def test_quantiles_are_those_of_the_calls() -> None:
    """Against exact quantiles: buckets as bucket_of makes them, by its own formula."""
    values = [3, 9, 17, 100, 1000, 1001, 5000, 70_000, 70_001, 1 << 33]
    buckets = [0] * native().board_layout()["buckets"]
    for value in values:
        octave = value.bit_length() - 1
        buckets[value if value < 8 else (octave - 2) * 8 + (value >> (octave - 3) & 7)] += 1
    for share, exact in ((0.1, 3), (0.5, 1000), (0.9, 70_001), (1.0, 1 << 33)):
        (found,) = bandwidth._quantiles(bandwidth.np.array(buckets), (share,))
        assert found == pytest.approx(exact, rel=0.067), share


def test_times_are_those_of_the_clock(board: Written) -> None:
    for _ in range(5):
        board.call(sleeps_s=0.01)
    (entry,) = board.snapshot()
    assert 9_000 < entry["p50_us"] <= entry["p99_us"] * 1.001 and 10_000 < entry["mean_us"] <= entry["most_us"]
    assert entry["total_us"] == pytest.approx(5 * entry["mean_us"])


def test_the_share_of_time_in_calls_is_that_of_the_interval(board: Written) -> None:
    """A call that is under way counts, and of one that has ended only what lies in the interval."""
    board.log.begin(ALL_REDUCE, 0, FLOAT32, 0, False, 0, 8, 32, 1)
    time.sleep(0.1)
    half_ns = time.monotonic_ns()
    time.sleep(0.1)
    (group,) = board.view.groups()
    assert share_in_calls(board.view, group, half_ns) == pytest.approx(1.0, abs=0.05)
    ending_ns = time.monotonic_ns()
    board.log.end(0, False)
    end_ns = time.monotonic_ns()
    time.sleep(0.1)
    assert share_in_calls(board.view, group, end_ns) == pytest.approx(0.0, abs=0.05)
    looking_ns = time.monotonic_ns()  # a busy machine may stop this process between any two lines
    share, looked_ns = share_in_calls(board.view, group, half_ns), time.monotonic_ns()
    least, most = (ending_ns - half_ns) / (looked_ns - half_ns), (end_ns - half_ns) / (looking_ns - half_ns)
    assert least - 0.05 <= share <= most + 0.05


def test_the_share_of_time_is_that_of_the_calls_that_are_kept(board: Written) -> None:
    since_ns = time.monotonic_ns()
    time.sleep(0.1)
    for _ in range(5000):
        board.call()
    board.call(sleeps_s=0.1)
    (group,) = board.view.groups()
    records = board.view.records()
    oldest_ns = records[0].start_ns
    assert oldest_ns > since_ns + 90e6 and len(records) < 5000
    inside_ns = sum(each.end_ns - each.start_ns for each in records)
    looking_ns = time.monotonic_ns()  # see above
    share, looked_ns = share_in_calls(board.view, group, since_ns), time.monotonic_ns()
    least, most = inside_ns / (looked_ns - oldest_ns), inside_ns / (looking_ns - oldest_ns)
    assert least - 0.05 <= share <= most + 0.05


def test_the_table_shows_what_was_seen(board: Written) -> None:
    board.call(nbytes=1 << 20)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(bandwidth.table(board=board.view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "group dp, algorithm native, transport shm" in text.splitlines()[0] and "GB/s" in text
    row = next(line for line in text.splitlines() if "all_reduce" in line).split()
    assert row[:5] == ["all_reduce", "1", "MiB", "1", "1.0"]


def test_the_table_fits_a_terminal_however_long_a_call_took(board: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    board.call(nbytes=1 << 28)
    (entry,) = board.snapshot()
    slow = 34_000_000.0
    entry.update(verb="reduce_scatter_single", total_us=slow, p50_us=999_998.0, p90_us=slow, p99_us=slow)
    entry.update(calls=123_456, algbw_gbps=99.99, busbw_gbps=99.99)
    monkeypatch.setattr(bandwidth, "snapshot", lambda _: [entry])
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(bandwidth.table("t"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and "reduce_scatter" in text and "999998" in text and "34.0 s" in text and "34000" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_leaves_out_columns_rather_than_cut_figures(
    board: Written, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    board.call(nbytes=1 << 28)
    (entry,) = board.snapshot()
    entry.update(verb="reduce_scatter_single", calls=123_456, p50_us=999_998.0, p99_us=34e6, busbw_gbps=99.99)
    other = bandwidth.CollectiveStats(**{**entry, "group": "another", "algorithm": "recursive_doubling"})
    monkeypatch.setattr(bandwidth, "snapshot", lambda _: [entry, other])
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(bandwidth.table("t"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and ("no room for: " in text) == (width < 120)
    rows = [line for line in text.splitlines() if "reduce_scatter" in line]
    assert len(rows) == 2
    assert all(figure in row for figure in ("256 MiB", "123456", "999998", "34.0 s", "99.99") for row in rows)


def test_json_lines_and_prometheus_have_the_same_figures(board: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    board.call(nbytes=64)
    monkeypatch.setattr(export, "own_board", lambda: board.view)
    monkeypatch.setattr(bandwidth, "own_board", lambda: board.view)
    file = io.StringIO()
    assert export.write_json_lines(file) == 1
    line = json.loads(file.getvalue())
    assert (line["rank"], line["verb"], line["calls"], line["bytes"]) == (1, "all_reduce", 1, 64)
    client = pytest.importorskip("prometheus_client", reason="pip install 'pycomm[monitor]'")
    parser = pytest.importorskip("prometheus_client.parser")
    text = client.generate_latest(export.prometheus_registry()).decode()
    samples = {
        sample.name: sample for family in parser.text_string_to_metric_families(text) for sample in family.samples
    }
    assert samples["pycomm_calls_total"].value == 1 and samples["pycomm_bytes_total"].value == 64
    assert samples["pycomm_calls_total"].labels["group"] == "dp"
    assert samples["pycomm_call_seconds"].value == pytest.approx(line["p99_us"] / 1e6, rel=0.01)


def test_groups_of_one_name_count_together(board: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was closed and made again, and two whose long names differ behind what a board has of them."""
    board.call(nbytes=64, wire_bytes=10)
    board.log.close()
    for name in ("dp", "é" * 40 + "a", "é" * 40 + "b"):
        board.log = board.native.add_group(name, "shm", 99, 1, 4)
        board.call(nbytes=64, sleeps_s=0.01)
    names = {group.name for group in board.view.groups()}
    assert names == {"dp", name_on_board("é" * 40)} and name_on_board("é" * 40) == "é" * 23
    entry, other = sorted(board.snapshot(), key=lambda each: each["wire_bytes"])
    assert (entry["group"], entry["calls"], entry["bytes"], entry["window_calls"]) == ("dp", 2, 128, 2)
    assert entry["wire_bytes"] == 10 + 96 and entry["most_us"] > 5000 > entry["p50_us"]
    assert (other["group"], other["calls"], other["wire_bytes"]) == ("é" * 23, 2, 2 * 96)
    monkeypatch.setattr(export, "own_board", lambda: board.view)
    monkeypatch.setattr(bandwidth, "own_board", lambda: board.view)
    client = pytest.importorskip("prometheus_client", reason="pip install 'pycomm[monitor]'")
    lines = client.generate_latest(export.prometheus_registry()).decode().splitlines()
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))


def test_names_are_shown_as_they_are(board: Written) -> None:
    """Though they look like rich's markup."""
    board.log.close()
    board.log = board.native.add_group("a[/x]b", "shm", 99, 1, 4)
    board.call()
    job = _jobs.Job(7, [board.view], "python train.py [/bold]", "")
    console = Console(file=io.StringIO(), width=130, color_system=None)
    console.print(_jobs.jobs_table(job, ["[]"]), frame(job, Rates()), bandwidth.table("a [/] title", board.view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("a[/x]b") == 4 and text.count("train.py [/bold]") == 2 and "a [/] title" in text


def spans(calls: int, late_us: dict[int, float], transfer_us: float = 20.0) -> list[Span]:
    """``calls`` collectives of four ranks, 1 ms apart, whose ranks come late by so much."""
    found = []
    for seq in range(calls):
        for rank in range(4):
            start_ns = seq * 1_000_000 + round(late_us.get(rank, 0.0) * 1e3) + (rank * 7919 + seq * 104729) % 10_000
            end_ns = seq * 1_000_000 + round((max(late_us.values(), default=0) + transfer_us) * 1e3) + 10_000
            found.append(Span(rank, 99, "dp", seq, "all_reduce", "native", 64, start_ns, end_ns))
    return found


def test_stragglers_are_told_from_slow_links() -> None:
    assert find_stragglers(spans(100, {}), 4).slow_ranks == ()
    report = find_stragglers(spans(100, {2: 300.0}), 4)
    assert report.slow_ranks == (2,) and not report.slow_transfers and "rank 2" in str(report)
    before = spans(100, {})
    later = ((s, s.start_ns + 100_000_000, s.end_ns + 100_900_000) for s in spans(40, {}))
    after = [s._replace(seq=s.seq + 100, start_ns=start_ns, end_ns=end_ns) for s, start_ns, end_ns in later]
    report = find_stragglers(before + after, 4)
    assert report.slow_ranks == () and report.slow_transfers and "link" in str(report)
    assert find_stragglers(spans(3, {2: 300.0}), 4).ranks == ()


def test_a_trace_has_rows_slices_and_arrows(board: Written) -> None:
    events = trace_events(spans(5, {2: 300.0}))
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 20 and {event["pid"] for event in slices} == {0, 1, 2, 3}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in slices)
    starts, ends = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert [event["pid"] for event in starts] == [2] * 5 and len(ends) == 15
    assert {event["id"] for event in starts} == {event["id"] for event in ends} == set(range(5))
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"rank 0", "rank 3", "group dp"}
    board.call()
    (span,) = spans_of(board.view, offset_ns=1000)
    assert (span.rank, span.members, span.seq) == (1, 99, 1) and span.end_ns >= span.start_ns
