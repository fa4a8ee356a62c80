"""From clock readings to the table: times, ratios, sizes, columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from pycomm.cli.bench.job import Job, JobFailedError
from pycomm.cli.bench.measure import Figure, Load, measure, plan_load, ratio, take_round
from pycomm.cli.bench.sizes import sweep
from pycomm.cli.bench.table import Cell, best_of_variants, make_table, summary
from pycomm.cli.bench.worker.cases import Case
from pycomm.errors import ConfigError
from pycomm.monitor.bandwidth import busbw_factor
from pycomm.sizes import format_bytes, parse_bytes


def make_case(buffers: str = "private", nbytes: int = 1024) -> Case:
    return Case(
        verb="all_reduce", numel=nbytes // 4, dtype="float32", itemsize=4, op="SUM", place="in", buffers=buffers
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4", 4), ("4B", 4), ("1KiB", 1024), ("1K", 1024), ("64 MiB", 64 << 20), ("1.5kib", 1536), ("1MB", 10**6)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "B", "-4", "4 apples", "1e3"])
def test_a_size_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


def test_sizes_are_written_with_the_unit_that_divides_them() -> None:
    assert [format_bytes(n) for n in (0, 4, 1000, 1024, 1 << 20, 3 << 30)] == [
        "0 B",
        "4 B",
        "1000 B",
        "1 KiB",
        "1 MiB",
        "3 GiB",
    ]


def test_the_sweep_has_every_power_of_four() -> None:
    assert sweep(4, 64 << 20, 4) == [4**k for k in range(1, 14)]
    assert sweep(8, 8, 2) == [8]
    assert sweep(4, 7, 1.1) == [4, 5, 6], "each size once"
    for wrong in ((0, 4, 2), (8, 4, 2), (4, 8, 1), (4, 8, 1.0001)):
        with pytest.raises(ConfigError):
            sweep(*wrong)


@pytest.mark.parametrize(
    ("verb", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("all_gather_single", 0.75),
        ("all_gather_into_tensor", 0.75),
        ("reduce_scatter_tensor", 0.75),
        ("all_to_all_single", 0.75),
        ("gather", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send", 1.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(verb: str, factor: float) -> None:
    assert busbw_factor(verb, 4) == factor


def test_a_round_is_as_long_as_asked() -> None:
    small = plan_load(make_case(), 1.0, 20)
    assert small == Load(20, 1000, 2000)
    assert plan_load(make_case(), 0.1, 20).num_chunks * plan_load(make_case(), 0.1, 20).chunk_calls == 20_000
    assert plan_load(make_case(), 1000.0, 20) == Load(20, 1, 0)
    assert plan_load(make_case(), 1e6, 20) == Load(5, 1, 0), "at least five calls however slow"
    assert plan_load(make_case("shared"), 1000.0, 20) == Load(0, 0, 20)


def test_chunk_times_run_from_the_slowest_rank_to_the_slowest_rank() -> None:
    answers = [
        {"marks": [0, 1000, 2000, 9000], "starts": [], "ends": []},
        {"marks": [500, 1500, 2400, 9100], "starts": [], "ends": []},
    ]
    time_us, singles = take_round(Load(3, 1, 0), answers)
    assert singles == [1.0, 0.9, 6.7] and time_us == 1.0  # the median: one disturbed call does not count


def test_single_calls_run_from_the_last_in_to_the_last_out() -> None:
    answers = [
        {"marks": [], "starts": [0, 5000], "ends": [3000, 9000]},
        {"marks": [], "starts": [2000, 4000], "ends": [2500, 9500]},
    ]
    assert take_round(Load(0, 0, 2), answers) == (2.75, [1.0, 4.5])


def test_ratios_pair_the_rounds() -> None:
    own, peer = Figure(rounds_us=[1.0, 10.0, 2.0]), Figure(rounds_us=[2.0, 20.0, 2.0])
    assert ratio(own, peer) == 0.5


class FakeJob(Job):
    """Answers as two ranks whose calls take ``call_us``; fails at the command number ``fails_at``."""

    world_size, version = 2, "fake"

    def __init__(self, name: str, call_us: float, fails_at: int | None = None, is_supported: bool = True) -> None:
        self.name, self.call_us, self.fails_at, self.is_supported = name, call_us, fails_at, is_supported
        self.commands: list[str] = []

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.commands.append(command["do"])
        if len(self.commands) == self.fails_at:
            raise JobFailedError(f"{self.name} failed as told")
        if command["do"] == "prepare":
            return [{} if self.is_supported else {"unsupported": "as told"}] * 2
        if command["do"] != "run":
            return [{}] * 2
        step = round(self.call_us * 1000)
        marks = [step * command["chunk_calls"] * k for k in range(command["num_chunks"] + 1)]
        starts = [step * k for k in range(command["samples"])]
        return [{"marks": marks, "starts": starts, "ends": [s + step for s in starts], "wrong": 0, "line_ns": 30.0}] * 2

    def close(self) -> None:
        pass


def run_measure(jobs: Sequence[Job], buffers: str = "private") -> tuple[dict[str, Figure], list[str]]:
    failed: list[str] = []
    figures = measure(
        jobs, make_case(buffers), rounds=3, round_ms=1, on_failure=lambda job, error: failed.append(job.name)
    )
    return figures, failed


@pytest.mark.parametrize("buffers", ["private", "shared"])
def test_jobs_are_measured_in_turns(buffers: str) -> None:
    jobs = [FakeJob("pycomm", 2.0), FakeJob("gloo", 400.0)]
    figures, failed = run_measure(jobs, buffers)
    assert not failed
    assert figures["pycomm"].median_us == pytest.approx(2.0) and len(figures["pycomm"].rounds_us) == 3
    assert figures["gloo"].p99_us == pytest.approx(400.0)
    assert jobs[0].commands == ["prepare", "run", "run", "run", "run", "run", "release"]


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_a_peer_that_fails_is_left_out_and_the_others_go_on(fails_at: int) -> None:
    figures, failed = run_measure([FakeJob("pycomm", 2.0), FakeJob("mpich:default", 3.0, fails_at)])
    assert failed == ["mpich:default"]
    assert list(figures) == ["pycomm"] and len(figures["pycomm"].rounds_us) == 3


def test_a_peer_without_the_verb_is_absent() -> None:
    figures, failed = run_measure([FakeJob("pycomm", 2.0), FakeJob("impi:default", 3.0, is_supported=False)])
    assert list(figures) == ["pycomm"] and not failed


def make_cell(own_us: float, peers_us: dict[str, float], nbytes: int = 1 << 20, wrong: int = 0) -> Cell:
    figures = {name: Figure(rounds_us=[us] * 3, samples_us=[us] * 9) for name, us in peers_us.items()}
    own = Figure(rounds_us=[own_us] * 3, samples_us=[own_us] * 9, wrong=wrong)
    return Cell(case=make_case(nbytes=nbytes), world_size=4, own=own, peers=best_of_variants(figures))


def render(table: object, width: int = 240) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_peer_counts_with_its_best_variant() -> None:
    cell = make_cell(100.0, {"impi:default": 300.0, "impi:adjust8": 200.0, "gloo": 900.0})
    assert set(cell.peers) == {"impi", "gloo"}
    assert cell.best_peer == ("impi:adjust8", 0.5)


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    cell = make_cell(100.0, {"impi:default": 200.0}, wrong=3)
    text = render(make_table("title", [{"in": cell}], ["in"], ["impi", "mpich"]))
    words = (
        "bytes count type redop time us p99 us algbw GB/s busbw GB/s #wrong impi us mpich us ratio best peer".split()
    )
    assert all(word in text for word in words)
    row = next(line for line in text.splitlines() if "1 MiB" in line).replace("│", " ").split()
    assert row[:6] == ["1", "MiB", "262144", "float32", "sum", "100"]
    assert row[6:10] == ["100", "10.49", "15.73", "3"]  # p99, algbw, busbw = algbw * 2 * 3 / 4, wrong
    assert row[10:] == ["200", "-", "0.500", "impi:default"]


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_figures_are_whole_however_narrow_the_terminal(width: int) -> None:
    """Places stand below each other, then columns go, and it is said which; what is there is there whole."""
    cell, other = make_cell(100.0, {}, nbytes=64 << 20), make_cell(123456.0, {}, nbytes=64 << 20)
    text = render(make_table("title", [{"in": cell, "out": other}], ["in", "out"], []), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines() if "64 MiB" in line]
    assert len(rows) == (1 if width == 160 else 2)
    assert {"100", "123456", "1006.63", "0.82"} <= {word for row in rows for word in row}
    assert ("no room for: redop" in text) == (width < 120)


@pytest.mark.parametrize("width", [60, 80])
def test_the_ratio_to_the_best_peer_stays_in_a_narrow_terminal(width: int) -> None:
    cell = make_cell(100.0, {"gloo": 123456.0, "impi:default": 200.0, "openmpi:vader": 23.0})
    text = render(make_table("title", [{"in": cell}], ["in"], ["gloo", "impi", "openmpi"]), width)
    row = next(line for line in text.splitlines() if "1 MiB" in line).split()
    assert row[-2:] == ["4.35", "openmpi:vader"] and row[2] == "100" and "15.73" in row


def test_the_summary_counts_wins() -> None:
    text = summary([make_cell(100.0, {"gloo": 200.0}), make_cell(300.0, {"gloo": 200.0})])
    assert "worst 1.50" in text and "faster in 1 of 2" in text


def test_json_has_a_line_for_each_library() -> None:
    lines = make_cell(100.0, {"gloo": 200.0}).as_json()
    assert [line["library"] for line in lines] == ["pycomm", "gloo"]
    assert lines[0]["busbw_gbps"] == pytest.approx(15.7286, abs=1e-3)
    assert lines[1]["pycomm_ratio"] == 0.5
