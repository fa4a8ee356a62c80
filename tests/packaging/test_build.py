"""sdist -> wheel -> an environment without torch: the core builds, installs and loads there; nothing is fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# No optimisation: what is tested is that it builds and loads.
ENVIRON = {**os.environ, "PYCOMM_CUDA": "0", "CXXFLAGS": "-O0", "PIP_NO_INDEX": "1"}


def run(*command: str | Path, cwd: Path) -> str:
    arguments, pipe = [str(part) for part in command], subprocess.PIPE
    result = subprocess.run(arguments, cwd=cwd, env=ENVIRON, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the sdist from a copy, so that no build folder of the checkout takes part and none is left in it."""
    tree, out = tmp_path_factory.mktemp("tree") / "pycomm", tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "site")
    shutil.copytree(ROOT, tree, ignore=ignored)
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=tree)
    return next(out.glob("pycomm-*.tar.gz"))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the build requirements and nothing else, as under build isolation."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    ours = Path(sysconfig.get_path("purelib"))
    theirs = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in ("setuptools", "_distutils_hack", "pybind11", "ninja"):
        for path in [ours / name, *ours.glob(f"{name}-*.dist-info")]:
            (theirs / path.name).symlink_to(path)
    (folder / "bin" / "ninja").symlink_to(Path(sys.executable).parent / "ninja")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(sdist: Path, bare_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Builds a wheel from the unpacked sdist; returns it and what the build said."""
    folder = tmp_path_factory.mktemp("wheel")
    run("tar", "-xf", sdist, cwd=folder)  # tarfile's own way to do so safely is not in every 3.11
    [tree] = folder.glob("pycomm-*")
    pip = [sys.executable, "-m", "pip", "--python", bare_python]
    log = run(*pip, "wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, tree, cwd=folder)
    return next(folder.glob("*.whl")), log


def test_sdist_has_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert sources and {path.relative_to(ROOT).as_posix() for path in sources} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "pycomm/py.typed", "pycomm/ops/_torch_build.py"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_build_says_what_it_left_out(wheel: tuple[Path, str]) -> None:
    log = wheel[1]
    assert "pycomm: CPU only (PYCOMM_CUDA=0)" in log
    assert "pycomm: torch operators are left to first use: torch is not installed where this build runs" in log


def test_wheel_has_the_core_the_types_and_the_sources(wheel: tuple[Path, str]) -> None:
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in names if name.endswith("/METADATA"))
        scripts = next(archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    assert [name for name in names if name.startswith("pycomm/_native.") and name.endswith(".so")]
    assert {"pycomm/py.typed", "pycomm/_native.pyi"} <= names
    assert {"pycomm/_csrc/types.h", "pycomm/_csrc/bindings/torch_ops.cpp"} <= names
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "examples/", "benchmarks/"))]
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "pycomm = pycomm.cli.__main__:main" in scripts


def test_installed_core_loads_without_torch(wheel: tuple[Path, str], bare_python: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", bare_python, "install", "--no-deps", wheel[0], cwd=tmp_path)
    code = """
import glob, importlib.util, os, sys, sysconfig
folder = os.path.join(sysconfig.get_path("platlib"), "pycomm")
[path] = glob.glob(os.path.join(folder, "_native.*.so"))
spec = importlib.util.spec_from_file_location("pycomm._native", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert importlib.util.find_spec("torch") is None and "torch" not in sys.modules
print(module.__name__)
"""
    assert run(bare_python, "-I", "-c", code, cwd=tmp_path) == "pycomm._native\n"


def test_what_is_cleaned_is_built_again() -> None:
    """The native modules go, so the mark that says that they are built goes too."""
    make = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pycomm/*.so" in make.stdout and "/.stamp-built" in make.stdout
