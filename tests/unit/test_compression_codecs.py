"""Laws of every registered codec, without ranks: bounds, residuals, special values, damaged payloads, unbiasedness."""

from __future__ import annotations

import math

import pytest
import torch

from pycomm.compression import CODECS, Codec, Combine, Context, Part, parse
from pycomm.errors import ConfigError, TransportError

# More than the defaults where the parameters matter; a codec that is not here is tried with its defaults.
SPECS = {
    "cast": ["bf16", "fp16"],
    "quantize": ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "int8:rounding=stochastic",
                 "int4:block_numel=32"],
    "topk": ["topk:0.1", "topk:1.0", "topk:0.1,tolerance=0.2", "topk:10%,exchange=balanced"],
    "randomk": ["randomk:0.1", "randomk:0.5,is_unbiased=true"],
    "threshold": ["threshold:0.5,ratio=0.5"],
    "qsgd": ["qsgd", "qsgd:levels=7,block_numel=64"],
    "ternary": ["ternary", "ternary:rounding=nearest"],
    "powersgd": ["powersgd:2"],
}  # fmt: skip
ALL = [spec for name in CODECS.names() for spec in SPECS.get(name, [name])]

HUGE, TINY = 3.0e38, 1e-40
INPUTS = {
    "random": lambda: torch.randn(1003, generator=torch.Generator().manual_seed(1)),
    "outliers": lambda: torch.randn(1003, generator=torch.Generator().manual_seed(2)) ** 9,
    "constant": lambda: torch.full((1000,), 0.37),
    "zero": lambda: torch.zeros(300),
    "one": lambda: torch.tensor([-2.5]),
    "empty": lambda: torch.zeros(0),
    "denormal": lambda: torch.linspace(-TINY, TINY, 500),
    "huge": lambda: torch.linspace(-1, 1, 501) * HUGE,
}


def shape_of(numel: int) -> tuple[int, ...]:
    return (17, 59) if numel == 17 * 59 else (25, 20) if numel == 500 else (numel,)


def context_of(flat: torch.Tensor, seed: int = 1) -> Context:
    return Context((Part("w", shape_of(flat.numel())),), seed=seed, kept={})


def round_trip(codec: Codec, flat: torch.Tensor, residual: torch.Tensor | None = None, seed: int = 1) -> torch.Tensor:
    """Encodes and decodes as a world of one does."""
    context = context_of(flat, seed)
    for round_ in range(codec.rounds):
        context = context._replace(round=round_)
        payload = torch.zeros(codec.payload_numel(flat.numel(), context), dtype=codec.wire_dtype)
        codec.encode(payload, flat, context, residual)
        if round_ + 1 < codec.rounds:
            codec.advance(payload, context)
    decoded = torch.full_like(flat, 7.0)  # must be overwritten
    codec.decode(decoded, payload, context)
    return decoded


def codec_of(spec: str) -> Codec:
    codec = parse(spec)
    assert isinstance(codec, Codec)
    return codec


@pytest.mark.parametrize("spec", ALL)
def test_decoded_is_within_the_declared_bound(spec: str) -> None:
    for name, make in INPUTS.items():
        flat = make()
        decoded = round_trip(codec_of(spec), flat)
        error = (decoded.double() - flat.double()).abs()
        bound = codec_of(spec).bound(flat).double()
        is_bounded = bound.isfinite()
        assert decoded[is_bounded].isfinite().all(), name
        assert (error <= bound * (1 + 1e-6) + 1e-38)[is_bounded].all(), f"{name}: {error.max():g}"
        assert is_bounded.all() or name == "huge"


@pytest.mark.parametrize("spec", ALL)
def test_input_is_left_alone_and_twice_gives_the_same(spec: str) -> None:
    flat = INPUTS["random"]()
    before = flat.clone()
    assert torch.equal(round_trip(codec_of(spec), flat), round_trip(codec_of(spec), flat))
    assert torch.equal(flat, before)


