"""The message sizes of a benchmark."""

from __future__ import annotations

import argparse

from ...errors import ConfigError
from .._arguments import message_bytes

__all__ = ["sweep", "sweep_of"]


def sweep_of(options: argparse.Namespace) -> list[int]:
    """Returns the sizes that --min-bytes, --max-bytes and --step-factor ask for; raises ConfigError."""
    smallest = message_bytes("--min-bytes", options.min_bytes)
    return sweep(smallest, message_bytes("--max-bytes", options.max_bytes), options.step_factor)


def sweep(min_bytes: int, max_bytes: int, step_factor: float) -> list[int]:
    """Returns ``min_bytes`` times powers of ``step_factor`` up to ``max_bytes``; raises ConfigError if none."""
    if min_bytes < 1 or max_bytes < min_bytes or step_factor < 1.01:
        raise ConfigError(
            f"--min-bytes {min_bytes} --max-bytes {max_bytes} --step-factor {step_factor}: expected "
            "1 <= min <= max and a factor of 1.01 or more."
        )
    sizes, nbytes = [min_bytes], min_bytes * step_factor
    while nbytes <= max_bytes:
        if nbytes >= sizes[-1] + 1:
            sizes.append(int(nbytes))
        nbytes *= step_factor
    return sizes
