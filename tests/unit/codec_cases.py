"""What the tests of the codecs share: instruction sets, bits, and inputs that are hard to encode."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pycomm.ops import native

NAN, INF = float("nan"), float("inf")
LARGEST = 3.4028234663852886e38


def each_isa() -> Iterator[str]:
    """Every instruction set that this machine has, in use while the loop's body runs; afterwards the best one."""
    try:
        for name in ("avx512", "avx2", "generic"):
            if native()._reduce_isa(name):
                yield name
    finally:
        native()._reduce_isa(None)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal to the bit, NaNs and signs of zeros too."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    return torch.equal(got.contiguous().view(integers), expected.contiguous().view(integers))


def hard_floats(numel: int, seed: int = 0) -> torch.Tensor:
    """Ordinary numbers of many sizes, with stretches of every kind of special one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    stretches = (0.0, -0.0, 1e-45, -1e-40, NAN, INF, -INF, LARGEST, -LARGEST, 1e-31, 8e-31, 1e37)
    for index, value in enumerate(stretches):
        begin = 211 + 307 * index
        x[begin : begin + (1 if value != value or abs(value) == INF else 40)] = value
    x[4000:4300] = 0.0
    return x