@pytest.mark.parametrize("spec", [spec for spec in ALL if "is_unbiased" not in spec])
def test_sent_and_residual_are_the_input(spec: str) -> None:
    codec = codec_of(spec)
    for name in ("random", "outliers", "constant", "zero", "one", "empty", "denormal"):
        flat = INPUTS[name]()
        before = torch.flip(flat, [0]) * 0.5
        residual = before.clone()
        decoded = round_trip(codec, flat, residual)
        total = flat + before
        if codec.is_sparse:
            assert torch.equal(decoded + residual, total), name
            assert not ((decoded != 0) & (residual != 0)).any(), name
        else:  # the residual is a difference of float32, rounded once
            slack = 2.0**-22 * (total.abs() + decoded.abs()) + 1e-37
            slack += 1e-5 * float(total.norm()) if codec.rounds > 1 else 0.0  # products of matrices round, too
            assert ((decoded + residual - total).abs() <= slack).all(), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ALL)
def test_what_is_not_finite_is_seen_and_not_kept(spec: str, value: float) -> None:
    flat = INPUTS["random"]()
    flat[1] = value
    residual = torch.zeros_like(flat)
    decoded = round_trip(codec_of(spec), flat, residual)
    # random-k, which may not draw that element, says so in all that it draws
    assert (decoded.isnan() | (decoded == 0)).all() if spec.startswith("randomk") else not decoded[1].isfinite()
    assert not decoded.isfinite().all()
    assert residual.isfinite().all()


@pytest.mark.parametrize("spec", ALL)
def test_adding_is_decoding_and_adding(spec: str) -> None:
    codec = codec_of(spec)
    if codec.rounds > 1:
        return  # decodes a sum, never one rank's payload
    flat = INPUTS["random"]()
    context = context_of(flat)
    payload = torch.zeros(codec.payload_numel(flat.numel(), context), dtype=codec.wire_dtype)
    codec.encode(payload, flat, context)
    plain, added = torch.empty_like(flat), torch.ones_like(flat)
    codec.decode(plain, payload, context)
    codec.decode(added, payload, context, add=True)
    assert torch.equal(added, 1 + plain)
    if codec.combine is Combine.GATHER:
        summed = torch.full_like(flat, 7.0)
        codec.decode_sum(summed, [payload, payload], context)
        assert torch.equal(summed, plain + plain)


@pytest.mark.parametrize("spec", ["int8:rounding=stochastic", "int4:rounding=stochastic", "fp8:rounding=stochastic",
                                  "mxfp4:rounding=stochastic", "ternary", "qsgd", "qsgd:levels=3",
                                  "randomk:0.25,is_unbiased=true"])  # fmt: skip
def test_stochastic_codecs_are_unbiased(spec: str) -> None:
    """The mean of n draws is within 6 standard errors of the input: by chance one in 10^9 elements is not."""
    codec = codec_of(spec)
    flat = torch.linspace(-1, 1, 64)
    draws = torch.stack([round_trip(codec, flat, seed=seed) for seed in range(600)]).double()
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - flat).abs() <= 6 * standard_error + 2.0**-15).all()


@pytest.mark.parametrize("spec", [spec for spec in ALL if codec_of(spec).wire_dtype == torch.uint8])
def test_damaged_payloads_are_errors_or_numbers(spec: str) -> None:
    codec = codec_of(spec)
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(97, generator=generator)
    context = context_of(flat)
    payload = torch.zeros(codec.payload_numel(97, context), dtype=torch.uint8)
    codec.encode(payload, flat, context)
    output = torch.empty(97)
    for length in (0, 8, payload.numel() - 8):
        with pytest.raises(TransportError, match="cut short"):
            codec.decode(output, payload[:length].clone(), context)
    refused = 0
    for _ in range(300):
        damaged = payload.clone()
        where = torch.randint(payload.numel(), (3,), generator=generator)
        damaged[where] = torch.randint(256, (3,), generator=generator, dtype=torch.uint8)
        try:
            codec.decode(output, damaged, context)
        except TransportError as error:
            refused += 1
            assert "damaged" in str(error)
            if codec.combine is Combine.GATHER:
                output.fill_(7.0)
                with pytest.raises(TransportError, match="damaged"):
                    codec.decode_sum(output, [payload, damaged], context)
                assert (output == 7.0).all()
    assert (refused > 0) == codec.is_sparse  # an index outside is noticed; a flipped code is another number


