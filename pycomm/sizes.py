"""Message sizes as people write them: ``4``, ``4B``, ``1KiB``, ``64MiB``, ``1MB``."""

from __future__ import annotations

import re

from .errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power  # nccl-tests' 1K is 1024 too
    _UNITS[f"{_letter}B"] = 1000**_power


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that ``text`` means; raises ConfigError if it means none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"the size {text!r} is not understood; write it as 4B, 1KiB, 64MiB or 1GB.")
    return int(float(match[1]) * unit)


def format_bytes(nbytes: int) -> str:
    """Returns ``nbytes`` with the largest binary unit that divides it."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"
