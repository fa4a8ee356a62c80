"""Error feedback: what one call does not send, a later one does.

``classic``: the residual e is added to the next input; the codec sends C(x + e) and e = x + e - C(x + e). Seide et al.
2014; Karimireddy et al., ICML 2019 (arXiv 1901.09847). ``ef21``: each rank keeps an estimate g of its own input and
sends C(x - g); the result is the sum of the estimates. Richtarik et al., NeurIPS 2021 (arXiv 2106.05203), Algorithm 1.
With momentum, ``ef21:m=0.9``, x is v = m v + (1 - m) x: the estimates follow an average of the inputs, not the noise of
each; it takes the place of the optimizer's own momentum. Fatkhullin et al., NeurIPS 2023 (arXiv 2305.15155), EF21-SGDM.

ef21 suits Adam better than classic: its results are smooth, while what classic owes comes in bursts, whose squares make
Adam's steps small. Costs one float32 an element (ef21: two, with momentum three), and needs the tensors' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ..base import Compressor, Context, Message, Part
from ..none import NoCompression
from ..state import NamedBuffers
from ._base import Wrapper

__all__ = ["ErrorFeedback", "make"]

MODES = ("classic", "ef21")


@dataclass(eq=False)
class ErrorFeedback(Wrapper):
    """Feeds back the error of ``inner``; ``mode`` is "classic" or "ef21", that with momentum ``m``."""

    inner: Compressor
    mode: str = "classic"
    m: float = 0.0

    name = "error_feedback"
    keeps_residual = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise ConfigError(f"error_feedback: unknown mode {self.mode!r}; known: {', '.join(MODES)}")
        if isinstance(self.m, bool) or not 0 <= self.m < 1 or (self.m and self.mode == "classic"):
            raise ConfigError(
                f"error_feedback: expected a momentum m in [0, 1), and 0 in mode 'classic', got {self.m!r}; for sparse "
                f"codecs +dgc corrects for momentum"
            )
        if isinstance(self.inner, Wrapper):
            raise ConfigError(
                f"error_feedback stands directly around a codec, not around {self.inner.name}; swap the two"
            )
        self._residuals = NamedBuffers(self.spec)  # classic: e; ef21: this rank's estimate g
        self._means = NamedBuffers(self.spec)  # ef21: the mean of all ranks' estimates
        self._averages = NamedBuffers(self.spec)  # ef21 with momentum: v

    @property
    def needs_total(self) -> bool:  # type: ignore[override]
        return self.mode == "ef21" or self.inner.needs_total

    @property
    def is_for_shards(self) -> bool:  # type: ignore[override]
        return self.mode == "classic" and self.inner.is_for_shards

    @property
    def is_for_gathers(self) -> bool:  # type: ignore[override]
        return self.mode == "classic" and self.inner.is_for_gathers

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        message = self.inner.begin(flat, context)
        kept = self._residuals.get(context.parts, flat)
        if message is None:
            return None
        if self.mode == "classic":
            return message._replace(residual=kept)
        if self.m:
            average = self._averages.get(context.parts, flat).mul_(self.m).add_(flat, alpha=1 - self.m)
            average.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            flat = torch.where(flat.isfinite(), average, flat)  # an inf or NaN is sent, and not kept
        difference = flat - kept
        return message._replace(input=difference, residual=torch.zeros_like(difference))

    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        if self.mode == "classic":
            return
        assert message.residual is not None, "begin made one"
        # residual is now x - g - C: what is left between the input and the new estimate.
        # An inf or NaN arrives in this call and stays in no estimate: all ranks see the same total, so where it is not
        # finite none of them follows, and where only the own input is not, it was not sent.
        kept, mean = self._residuals.get(context.parts, total), self._means.get(context.parts, total)
        followed = message.input - message.residual
        kept.add_(torch.where(total.isfinite() & followed.isfinite(), followed, 0.0))
        mean.add_(torch.where(total.isfinite(), total, 0.0), alpha=1 / context.world_size)
        torch.where(total.isfinite(), mean * context.world_size, total, out=total)

    def exactly(self) -> ErrorFeedback:
        """Returns this state around no compression: a call by it sends all that is owed of its tensors."""
        other = ErrorFeedback(NoCompression())
        other._residuals = self._residuals
        return other

    def owes(self, parts: Sequence[Part]) -> bool:
        """Says whether there is a residual of any of ``parts``; alike on ranks that made the same calls."""
        return any(part.name in self._residuals for part in parts)

    def forget(self, parts: Sequence[Part]) -> None:
        """Drops the residuals of ``parts``."""
        self._residuals.drop(parts)

    def residual(self, *names: str) -> torch.Tensor:
        """Returns a copy of what is still owed of the named tensors, in classic mode; of the estimates, in ef21."""
        state = self._residuals.state_dict()
        return torch.cat([state[name] for name in names])

    def _own_state(self) -> dict[str, Any]:
        own = {"residuals": self._residuals.state_dict()}
        if self.mode == "ef21":
            own |= {"means": self._means.state_dict(), "averages": self._averages.state_dict()}
        return own

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._residuals.load_state_dict(state["residuals"])
        self._means.load_state_dict(state.get("means", {}))
        self._averages.load_state_dict(state.get("averages", {}))


make = ErrorFeedback
