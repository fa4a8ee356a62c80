"""Numbers as people write them: whole ones, sizes, times and bandwidths, as ``64MiB``, ``1MB``, ``5us``, ``25Gbit``."""

from __future__ import annotations

import math
import operator
import re

from .errors import ConfigError

__all__ = ["bytes_of", "format_bytes", "integer", "parse_bandwidth", "parse_bytes", "parse_time", "whole_number"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power  # nccl-tests' 1K is 1024 too
    _UNITS[f"{_letter}B"] = 1000**_power
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def integer(value: object) -> int | None:
    """Returns an integer of Python, NumPy or torch as one of Python; None for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(value: object, name: str, least: int) -> int:
    """Returns an integer of Python, NumPy or torch as one of Python. Raises ConfigError if it is none, less than
    ``least``, or needs more than 64 bits.
    """
    number = None if isinstance(value, bool) else integer(value)
    if number is None or not least <= number < 1 << 63:
        raise ConfigError(f"{name}: expected an integer from {least} to 2**63 - 1, got {value!r}")
    return number


def bytes_of(value: int | float | str, name: str) -> int:
    """Returns a size as a number: 25e6, or a text such as "25MiB". Raises ConfigError, which calls it ``name``."""
    if isinstance(value, str):
        value = parse_bytes(value)
    return whole_number(int(value) if isinstance(value, float) and value.is_integer() else value, name, 1)


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that ``text`` means; raises ConfigError if it means none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"the size {text!r} is not understood; write it as 4B, 1KiB, 64MiB or 1GB.")
    nbytes = float(match[1]) * unit
    if nbytes >= 1 << 63:
        raise ConfigError(f"the size {text} is not below 2**63 bytes.")
    return int(nbytes)


def parse_time(text: str) -> float:
    """Returns the seconds that ``text`` means, such as 5us; raises ConfigError if it means none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|ns)\s*", text)
    if match is None or float(match[1]) == math.inf:
        raise ConfigError(f"the time {text!r} is not understood; write it as 5us, 0.2ms or 1s.")
    return float(match[1]) * _TIMES[match[2]]


def parse_bandwidth(text: str) -> float:
    """Returns the bytes per second that ``text`` means, such as 25Gbit or 3GB; raises ConfigError if it means none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|B|iB)(?:/s)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) in (0, math.inf):
        raise ConfigError(f"the bandwidth {text!r} is not understood; write it as 25Gbit, 100Mbit or 3GB (a second).")
    unit = match[3].lower()
    prefix = _PREFIXES[match[2].upper()] if unit != "ib" else 1024.0 ** "KMGT".index(match[2].upper() or "K") * 1024
    return float(match[1]) * prefix / (8 if unit == "bit" else 1)


def format_bytes(nbytes: int) -> str:
    """Returns ``nbytes`` with the largest binary unit that divides it."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"
