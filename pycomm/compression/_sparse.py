"""What the codecs that send some of the elements have in common: k, and the payload of indices and values."""

from __future__ import annotations

import math

import torch

from ..errors import ConfigError, TransportError

__all__ = ["WORD_BYTES", "check_ratio", "sparse_numel", "sparse_payload_bytes", "split_payload"]

WORD_BYTES = 8  # an int32 index and a float32 value


def check_ratio(name: str, ratio: object) -> None:
    """Raises ConfigError unless ``ratio`` is a share: more than 0, at most 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ConfigError(
            f"{name}: expected a ratio in (0, 1], the share of elements sent (0.01 or '1%'), got {ratio!r}"
        )


def sparse_numel(ratio: float, numel: int) -> int:
    """Returns k: ``ratio`` of ``numel`` elements, rounded up, so at least one if there is one."""
    return min(numel, math.ceil(ratio * numel))


def sparse_payload_bytes(k: int) -> int:
    """Returns the bytes of a payload of ``k`` elements: k int32 indices, then k float32 values."""
    return WORD_BYTES * k


def split_payload(payload: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices ``(k,)`` and values ``(k,)`` of a payload. Raises TransportError if its length is not
    theirs."""
    if payload.numel() != sparse_payload_bytes(k):
        raise TransportError(
            f"a payload of {payload.numel()} bytes cannot be decoded: expected {sparse_payload_bytes(k)} for {k} "
            f"indices and values; it was cut short, or the ranks compress differently"
        )
    words = payload.view(torch.int32)
    return words[:k], words[k:].view(torch.float32)
