"""The settings of a job: argument > Config > environment > default."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import timedelta

from . import env
from .errors import ConfigError

__all__ = ["LOG_LEVELS", "Config", "seconds"]

LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def seconds(timeout: float | timedelta) -> float:
    """Returns ``timeout``, a timedelta or a number of seconds, as positive seconds. Raises ConfigError."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ConfigError(
            f"timeout: expected seconds or a datetime.timedelta, got {type(timeout).__name__}: {timeout!r}"
        )
    if not timeout > 0:  # also refuses NaN
        raise ConfigError(f"timeout: expected more than 0 seconds, got {timeout!r}; float('inf') waits for ever")
    return float(timeout)


def limit_s(timeout: float | timedelta | None) -> float | None:
    """Returns the seconds that a handle's ``wait`` is given; None if it is given none, which torch spells timedelta(0).

    Raises ConfigError.
    """
    return None if timeout is None or timeout == timedelta(0) else seconds(timeout)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of ``pycomm.init``; a field not given comes from its ``PYCOMM_*`` variable, else from its default.

    ``transport`` is a registered name or "auto"; ``timeout_s`` bounds the wait of one call, in seconds; ``log`` is a
    level of the logger "pycomm"; ``algorithms`` are rules for the table that `auto` goes by (``algorithms/tables.py``).
    ``monitor`` says whether calls are recorded (``monitor/``), ``hang_s`` after how long a wait is looked into.
    Raises ConfigError if a value cannot be used.
    """

    transport: str = field(default_factory=lambda: str(env.read("PYCOMM_TRANSPORT")))
    timeout_s: float = field(default_factory=lambda: float(env.read("PYCOMM_TIMEOUT_S")))
    log: str = field(default_factory=lambda: str(env.read("PYCOMM_LOG")).lower())
    algorithms: str = field(default_factory=lambda: str(env.read("PYCOMM_ALGORITHMS")))
    monitor: bool = field(default_factory=lambda: bool(env.read("PYCOMM_MONITOR")))
    hang_s: float = field(default_factory=lambda: float(env.read("PYCOMM_HANG_S")))

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str) or not self.transport:
            raise ConfigError(f"transport: expected a registered name or 'auto', got {self.transport!r}")
        seconds(self.timeout_s)
        if not self.hang_s > 0:
            raise ConfigError(
                f"hang_s (PYCOMM_HANG_S): expected more than 0 seconds, got {self.hang_s!r}; inf is never"
            )
        if self.log not in LOG_LEVELS:
            raise ConfigError(f"log (PYCOMM_LOG): expected one of {', '.join(LOG_LEVELS)}, got {self.log!r}")