def test_threshold_sends_nothing_below_it_and_no_more_than_its_share() -> None:
    flat = torch.arange(100.0) / 100
    assert int((round_trip(codec_of("threshold:0.9,ratio=0.5"), flat) != 0).sum()) == 10
    assert int((round_trip(codec_of("threshold:0.1,ratio=0.05"), flat) != 0).sum()) == 5


def test_randomk_draws_other_elements_each_time_and_all_in_the_end() -> None:
    codec, flat = codec_of("randomk:0.1"), torch.ones(100)
    seen = torch.stack([round_trip(codec, flat, seed=seed) for seed in range(200)])
    assert (seen.sum(1) == 10).all()
    assert (seen.sum(0) > 0).all()


def test_unbiased_randomk_multiplies_by_the_stretch_that_it_drew_from() -> None:
    decoded = round_trip(codec_of("randomk:0.3,is_unbiased=true"), torch.ones(10))
    assert sorted(decoded[decoded != 0].tolist()) == [3.0, 3.0, 4.0]


def test_qsgd_draws_no_level_above_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """127 plus a draw just below 1 is 128 in float32, and -128 in int8."""
    just_below = torch.nextafter(torch.ones(1), torch.zeros(1))
    monkeypatch.setattr(torch, "rand", lambda shape, **_: just_below.expand(shape))
    flat = torch.tensor([2.0, 0.0, -3.0, 0.0])
    assert torch.equal(round_trip(codec_of("qsgd:block_numel=2"), flat), torch.tensor([2.0, 0.0, -3.0, 0.0]))


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_ranks_that_saturate_add_up_to_something_finite(spec: str) -> None:
    """One after the other, as a ring adds: the sums are rounded, too."""
    codec = codec_of(spec)
    for world_size in range(1, 65):
        for flat in (torch.full((4,), 3e38), torch.full((4,), float(torch.finfo(codec.wire_dtype).max) / world_size)):
            payload = torch.zeros(4, dtype=codec.wire_dtype)
            codec.encode(payload, flat, context_of(flat)._replace(world_size=world_size))
            total = payload.clone()
            for _ in range(world_size - 1):
                total += payload
            assert total.isfinite().all(), world_size
            assert total[0] > 0.7 * torch.finfo(codec.wire_dtype).max


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_powersgd_starts_from_factors_of_any_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    flat = scale * (torch.randn(17, 2, generator=generator) @ torch.randn(2, 59, generator=generator)).view(-1)
    codec = codec_of("powersgd:2")
    for _ in range(3):
        decoded = round_trip(codec, flat)
    assert (decoded - flat).abs().max() < 1e-4 * flat.abs().max()


def test_powersgd_finds_a_matrix_of_low_rank() -> None:
    generator = torch.Generator().manual_seed(3)
    flat = (torch.randn(17, 2, generator=generator) @ torch.randn(2, 59, generator=generator)).view(-1)
    codec = codec_of("powersgd:2")
    for _ in range(2):
        decoded = round_trip(codec, flat)
    assert (decoded - flat).norm() < 1e-4 * flat.norm()


def test_ratio_outside_is_refused() -> None:
    for spec in ("topk:0", "topk:1.01", "topk:101%", "randomk:-1", "threshold:1,ratio=0", "topk:abc"):
        with pytest.raises(ConfigError, match=r"expected a ratio in \(0, 1\]"):
            parse(spec)
