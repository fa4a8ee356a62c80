"""Laws of the tree as a whole: linted, typed, all tests reachable, nothing that works on one machine alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = {".py", ".pyi", ".toml", ".txt", ".md", ".cpp", ".cu", ".h", ".cuh", ".in", ".sh", ".yml", ".yaml", ".json", ""}


def tracked_files() -> list[Path]:
    """The files that git has or would add; in an unpacked sdist, all files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_no_paths_of_one_machine() -> None:
    private = re.compile(r"(?<![\w.}])/(work|root|home|opt|Users|mnt|data)/[\w.]")
    files = [path for path in tracked_files() if path.suffix in TEXT]
    assert len(files) > 40
    bad = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if private.search(line):
                bad.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not bad, "\n".join(bad)


def test_no_package_index_is_named() -> None:
    """pip's own configuration says where packages come from; a file that names a place breaks everybody else."""
    switches = re.compile(r"--(extra-)?index-url|--find-links|--trusted-host")
    names = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", ".ci/run")
    files = [ROOT / name for name in names]
    files += [path for folder in ("benchmarks", "pycomm") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [str(path) for path in files if switches.search(path.read_text(encoding="utf-8"))] == []


def test_torch_is_no_build_requirement() -> None:
    assert [name for name in PYPROJECT["build-system"]["requires"] if name.startswith("torch")] == []


def test_pytest_runs_every_directory_of_tests() -> None:
    listed = set(PYPROJECT["tool"]["pytest"]["ini_options"]["testpaths"])
    there = {f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in (ROOT / "tests").rglob("test_*.py")}
    assert there - listed == set(), "add it to testpaths in pyproject.toml, in order of cost"


def test_version_is_said_once() -> None:
    import pycomm

    assert pycomm.__version__ == PYPROJECT["project"]["version"]


def run_tool(*arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_ruff_passes() -> None:
    run_tool("ruff", "check", "--quiet", ".")


def test_mypy_passes() -> None:
    run_tool("mypy")
