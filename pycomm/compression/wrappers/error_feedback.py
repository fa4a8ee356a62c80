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

import torch

from ...errors import ConfigError
from ..base import Codec, Compressor, Context, Message, Part, check_fraction
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
        check_fraction(self.name, "a momentum m", self.m)
        if self.m and self.mode == "classic":
            raise ConfigError(
                f"error_feedback: expected no momentum in mode 'classic', got m={self.m!r}; for sparse codecs +dgc "
                f"corrects for momentum"
            )
        if isinstance(self.inner, Wrapper):
            raise ConfigError(
                f"error_feedback stands directly around a codec, not around {self.inner.name}; swap the two"
            )
        self._residuals = NamedBuffers(self.spec)  # classic: e; ef21: this rank's estimate g
        self._means = NamedBuffers(self.spec)  # ef21: the mean of all ranks' estimates
        self._averages = NamedBuffers(self.spec)  # ef21 with momentum: v
        self._kept = {"residuals": self._residuals}
        if self.mode == "ef21":
            self._kept |= {"means": self._means, "averages": self._averages}

    @property
    def codec(self) -> Codec:
        """That of ``inner``, combining in such a way that all that is lost is known."""
        return self.inner.codec.for_feedback

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
            return message._replace(codec=self.codec, residual=kept)
        if self.m:
            is_finite, average = flat.isfinite(), self._averages.get(context.parts, flat)
            average.copy_(torch.where(is_finite, average * self.m + flat * (1 - self.m), average))
            flat = torch.where(is_finite, average, flat)  # an inf or NaN is sent, and changes nothing here
        difference = flat - kept
        return Message(self.codec, difference, torch.zeros_like(difference))

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
        other._residuals = other._kept["residuals"] = self._residuals
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


make = ErrorFeedback
