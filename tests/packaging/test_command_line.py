"""The dispatcher and the doctor, as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pycomm.cli.__main__ import commands, main
from pycomm.errors import ConfigError


def pycomm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pycomm", *arguments]
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
