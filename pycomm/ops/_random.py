"""Random numbers that depend on (seed, index of the element) alone: Philox4x32-10 in plain torch.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The kernels (csrc/kernels/common/philox.h) give
the same bits, on CPU and GPU, however the elements are shared out among threads and calls.
"""

from __future__ import annotations

import torch

__all__ = ["random16"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def random16(seed: int, offset: int, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns 16 random bits for each of the elements ``offset .. offset + numel - 1``: ``(numel,)`` int32, 0..65535.

    Element i takes half ``i % 2`` (0: the low one) of word ``i // 2 % 4`` of Philox4x32-10 with the key ``seed`` (64
    bits, low word first) and the counter ``i // 8`` (64 bits in words 0 and 1; words 2 and 3 are 0).
    """
    first, last = offset // 8, (offset + numel + 7) // 8
    group = torch.arange(first, last, dtype=torch.int64, device=device)
    zero = torch.zeros_like(group)
    words = [group & _LOW, (group >> 32) & _LOW, zero, zero]
    key = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(10):
        even, odd = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]  # wrap; the 64 bits are right
        high_even, high_odd = (even >> 32) & _LOW, (odd >> 32) & _LOW
        words = [high_odd ^ words[1] ^ key[0], odd & _LOW, high_even ^ words[3] ^ key[1], even & _LOW]
        key = [(key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW]
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    numbers = torch.stack(halves, dim=1).view(-1)
    return numbers[offset - 8 * first :][:numel].to(torch.int32)
