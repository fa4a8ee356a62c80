"""Schedules: which compression the next steps should use, from the bandwidth or from the losses of the last ones.

They return a text for ``compression=``. All ranks must pass the same one, so give them numbers that all ranks share: an
all_reduced loss, the smallest bandwidth. Each text has a residual of its own: what one still owes waits until that
one is chosen again, so change seldom, between epochs rather than between steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..errors import ConfigError

__all__ = ["by_bandwidth", "by_stability"]

WINDOW = 10  # losses that by_stability looks at
STEADY, UNSTEADY = 0.05, 0.15  # coefficients of variation


def by_bandwidth(bits_per_s: float, fast: str = "int8") -> str:
    """Returns the compression for a link of ``bits_per_s``, as measured.

    Top-k 0.1 % with error feedback below 10 Gbit/s, top-k 1 % below 25 Gbit/s, ``fast`` (such as "int8" or "none")
    from there on. Raises ConfigError unless the bandwidth is above 0.
    """
    if not bits_per_s > 0:
        raise ConfigError(f"by_bandwidth: expected a bandwidth above 0 bit/s, got {bits_per_s!r}")
    if bits_per_s < 10e9:
        return "topk:0.001+ef"
    return "topk:0.01+ef" if bits_per_s < 25e9 else fast


def by_stability(losses: Sequence[float], specs: Sequence[str] = ("none", "int8+ef", "topk:0.01+ef")) -> str:
    """Returns one of three ``specs``, from careful to bold, by how steady the last ten of ``losses`` were.

    What counts is their coefficient of variation, standard deviation / |mean|: below 5 % the bold one, below 15 % the
    middle one, else the careful one; so also with fewer than ten losses, or with one that is not finite. A loss that
    falls fast is not steady either. Raises ConfigError for another number of specs.
    """
    if isinstance(specs, str) or len(specs) != 3:
        raise ConfigError(f"by_stability: expected three specs, from careful to bold, got {specs!r}")
    careful, middle, bold = specs
    last = [float(loss) for loss in losses[-WINDOW:]]
    if len(last) < WINDOW or not all(map(math.isfinite, last)):
        return careful
    spread, mean = statistics.pstdev(last), abs(statistics.fmean(last))
    if spread >= UNSTEADY * mean:
        return careful
    return middle if spread >= STEADY * mean else bold
