"""Members of a package by file name, and third parties by entry point."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pycomm import ConfigError, registry
from pycomm.algorithms import ALGORITHMS
from pycomm.registry import Registry
from pycomm.transport import TRANSPORTS


@pytest.fixture
def animals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    package = tmp_path / "zoo_of_tests"
    package.mkdir()
    for name in ("__init__", "cat", "dog", "_cage", "frame"):
        (package / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "foreign_of_tests.py").write_text("NAME = 'foreign'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        found = [EntryPoint("lynx", "foreign_of_tests", "zoo"), EntryPoint("cat", "foreign_of_tests", "zoo")]
        found.append(EntryPoint("number", "sys:maxsize", "zoo"))
        return [entry for entry in found if entry.group == group and name in (None, entry.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return Registry("zoo_of_tests", "zoo", "animal", helpers=frozenset({"frame"}))


def test_names_are_files_and_entry_points(animals: Registry) -> None:
    assert animals.names() == ("cat", "dog", "lynx", "number")
    assert "zoo_of_tests.cat" not in sys.modules  # listing imports no member


def test_load(animals: Registry) -> None:
    assert animals.load("dog").NAME == "dog"
    assert animals.load("lynx").NAME == "foreign"
    assert animals.load("cat").NAME == "cat"  # our own wins


def test_to_know_a_name_of_our_own_no_other_distribution_is_looked_at(
    animals: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "lynx" in animals
    assert "cow" not in animals
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("it takes tens of milliseconds"))
    assert "cat" in animals


@pytest.mark.parametrize("name", ["cow", "_cage", "frame", "", "../cat"])
def test_unknown_names_list_the_known(animals: Registry, name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown animal .*; known: cat, dog, lynx, number"):
        animals.load(name)


def test_an_entry_point_must_name_a_module(animals: Registry) -> None:
    with pytest.raises(ConfigError, match="must name a module"):
        animals.load("number")


def test_the_registries_of_this_package() -> None:
    assert {"local", "shm", "torch", "mpi"} <= set(TRANSPORTS.names())
    assert "base" not in TRANSPORTS.names()
    assert "direct" in ALGORITHMS.names()
    assert {"plan", "executor", "simulator", "cost"} & set(ALGORITHMS.names()) == set()
