"""The message sizes of a benchmark."""

from __future__ import annotations

from ...errors import ConfigError

__all__ = ["sweep"]


def sweep(min_bytes: int, max_bytes: int, step_factor: float) -> list[int]:
    """Returns ``min_bytes`` times powers of ``step_factor`` up to ``max_bytes``; raises ConfigError if none."""
    if min_bytes < 1 or max_bytes < min_bytes or step_factor <= 1:
        raise ConfigError(
            f"--min-bytes {min_bytes} --max-bytes {max_bytes} --step-factor {step_factor}: expected "
            "1 <= min <= max and a factor above 1."
        )
    sizes, nbytes = [], float(min_bytes)
    while nbytes <= max_bytes:
        sizes.append(int(nbytes))
        nbytes *= step_factor
    return sizes
