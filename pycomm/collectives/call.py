"""A call of a verb, as the verbs hand it to a Group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..algorithms.executor import Collective
    from ..compression import Part

__all__ = ["Call"]


class Call(NamedTuple):
    """One call of a verb, ready to run.

    First its ``collectives``, in order, then ``finishes``; ``result`` is what its handle returns. ``is_agreed``: the
    ranks have compared already that all make this call. ``follow_up(timeout_s)`` exchanges what depends on the results
    of the collectives, such as what they told of sizes.
    """

    verb: str
    collectives: Sequence[Collective]
    finishes: Sequence[Callable[[], None] | None] = ()
    algorithm: str | None = None
    timeout_s: float | None = None
    compression: Any = None  # with the tensors' ``name``, or all their ``parts``
    name: str | None = None
    result: Any = None
    parts: Sequence[Part] = ()
    is_agreed: bool = False
    follow_up: Callable[[float], None] | None = None
