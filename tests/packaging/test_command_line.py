"""The dispatcher and the doctor, as a user calls them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys

import pytest

from pycomm.cli.__main__ import commands, main
from pycomm.errors import ConfigError
from warm_python import warm_python


def pycomm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "pycomm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_every_file_is_a_command_with_a_summary() -> None:
    assert {"run", "bench", "doctor"} <= set(commands())
    assert all(summary.endswith(".") for summary in commands().values()), commands()


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text and summary in text for name, summary in commands().items())


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["docter"])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_arguments_reach_the_command_and_its_status_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from pycomm.cli import doctor

    seen: list[list[str]] = []
    monkeypatch.setattr(doctor, "main", lambda argv: seen.append(argv) or 7)
    assert main(["doctor", "--json", "-x"]) == 7
    assert seen == [["--json", "-x"]]


def test_errors_of_pycomm_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pycomm.cli import doctor

    def fail(argv: list[str]) -> int:
        raise ConfigError("PYCOMM_LOG: expected a level")

    monkeypatch.setattr(doctor, "main", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "pycomm doctor: PYCOMM_LOG: expected a level\n"


def test_doctor_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_LGO", "info")
    result = pycomm("doctor", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report) == {"versions", "built", "CUDA", "extras", "launcher", "host", "environment", "hints"}
    assert report["built"]["native core"].endswith(".so")
    assert report["built"]["CPU kernels"] in ("avx512", "avx2", "generic")
    assert report["launcher"]["world_size"] == 1
    assert report["environment"]["PYCOMM_LGO"] == "info"
    assert "misspelt" in report["hints"]["environment.PYCOMM_LGO"]
    failed = [hint for hint in report["hints"].values() if "could not be examined" in hint]
    assert failed == []


def test_doctor_for_people() -> None:
    result = pycomm("doctor")
    assert result.returncode == 0, result.stderr
    for word in ("versions", "native core", "torch operators", "launcher", "membarrier", "PYCOMM_TRANSPORT"):
        assert word in result.stdout


def test_one_broken_section_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from pycomm.cli import doctor

    def broken() -> list[doctor.Fact]:
        raise OSError("no /proc")

    monkeypatch.setitem(doctor.SECTIONS, "host", broken)
    report = doctor.collect()
    assert report["host"][0].hint == "could not be examined: OSError: no /proc"
    assert len(report["versions"]) > 3


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.svg"), 1, "[Errno 2] No such file or directory: 'a.svg'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_the_system_and_ctrl_c_take_one_line(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pycomm.cli import doctor

    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(doctor, "main", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"pycomm doctor: {said}\n"


@pytest.mark.parametrize("command", ["--version", "plan ring 64"])  # the second prints by rich
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    words = [sys.executable, "-m", "pycomm", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=900) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""


def test_output_that_is_closed_is_no_error() -> None:
    command = ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m pycomm --version >&-"]
    assert subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr == ""


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("doctor --svg a.svg", 2, "--pid and --svg are of --jobs"),
        ("doctor --pid 3", 2, "--pid and --svg are of --jobs"),
        ("doctor --json --jobs", 2, "give one of them"),
        ("doctor --jobs --pid 1", 1, "process 1 is no rank of a job of this user on this host"),
        ("top --every nan", 2, "expected a number above 0, 1e9 at most, got 'nan'"),
        ("top --svg a.svg", 2, "--svg draws the picture of --once"),
        ("top --once --every 0.01 --pid 1", 0, "process 1 is no rank of a job of this user on this host"),
        ("probe --seconds=-1", 2, "expected a number above 0, 1e9 at most, got '-1'"),
        ("probe -n 2 --bytes many", 1, "the size 'many' is not understood"),
        ("probe --bytes 0", 1, "--bytes 0: expected a message of some length"),
        ("probe -n 2 --transport smoke", 1, "unknown transport 'smoke'; known: "),
        ("probe -n 2 --svg no/such/folder/a.svg", 1, "there is no folder"),
        ("tune -n 0", 2, "expected a whole number from 1 to 2147483647, got '0'"),
        ("tune --near -1", 2, "expected a whole number from 1 to 2147483647, got '-1'"),
        ("tune -b many", 1, "the size 'many' is not understood"),
        ("tune -e 9000TiB", 1, "--max-bytes 9000TiB: this host has"),
        ("bench all_reduce -e 9000TiB", 1, "--max-bytes 9000TiB: this host has"),
        ("bench all_reduce -n 9999999999999999999", 2, "expected a whole number from 1 to 2147483647"),
        ("bench all_reduce -f 1.000001", 1, "a factor of 1.01 or more"),
        ("probe --bytes 99999999999999TiB", 1, "the size 99999999999999TiB is not below 2**63 bytes"),
        ("top --every 1e300", 2, "expected a number above 0, 1e9 at most, got '1e300'"),
        ("plan ring 4 --bandwidth 0", 1, "the bandwidth '0' is not understood"),
        ("plan ring 4 --latency nan", 1, "the time 'nan' is not understood"),
        ("plan ring 4 --svg no/such/folder/a.svg", 1, "there is no folder"),
        ("advise 7M --memory 1GiB --flops 1T --svg a.jpeg9", 1, "expected a name that ends in .png, .svg, .pdf"),
        ("advise math:pi --memory 1GiB", 1, "expected module:callable that makes an nn.Module, got TypeError"),
        ("advise math:floor --memory 1GiB", 1, "expected module:callable that makes an nn.Module, got TypeError"),
        ("advise builtins:dict --memory 1GiB", 1, "expected module:callable that makes an nn.Module, got a dict"),
    ],
)
def test_mistakes_take_a_line_before_anything_starts(
    command: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(command.split()) == status
    except SystemExit as stopped:  # argparse
        assert stopped.code == status
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())


def test_probe_is_told_by_a_launcher_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from pycomm.cli.probe import main as probe

    with pytest.raises(ConfigError, match="the launcher has started 2 ranks; leave -n out"):
        probe(["-n", "4"])


@pytest.mark.parametrize(("name", "value"), [("PYCOMM_TIMEOUT_S", "soon"), ("PYCOMM_LOG", "loud")])
def test_the_doctor_says_that_a_value_cannot_be_used(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pycomm.cli._facts import environment

    monkeypatch.setenv(name, value)
    hints = {fact.name: fact.hint for fact in environment()}
    assert hints[name].startswith("cannot be used: ") and repr(value) in hints[name]
    assert sum(hint.startswith("cannot be used") for hint in hints.values()) == 1
