"""Packing against the plain-torch reference, bit for bit: types, strides, scales, and tensors that are refused."""

from __future__ import annotations

import pytest
import torch
from codec_cases import NAN, each_isa, same_bits

from pycomm.errors import ConfigError
from pycomm.ops.pack import pack_, pack_reference, unpack_, unpack_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((3,), (17,), (), (0, 4), (5, 7, 3), (2000,), (33, 65))


def make_tensors(layout: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for shape in SHAPES:
        for dtype in DTYPES:
            x = (100 * torch.randn(shape, generator=generator)).to(dtype)
            if x.numel() > 3:
                x.view(-1)[1:4] = torch.tensor([1e-7, NAN, -0.0])
            if layout == "transposed":
                x = x.transpose(0, -1) if x.dim() > 1 else x
            elif layout == "strided":
                x = x[1::2] if x.dim() else x
            elif layout == "expanded":
                x = x.expand(2, *x.shape)
            elif layout == "parameters":
                x = torch.nn.Parameter(x)
            tensors.append(x)
    return tensors


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "strided", "expanded", "parameters"])
def test_kernels_are_the_reference(layout: str, dtype: torch.dtype, scale: float) -> None:
    tensors = make_tensors(layout)
    numel = sum(tensor.numel() for tensor in tensors)
    expected = pack_reference(dtype, tensors, scale)
    for isa in each_isa():
        room = torch.full((numel + 8,), 5.0, dtype=dtype)
        bucket = room[3 : 3 + numel]
        pack_(bucket, tensors, scale)
        assert same_bits(bucket, expected), isa
        assert (room[:3] == 5).all() and (room[3 + numel :] == 5).all()
        if layout != "expanded":
            outputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
            unpack_(outputs, bucket, scale)
            for got, wanted in zip(outputs, unpack_reference(tensors, bucket, scale), strict=True):
                assert same_bits(got, wanted), isa


def test_large_tensors_stream_and_run_on_torchs_threads() -> None:
    sizes = (1_500_007, 3, 900, 2_000_001, 1)
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for dtype in DTYPES:
                bucket = torch.empty(sum(sizes), dtype=dtype)
                pack_(bucket, tensors, 0.5)
                assert same_bits(bucket, pack_reference(dtype, tensors, 0.5))
                outputs = [torch.empty_like(tensor) for tensor in tensors]
                unpack_(outputs, bucket, 2.0)
                assert all(map(same_bits, outputs, unpack_reference(tensors, bucket, 2.0)))
    finally:
        torch.set_num_threads(before)


def test_nothing_to_pack() -> None:
    pack_(torch.empty(0), [])
    pack_(torch.empty(0), [torch.empty(3, 0)])
    unpack_([], torch.empty(0))


def test_gradients_are_packed_in_place_of_their_parameters() -> None:
    model = torch.nn.Linear(5, 3)
    model(torch.ones(2, 5)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    bucket = torch.empty(18)
    pack_(bucket, grads, 0.5)
    assert torch.equal(bucket, torch.cat([grad.view(-1) for grad in grads]) / 2)
    unpack_(grads, bucket, 2.0)
    assert torch.equal(grads[0], torch.full((3, 5), 2.0))


def test_mistakes_raise_before_a_byte_moves() -> None:
    bucket = torch.full((10,), 7.0)
    good = torch.ones(4)
    with pytest.raises(ConfigError, match="expected a flat tensor of 8 elements"):
        pack_(bucket, [good, good])
    with pytest.raises(ConfigError, match=r"tensor 1 cannot be packed: .* got Tensor, torch.float64"):
        pack_(bucket, [good, torch.ones(6).double()])
    with pytest.raises(ConfigError, match="tensor 1 cannot be packed"):
        pack_(bucket, [good, torch.ones(6).to_sparse()])
    with pytest.raises(ConfigError, match="tensor 0 cannot be packed"):
        pack_(bucket, [torch.ones(10, dtype=torch.complex64).conj().imag])
    with pytest.raises(ConfigError, match="tensor 1 cannot be packed"):
        unpack_([good, torch.ones(6, device="meta")], bucket)
    with pytest.raises(ConfigError, match="bucket of float32, float16 or bfloat16, got torch.int64"):
        pack_(torch.ones(4).long(), [good])
    with pytest.raises(ConfigError, match="flat tensor"):
        pack_(torch.full((20,), 7.0)[::2], [good, torch.ones(6)])
    for own in (bucket[:6], bucket.as_strided((2, 3), (4, 2), 1), bucket[5:6].expand(6)):
        with pytest.raises(ConfigError, match="bucket's own memory"):
            pack_(bucket, [good, own])
        with pytest.raises(ConfigError, match="bucket's own memory"):
            unpack_([good, own], bucket)
    assert (bucket == 7).all() and (good == 1).all()


def test_tensors_with_gaps_may_step_over_the_bucket() -> None:
    """As the columns of a matrix do whose last ones are the bucket, or the rows around it."""
    memory = torch.arange(40.0)
    bucket, columns = memory[10:16], memory.as_strided((3, 2), (16, 1), 2)  # 2 3, 18 19, 34 35
    pack_(bucket, [columns])
    assert bucket.tolist() == [2, 3, 18, 19, 34, 35] and memory[:10].tolist() == list(range(10))
    unpack_([columns], bucket * 2)
    assert columns.tolist() == [[4, 6], [36, 38], [68, 70]]


# -- what torch.compile sees ------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    tensors = [torch.randn(3, 4).t(), torch.randn(5).half()]
    bucket = torch.zeros(17, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.pycomm.pack_, (bucket, tensors, 0.5))
    torch.library.opcheck(torch.ops.pycomm.unpack_, (tensors, bucket, 2.0))


def test_torch_compile_keeps_the_operators_in_the_graph() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        bucket = torch.empty(12)
        pack_(bucket, [a * 2, b], 0.5)
        return bucket + 1

    a, b = torch.randn(7), torch.randn(5)
    assert torch.equal(join(a, b), torch.cat([a, b / 2]) + 1)
