"""Settings: argument > config > environment > default."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

import pycomm
from pycomm import Config, ConfigError
from pycomm.config import limit_s, seconds
from pycomm.transport.local import LocalWorld


def test_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCOMM_TIMEOUT_S", raising=False)
    assert Config().timeout_s == 600.0
    monkeypatch.setenv("PYCOMM_TIMEOUT_S", "7")
    assert Config().timeout_s == 7.0
    assert Config(timeout_s=8.0).timeout_s == 8.0
    with pycomm.init(LocalWorld(1).transports[0], config=Config(timeout_s=8.0), timeout=9) as group:
        assert group.timeout_s == 9.0


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("shm")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"), [("timeout_s", 0.0), ("timeout_s", float("nan")), ("log", "loud"), ("transport", "")]
)
def test_bad_values_raise(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.removesuffix("_s")):
        Config(**{name: value})  # type: ignore[arg-type]


def test_bad_environment_raises_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_LOG", "loud")
    with pytest.raises(ConfigError, match="PYCOMM_LOG"):
        Config()


def test_seconds() -> None:
    assert seconds(2) == 2.0
    assert seconds(timedelta(minutes=1)) == 60.0
    assert seconds(float("inf")) == float("inf")
    for bad in (0, -1.0, True, "5", None, timedelta(0)):
        with pytest.raises(ConfigError, match="timeout"):
            seconds(bad)  # type: ignore[arg-type]


def test_the_limit_of_a_wait() -> None:
    assert limit_s(None) is None and limit_s(timedelta(0)) is None  # torch's way to say that there is none
    assert limit_s(0.5) == 0.5 and limit_s(timedelta(seconds=3)) == 3.0
    for bad in (0, timedelta(seconds=-1)):
        with pytest.raises(ConfigError, match="expected more than 0 seconds"):
            limit_s(bad)
