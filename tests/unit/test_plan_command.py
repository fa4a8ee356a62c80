"""`pycomm plan`, as a user calls it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pycomm.cli.__main__ import main
from pycomm.errors import ConfigError
from pycomm.sizes import parse_bandwidth, parse_time


def test_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "ring", "4"]) == 0
    text = capsys.readouterr().out
    assert "ring: all_reduce of 4 ranks" in text and "6 rounds; the busiest rank sends 3/2 S in 6 messages" in text
    assert "Chunk 0 becomes ((x1 + x2) + x3) + x0" in text
    assert re.search(r"0 +<-3 2 +<-0 3 +<-1 0 +<-2 1", text)


def test_all_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan hierarchical --hosts 2 --ranks 8 --predict 64MiB --latency 5us --bandwidth 25Gbit"
    assert main(command.split()) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0][0] == "hierarchical" and {"ring", "tree", "direct", "halving_doubling"} <= {row[0] for row in rows}
    assert 21.4 < float(rows[0][1]) < 30  # 64 MiB, once each way, at 3.125 GB/s: 21.47 ms


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install 'pycomm[plot]'")
@pytest.mark.parametrize(
    "arguments", [["ring", "4"], ["hierarchical", "--hosts", "3,2,1"], ["direct", "5", "--verb=gather"]]
)
def test_pictures(arguments: list[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    assert main(["plan", *arguments, "--svg", str(svg), "--png", str(png)]) == 0
    assert "<svg" in svg.read_text(encoding="utf-8") and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("rnig 4", "unknown algorithm 'rnig'; known: direct, "),
        ("ring", "expected a number of ranks"),
        ("ring 4 --ranks 5", "give the number once"),
        ("ring --hosts 2,x", "expected a number of hosts"),
        ("ring 4 --hosts 2,3", "holds 5 ranks, but 4 were asked for"),
        ("ring 100", "too many to show"),
        ("tree 4 --verb all_gather_single", "tree has no plan for 'all_gather_single'; it has: all_reduce,"),
        (
            "hierarchical --hosts 3,1 --verb all_gather_single",
            "no plan of all_gather_single for 4 ranks on hosts of 3, 1",
        ),
        ("ring 4 --predict 1MiB --bandwidth fast", "the bandwidth 'fast' is not understood"),
        ("ring 4 --predict 1MiB --latency 5", "the time '5' is not understood"),
    ],
)
def test_mistakes(arguments: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 1
    assert problem in capsys.readouterr().err


def test_units() -> None:
    assert parse_time("5us") == pytest.approx(5e-6) and parse_time("0.2ms") == pytest.approx(2e-4)
    assert parse_bandwidth("25Gbit") == 3.125e9 and parse_bandwidth("3GB/s") == 3e9 and parse_bandwidth("1MiB") == 2**20
    with pytest.raises(ConfigError):
        parse_bandwidth("0Gbit")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("command", "figures"),
    [
        ("plan ring --ranks 8 --hosts 2 --predict 64MiB", "37.7 ms 1.74"),
        ("advise 7B --memory 80GiB --ranks 8 --hosts 2 --flops 300T", "does not fit: 1.32 x the memory"),
    ],
)
def test_tables_suit_the_terminal(
    command: str, figures: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich import console

    class Narrow(console.Console):
        def __init__(self, **options: object) -> None:
            super().__init__(**{**options, "width": width})  # type: ignore[arg-type]

    monkeypatch.setattr(console, "Console", Narrow)
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert figures in " ".join(text.split())


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install 'pycomm[plot]'")
def test_a_picture_of_one_layout_is_high_enough_to_read(tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    assert main(["advise", "7M", "--memory", "1GiB", "--flops", "300T", "--svg", str(svg)]) == 0
    height = re.search(r'<svg [^>]*height="([0-9.]+)pt"', svg.read_text(encoding="utf-8"))
    assert height is not None and float(height[1]) >= 2.4 * 72
