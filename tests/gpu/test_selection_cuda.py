"""topk, scatter_add, pack and unpack on a GPU give the CPU's bits. Skips, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from pycomm.errors import ConfigError
from pycomm.ops import native
from pycomm.ops.pack import pack_, unpack_
from pycomm.ops.topk import read_report, scatter_add_, topk_, topk_reference

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False")
    if native().cuda_archs is None:
        pytest.skip("pycomm was built without CUDA; PYCOMM_CUDA=1 pip install -e . --no-build-isolation")


def floats(kind: str, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "equal":
        x = x.sign()
    elif kind == "one bin":
        x = 1 + 1e-6 * x
    elif kind == "hidden":  # large ones that no sample sees
        x[numel // 2 :: 7] = 1e20
    elif kind == "special":
        places = x[:: max(1, numel // 9)]
        specials = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-45, 3e38, -1e-40, NAN, 1.0])
        places.copy_(specials[torch.arange(len(places)) % len(specials)])
    return x


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", ["normal", "equal", "one bin", "hidden", "special"])
@pytest.mark.parametrize(("numel", "share"), [(1, 1.0), (33, 0.5), (6007, 0.01), (3_000_001, 0.01), (3_000_001, 0.3)])
def test_topk_is_the_cpus(numel: int, share: float, kind: str, has_residual: bool) -> None:
    k = max(1, int(numel * share))
    for misaligned in (0, 1):
        x = floats(kind, numel + misaligned)[misaligned:]
        left = floats("normal", numel, 1) if has_residual else None
        left_there = None if left is None else left.cuda()
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
        there, values_there = torch.empty_like(indices, device="cuda"), torch.empty_like(values, device="cuda")
        report = torch.zeros(3, dtype=torch.int32, device="cuda")
        topk_(indices, values, x, residual=left)
        topk_(there, values_there, x.cuda(), residual=left_there, report=report)
        assert same_bits(there, indices)
        assert same_bits(values_there, values)
        assert left is None or same_bits(left_there, left)
        assert read_report(report).selected == k


def test_topk_of_more_tiles_than_a_block_sums_at_once() -> None:
    x, k = floats("normal", 20_000_003), 20_000
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    there, values_there = torch.empty_like(indices, device="cuda"), torch.empty_like(values, device="cuda")
    topk_(indices, values, x)
    topk_(there, values_there, x.cuda())
    assert same_bits(there, indices) and same_bits(values_there, values)


def test_a_reused_threshold_selects_what_the_reference_does() -> None:
    k = 2000
    report = torch.zeros(3, dtype=torch.int32, device="cuda")
    indices, values = torch.empty(k, dtype=torch.int32, device="cuda"), torch.empty(k, device="cuda")
    threshold = 0.0
    for step, scale in enumerate((1.0, 0.99, 0.98, 0.5, 4.0)):
        x = scale * floats("normal", 200_000, step)
        topk_(indices, values, x.cuda(), report=report, tolerance=0.2)
        expected = topk_reference(x, k, threshold=threshold, tolerance=0.2)
        assert same_bits(indices, expected[0])
        assert same_bits(values, expected[1])
        told = read_report(report)
        assert told == expected[3]
        threshold = told.threshold


def test_scatter_add() -> None:
    flat, k = floats("normal", 100_003), 5000
    indices, values = torch.randperm(flat.numel())[:k].to(torch.int32), floats("normal", k, 2)
    there = flat.cuda()
    scatter_add_(there, indices.cuda(), values.cuda(), factor=0.3)
    scatter_add_(flat, indices, values, factor=0.3)
    assert same_bits(there, flat)
    for bad in (-1, flat.numel()):
        indices[k // 2] = bad
        there = flat.cuda()
        scatter_add_(there, indices.cuda(), values.cuda())
        assert there.isnan().all()


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pack_and_unpack(dtype: torch.dtype, scale: float) -> None:
    tensors = []
    for index in range(400):  # more than one launch takes
        shape = ((index * 37) % 300, 1 + index % 5)
        x = floats("special", shape[0] * shape[1], index).view(shape)
        x = x.to((torch.float32, torch.float16, torch.bfloat16)[index % 3])
        tensors.append(x.t() if index % 11 == 5 else x)
    tensors.append(floats("normal", 1_000_003))
    there = [tensor.cuda() for tensor in tensors]
    assert [each.stride() for each in there] == [each.stride() for each in tensors]
    bucket = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    bucket_there = torch.empty_like(bucket, device="cuda")
    pack_(bucket, tensors, scale)
    pack_(bucket_there, there, scale)
    assert same_bits(bucket_there, bucket)
    unpack_(tensors, bucket, scale)
    unpack_(there, bucket_there, scale)
    assert all(same_bits(got, expected) for got, expected in zip(there, tensors, strict=True))
    with pytest.raises(ConfigError, match="tensor 0 cannot be packed"):
        pack_(bucket_there, tensors)


def test_calls_can_be_captured_in_a_graph() -> None:
    x, k = torch.randn(50_000, device="cuda"), 500
    tensors = [x[:30_001], x[30_001:]]
    bucket, total = torch.empty(50_000, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(x)
    indices, values = torch.empty(k, dtype=torch.int32, device="cuda"), torch.empty(k, device="cuda")

    def step() -> None:
        pack_(bucket, tensors)
        topk_(indices, values, x)
        total.zero_()
        scatter_add_(total, indices, values)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert same_bits(bucket, x.cpu().bfloat16())
    expected = torch.zeros(50_000)
    chosen, kept, _, _ = topk_reference(x.cpu(), k)
    expected[chosen.long()] = kept
    assert same_bits(total, expected)
