"""Momentum correction and warm-up (Deep Gradient Compression): for sparse codecs, in place of the optimizer's momentum.

    u = m u + x;  v = v + u;  send the elements C picks of v;  both u and v become zero where they were sent

so that momentum acts on what arrives as if nothing had been delayed. Warm-up sends more at first: the ratio falls from
``start`` to the codec's in equal factors over ``warmup`` calls. Lin et al., ICLR 2018 (arXiv 1712.01887), Sections 3.1
and 3.3 and Algorithm 1. Costs two float32 an element, and needs the tensors' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import ConfigError
from ...sizes import whole_number
from .._sparse import check_ratio
from ..base import Codec, Compressor, Context, Message, Part, check_fraction
from ..state import NamedBuffers
from ._base import Wrapper

__all__ = ["MomentumCorrection", "make"]


@dataclass(eq=False)
class MomentumCorrection(Wrapper):
    """Corrects for momentum ``m`` around a sparse codec; ``warmup`` counts a tensor's calls, of several the fewest."""

    inner: Compressor
    m: float = 0.9
    warmup: int = 0
    start: float = 0.25

    name = "momentum"
    keeps_residual = True
    is_for_shards = False  # it must know which elements were sent

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.inner, Codec) and self.inner.is_sparse):
            raise ConfigError(
                f"momentum stands around a sparse codec (topk, randomk, threshold), not around {self.inner.spec!r}"
            )
        check_fraction(self.name, "m", self.m)
        whole_number(self.warmup, "momentum: warmup, in calls", 0)
        check_ratio(f"{self.name}: start", self.start)
        self._velocities = NamedBuffers(self.spec)
        self._residuals = NamedBuffers(self.spec)
        self._kept = {"velocities": self._velocities, "residuals": self._residuals}
        self._calls: dict[str, int] = {}

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        return tuple(self._calls.get(str(part.name), 0) for part in parts) if self.warmup else ()

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        residual = self._residuals.get(context.parts, flat)
        velocity = self._velocities.get(context.parts, flat)
        velocity.mul_(self.m).add_(flat).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        codec = self._codec(min(self.calls_of(context.parts), default=0))
        for part in context.parts:
            self._calls[str(part.name)] = self._calls.get(str(part.name), 0) + 1
        sent = torch.where(flat.isfinite(), velocity, flat)  # an inf or NaN is sent, and not kept
        return Message(codec, sent, residual)

    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        assert message.residual is not None, "begin made one"
        # Sparse codecs send exactly, so nothing is left of what was sent.
        self._velocities.get(context.parts, message.input).mul_(message.residual != 0)

    def _codec(self, call: int) -> Codec:
        """Returns the inner codec with the ratio of the ``call``-th call."""
        assert isinstance(self.inner, Codec), "checked when made"
        ratio = float(self.inner.ratio)  # type: ignore[attr-defined]  # sparse codecs have one
        if call >= self.warmup or ratio >= self.start:
            return self.inner
        return replace(self.inner, ratio=self.start * (ratio / self.start) ** (call / self.warmup))  # type: ignore[type-var]

    def _entries(self) -> set[str]:
        return super()._entries() | {"calls"}

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | {"calls": dict(self._calls)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._calls = dict(state["calls"])


make = MomentumCorrection
