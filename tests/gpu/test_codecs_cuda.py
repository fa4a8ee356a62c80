"""The CUDA kernels give the CPU's bits. Skips, with the reason, where there is no GPU or no kernels for it."""

from __future__ import annotations

import pytest
import torch

from pycomm.ops import native
from pycomm.ops.quantize import FORMATS, dequantize_, dequantize_add_, payload_bytes, quantize_

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
SIZES = [(1, None), (31, None), (33, None), (6007, None), (3000, 96), (9001, 4096), (3_000_001, None)]
ROUNDED = [(name, rounding) for name in FORMATS for rounding in ("nearest", "stochastic") if name != "sign"]
ROUNDED += [("sign", "nearest")]


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False")
    if native().cuda_archs is None:
        pytest.skip("pycomm was built without CUDA; PYCOMM_CUDA=1 pip install -e . --no-build-isolation")


def hard_floats(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    for index, value in enumerate((0.0, -0.0, 1e-45, -1e-40, NAN, -INF, 3.4028234663852886e38, 1e-31, 1e37)):
        x[200 + 300 * index : 200 + 300 * index + (1 if value != value or abs(value) == INF else 40)] = value
    return x


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("misaligned", [0, 1])
@pytest.mark.parametrize(("numel", "block_numel"), SIZES)
@pytest.mark.parametrize(("format", "rounding"), ROUNDED)
def test_bits_are_those_of_the_cpu(format, rounding, numel, block_numel, misaligned) -> None:
    block_numel = None if FORMATS[format].is_mx else block_numel
    options = {"block_numel": block_numel, "rounding": rounding, "seed": 2**40 + 3, "offset": 2**34 + 5}
    x, before = hard_floats(numel + misaligned, 0)[misaligned:], hard_floats(numel, 1)
    on_gpu = hard_floats(numel + misaligned, 0).cuda()[misaligned:]
    for has_residual in (False, True):
        payload = torch.empty(payload_bytes(format, numel, block_numel), dtype=torch.uint8)
        there = torch.empty_like(payload, device="cuda")
        left, left_there = (before.clone(), before.cuda()) if has_residual else (None, None)
        quantize_(payload, x, format, residual=left, **options)
        quantize_(there, on_gpu, format, residual=left_there, **options)
        assert same_bits(there, payload)
        assert left is None or same_bits(left_there, left)
        for decode in (dequantize_, dequantize_add_):
            flat, flat_there = before.clone(), before.cuda()
            decode(flat, payload, format, block_numel=block_numel, factor=0.7)
            decode(flat_there, there, format, block_numel=block_numel, factor=0.7)
            assert same_bits(flat_there, flat)


def test_calls_can_be_captured_in_a_graph() -> None:
    x = torch.randn(10_000, device="cuda")
    payload, flat = torch.empty(payload_bytes("int8", 10_000), dtype=torch.uint8, device="cuda"), torch.zeros_like(x)
    quantize_(payload, x, "int8")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_(payload, x, "int8")
        dequantize_(flat, payload, "int8")
    x.copy_(torch.ones_like(x))
    graph.replay()
    assert torch.equal(flat, torch.ones_like(x))
