"""``pycomm tune`` as a user runs it: it measures, stores a table, and the next job goes by it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pycomm.algorithms import tuned
from pycomm.errors import ConfigError
from warm_python import warm_python


def tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYCOMM_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "pycomm", "tune", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)


def test_tune_stores_a_table(tmp_path: Path) -> None:
    arguments = ["-n", "2", "--verbs", "all_reduce,broadcast", "-b", "4KiB", "-e", "1MiB", "-f", "256"]
    result = tune(tmp_path, *arguments, "--rounds", "2", "--round-ms", "1")
    assert result.returncode == 0, result.stderr
    assert "median error" in result.stdout and "stored in" in result.stdout
    (table,) = tmp_path.glob("*.table")
    rules = [line.split() for line in table.read_text().splitlines() if not line.startswith("#")]
    assert {rule[0] for rule in rules} == {"all_reduce", "broadcast"}
    assert all(rule[1:4] == ["shm", "2", "1"] for rule in rules)
    shown = tune(tmp_path, "--show")
    assert shown.returncode == 0 and "# tuned" in shown.stdout


def test_a_damaged_table_says_what_to_do_and_does_not_stop_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    path = tuned.table_path()
    path.write_text("all_reduce shm two\n", encoding="utf-8")
    path.with_suffix(".json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="Correct that file, or remove it and run `pycomm tune`") as refused:
        tuned.load_rules()
    assert str(path) in str(refused.value)
    result = tune(tmp_path, "-n", "2", "--verbs", "all_reduce", "-b", "4B", "-e", "4B", "--rounds", "1")
    assert result.returncode == 0, result.stderr
    damaged = path.with_name(f"{path.name}.damaged")
    assert damaged.read_text(encoding="utf-8") == "all_reduce shm two\n" and str(damaged) in result.stdout
    assert {rule.verb for rule in tuned.load_rules()} == {"all_reduce"} and len(tuned._read_json()) == 1


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = tune(tmp_path / "file" / "folder", "-n", "2")
    assert result.returncode == 1 and "set PYCOMM_CACHE_DIR to a folder" in result.stderr
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
