"""The table of environment variables."""

from __future__ import annotations

import pytest

from pycomm import ConfigError, env


def test_defaults_when_unset_or_empty() -> None:
    for name, variable in env.VARIABLES.items():
        assert env.read(name, {}) == variable.default
        assert env.read(name, {name: "  "}) == variable.default
        assert not env.is_set(name, {name: " "})


def test_values_are_parsed() -> None:
    assert env.read("PYCOMM_TIMEOUT_S", {"PYCOMM_TIMEOUT_S": "2.5"}) == 2.5
    assert env.read("PYCOMM_TRANSPORT", {"PYCOMM_TRANSPORT": " shm "}) == "shm"
    assert env.is_set("PYCOMM_TRANSPORT", {"PYCOMM_TRANSPORT": "shm"})


def test_what_cannot_be_parsed_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"PYCOMM_TIMEOUT_S cannot be used: expected float, got 'soon'"):
        env.read("PYCOMM_TIMEOUT_S", {"PYCOMM_TIMEOUT_S": "soon"})


def test_only_names_of_the_table_can_be_asked_for() -> None:
    with pytest.raises(KeyError):
        env.read("HOME")


def test_every_variable_says_its_type_and_meaning() -> None:
    assert {variable.type_name for variable in env.VARIABLES.values()} <= {"str", "float", "int", "0 or 1"}
    assert all(len(variable.meaning) > 20 for variable in env.VARIABLES.values())
