"""The table of algorithms: its grammar, what it chooses, and what is refused before a byte moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pycomm
from harness import run_ranks
from pycomm import ConfigError, PlanError, PycommError
from pycomm.algorithms import tuned
from pycomm.algorithms.cost import Level, LinkModel
from pycomm.algorithms.executor import Collective
from pycomm.algorithms.selection import Selector, load_table
from pycomm.algorithms.tables import Rule, Span, Table, parse_rules, show_rules
from pycomm.cli.__main__ import main as command
from pycomm.cli.tune.fit import Measured
from pycomm.cli.tune.job import rules_of
from pycomm.collectives.context import resolve
from pycomm.topology import Topology
from pycomm.transport.local import LocalWorld

TEXT = "all_reduce torch * 2- 64KiB- hierarchical; broadcast * 4 1 0-1KiB tree\n* mpi 2-8 * * native  # for MPI"


def test_rules_read_back_as_written() -> None:
    rules = parse_rules(TEXT, "a test")
    assert rules[0] == Rule("all_reduce", "torch", Span(), Span(2), Span(65536), "hierarchical", "a test")
    assert rules[1].ranks == Span(4, 5) and rules[1].nbytes == Span(0, 1024) and rules[2].ranks == Span(2, 9)
    assert parse_rules(show_rules(rules, has_sources=True), "a test") == rules
    assert Table.of(rules).digest != Table.of(rules[::-1]).digest  # order matters
    assert Table.of(rules).digest == Table.of(parse_rules(TEXT, "elsewhere")).digest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("all_reduce * * * ring", "expected 6 words"),
        ("all_redcue * * * * ring", "unknown collective 'all_redcue'; known: all_reduce"),
        ("all_reduce tcp * * * ring", "unknown transport 'tcp'; known: .*shm"),
        ("all_reduce * * * * rign", "unknown algorithm 'rign'; known: .*direct.*ring"),
        ("gather * * * * ring", "ring has no plan for gather"),
        ("all_reduce * 4-2 * * ring", "got '4-2'"),
        ("all_reduce * * * 1MiB ring", "got '1MiB'"),
        ("all_reduce * * * 2KiB-1KiB ring", "more after the dash"),
        ("all_reduce * * * 1XB-2KiB ring", "size '1XB' is not understood"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_rules(text, "PYCOMM_ALGORITHMS")


def choose(rules: str, verb: str = "all_reduce", numel: int = 1000, topology: Topology | None = None) -> str:
    (transport, *_) = LocalWorld(4).transports
    selector = Selector(transport, topology or Topology.flat(4), load_table(rules))
    op = pycomm.ReduceOp.SUM if verb == "all_reduce" else None
    return selector.choose(Collective(verb=verb, input=torch.empty(numel), op=op)).name


def test_the_first_rule_that_fits_serves() -> None:
    rules = "all_reduce * * 2- * tree; all_reduce local 4 1 0-4KiB recursive_doubling; all_reduce * * * 4KiB-8KiB ring"
    assert choose(rules, numel=1023) == "recursive_doubling"
    assert choose(rules, numel=1024) == "ring"
    assert choose(rules, numel=2048) == "direct"  # the default
    assert choose(rules, numel=1, topology=Topology.of_sizes([2, 2])) == "tree"
    assert choose(rules, "broadcast") == "direct"
    assert choose("* * * * * ring", "gather") == "direct"  # ring has no plan for it, and nobody said it had


def test_a_rule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PYCOMM_ALGORITHMS, rule .*transport 'local' does not carry all_reduce"):
        choose("all_reduce local * * * native")


def calls_that_cannot_be(rank: int) -> list[str]:
    said = []
    for algorithm in ("rign", "native", 3, "ring(tree)"):
        with pytest.raises(PycommError) as caught:
            pycomm.all_reduce(torch.ones(3), algorithm=algorithm)
        said.append(str(caught.value))
    with pytest.raises(PlanError) as no_plan:
        pycomm.broadcast(torch.ones(3), 0, algorithm="halving_doubling(x)" if rank < 0 else "recursive_doubling")
    said.append(str(no_plan.value))
    pycomm.barrier()  # the group still works
    return said


def test_calls_that_cannot_be_are_refused_on_every_rank() -> None:
    for said in run_ranks(3, calls_that_cannot_be, transport="local"):
        assert "unknown algorithm 'rign'; known: auto, native, direct" in said[0]
        assert "does not carry all_reduce SUM" in said[1] and "unknown algorithm 3" in said[2]
        assert "recursive_doubling has no plan of broadcast for 3 ranks on one host" in said[4]


def overridden(rank: int) -> list[str]:
    records: list[pycomm.CollectiveRecord] = []
    resolve(None).add_hook(records.append)
    for numel in (1, 4096):
        tensor = torch.full((numel,), float(rank))
        pycomm.all_reduce(tensor)
        assert (tensor == 1.0).all()
    return [record.algorithm for record in records]


def test_an_override_takes_the_place_of_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, overridden, transport="shm") == [["native", "native"]] * 2
    monkeypatch.setenv("PYCOMM_ALGORITHMS", "all_reduce shm 2 1 4KiB- ring")
    assert run_ranks(2, overridden, transport="local") == [["direct", "direct"]] * 2
    monkeypatch.setenv("PYCOMM_ALGORITHMS", "all_reduce local 2 1 4KiB- ring")
    assert run_ranks(2, overridden, transport="local") == [["direct", "ring"]] * 2


def explained(rank: int) -> tuple[str, str]:
    found = pycomm.explain("all_reduce", 1 << 18)
    assert found.algorithm == "ring" and found.is_tuned and {row.algorithm for row in found.rows} >= {"ring", "tree"}
    row = next(row for row in found.rows if row.algorithm == "ring")
    assert row.measured_us == pytest.approx(123.0) and row.measured_bytes == 1 << 20
    assert row.predicted_us is not None and row.predicted_us > 0
    with pytest.raises(ConfigError, match="unknown collective"):
        pycomm.explain("all_redcue", 1)
    return str(found), str(pycomm.explain("broadcast", 10))


def test_tuned_rules_are_stored_chosen_and_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    place = ("local", 2, 1)
    measured = [
        Measured("all_reduce", 1 << 10, "direct", 1e-5),
        Measured("all_reduce", 1 << 10, "ring", 2e-5),
        Measured("all_reduce", 1 << 20, "direct", 2e-4),
        Measured("all_reduce", 1 << 20, "ring", 1.23e-4),
    ]
    rules = list(rules_of(measured, place))
    assert [(rule.nbytes, rule.algorithm) for rule in rules] == [(Span(0, 1 << 15), "direct"), (Span(1 << 15), "ring")]
    level = Level(latency_s=1e-6, bytes_per_s=1e9)
    links = LinkModel(host=level, rack=level, far=level)
    tuned.save(place, parse_rules("all_reduce local 2 1 * tree", "older"), links, [])
    path = tuned.save(place, rules, links, [each._asdict() for each in measured])
    assert [rule.algorithm for rule in tuned.load_rules()] == ["direct", "ring"] and path.parent == tmp_path
    for text, other in run_ranks(2, explained, transport="local"):
        assert "by the rule `all_reduce local 2 1 32KiB- ring` (tuned)" in text and "123.0 us" in text
        assert "carried by direct" in other
    assert command(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "32KiB-" in shown and "# tuned" in shown and "# default" in shown
    path.write_text("all_reduce local 2 1 * rign\n")
    with pytest.raises(ConfigError, match=r"\.table.*unknown algorithm 'rign'"):
        load_table("")
