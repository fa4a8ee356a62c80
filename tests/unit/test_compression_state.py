"""What the wrappers keep: their recursions against written-out ones, checkpoints, other worlds; and the schedules."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from pycomm import compression
from pycomm.compression import Codec, Compressor, Context, Part, merge_states, parse
from pycomm.errors import CheckpointError, ConfigError

PARTS = (Part("w", (20, 10)),)
NUMEL = 200


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def all_reduce(ranks: list[Compressor], step: int) -> torch.Tensor:
    """One call of all ranks, in this process: what every payload says, added up in the order of the ranks."""
    total, begun = torch.zeros(NUMEL), []
    for rank, compressor in enumerate(ranks):
        context = Context(PARTS, rank, len(ranks), seed=step, kept={})
        message = compressor.begin(inputs(rank, step), context)
        if message is None:
            continue
        begun.append((compressor, message, context))
        total += sent_of(message, context)
    for compressor, message, context in begun:
        result = total.clone()
        compressor.end(message, result, context)
    return result if begun else total


def sent_of(message: Any, context: Context) -> torch.Tensor:
    codec: Codec = message.codec
    for round_ in range(codec.rounds):
        context = context._replace(round=round_)
        payload = torch.zeros(codec.payload_numel(NUMEL, context), dtype=codec.wire_dtype)
        codec.encode(payload, message.input, context, message.residual)
        if round_ + 1 < codec.rounds:
            codec.advance(payload, context)
    decoded = torch.zeros(NUMEL)
    codec.decode(decoded, payload, context)
    return decoded


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """Returns ``flat`` where its ``count`` largest magnitudes are, 0 elsewhere."""
    kept = torch.zeros_like(flat)
    where = flat.abs().topk(count).indices
    kept[where] = flat[where]
    return kept


def test_momentum_correction_is_algorithm_1() -> None:
    compressor = parse("topk:0.1+dgc:m=0.9,warmup=2,start=0.4")
    velocity, residual = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step, count in enumerate([80, 40, 20, 20, 20]):  # 0.4, then 0.4 * (1/4)^(1/2), then 0.1 of 200
        velocity = 0.9 * velocity + inputs(0, step)
        residual = residual + velocity
        expected = largest(residual, count)
        velocity, residual = velocity * (expected == 0), residual * (expected == 0)
        assert torch.allclose(all_reduce([compressor], step), expected, atol=1e-5), step


def test_ef21_with_momentum_follows_the_average() -> None:
    ranks = [parse("topk:0.1+ef21:m=0.75") for _ in range(2)]
    averages, estimates = [torch.zeros(NUMEL)] * 2, [torch.zeros(NUMEL)] * 2
    for step in range(5):
        got = all_reduce(ranks, step)
        averages = [0.75 * v + 0.25 * inputs(rank, step) for rank, v in enumerate(averages)]
        estimates = [g + largest(v - g, 20) for v, g in zip(averages, estimates, strict=True)]
        assert torch.allclose(got, sum(estimates), atol=1e-5)


def test_ef21_is_algorithm_1() -> None:
    ranks = [parse("topk:0.1+ef21") for _ in range(3)]
    estimates = [torch.zeros(NUMEL) for _ in ranks]
    for step in range(5):
        estimates = [kept + largest(inputs(rank, step) - kept, 20) for rank, kept in enumerate(estimates)]
        assert torch.allclose(all_reduce(ranks, step), sum(estimates, torch.zeros(NUMEL)), atol=1e-5), step


@pytest.mark.parametrize(
    "spec", ["int4+ef", "topk:0.1+ef21", "sign+ef21:m=0.5", "topk:0.1+dgc:warmup=6", "int4+ef+every:2", "powersgd:2+ef"]
)
def test_a_saved_state_goes_on_as_if_nothing_had_been(spec: str) -> None:
    first = parse(spec)
    for step in range(3):
        all_reduce([first], step)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = parse(spec)
    second.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 7):
        assert torch.equal(all_reduce([first], step), all_reduce([second], step)), step


def test_another_world_owes_the_same_mean() -> None:
    old = [compression.error_feedback(compression.topk(0.1)) for _ in range(2)]
    for step in range(3):
        all_reduce(list(old), step)
    merged = merge_states([each.state_dict() for each in old])
    new = [compression.error_feedback(compression.topk(0.1)) for _ in range(3)]
    for each in new:
        each.load_state_dict(merged)
    owed = (old[0].residual("w") + old[1].residual("w")) / 2
    assert owed.abs().max() > 0
    assert torch.allclose(sum(each.residual("w") for each in new) / 3, owed)
    total = all_reduce(list(new), 3)
    given = sum(inputs(rank, 3) for rank in range(3)) + 3 * owed
    assert torch.allclose(total + sum(each.residual("w") for each in new), given, atol=1e-5)


def test_states_that_do_not_belong_together_are_refused() -> None:
    ahead, behind = parse("topk:0.1+dgc"), parse("topk:0.1+dgc")
    all_reduce([ahead], 0)
    all_reduce([behind], 0)
    all_reduce([ahead], 1)
    for states, message in (
        ([], "got none"),
        ([ahead.state_dict(), behind.state_dict()], "are they of one step"),
        ([ahead.state_dict(), parse("int8+ef").state_dict()], "different entries"),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge_states(states)


def test_warm_up_goes_on_in_another_layout() -> None:
    """As where DDP lays out its buckets anew after the first pass."""
    compressor = parse("topk:0.1+dgc:warmup=3,start=0.8")
    a, b = Part("a", (100,)), Part("b", (100,))
    counts = []
    for parts in ((a, b), (b, a), (b, a), (a,), (a, b)):
        numel = sum(part.numel for part in parts)
        message = compressor.begin(torch.randn(numel), Context(parts, kept={}))
        assert message is not None
        counts.append(message.codec.payload_numel(numel, Context(parts)) // 8 / numel)
    assert counts == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.1])
    assert compressor.calls_of((a, b)) == (5, 4)


def test_an_inf_does_not_change_the_average_of_ef21() -> None:
    compressor = parse("none+ef21:m=0.5")
    for value in (4.0, math.inf, math.nan, 4.0):
        got = call(compressor, torch.full((3,), value))
    assert got.tolist() == [3.0] * 3  # 0.5 * 4, then 0.5 * 2 + 0.5 * 4


def call(compressor: Compressor, flat: torch.Tensor) -> torch.Tensor:
    """A call in a world of one, exact."""
    context = Context((Part("w", (flat.numel(),)),), kept={})
    message = compressor.begin(flat, context)
    assert message is not None and message.residual is not None
    total = message.input.clone()
    compressor.end(message, total, context)
    return total


@pytest.mark.parametrize(
    ("spec", "state", "message"),
    [
        (
            "int8+ef21",
            parse("int8+ef").state_dict(),
            r"entries \['averages', 'means', 'residuals'\], got \['residuals'\]",
        ),
        (
            "int8+ef",
            {"error_feedback": {"residuals": {"w": 3}}, "inner": {}},
            "expected a state of tensors, got .'w': 'int'",
        ),
        ("int8+ef", {"error_feedback": {}, "inner": {}}, r"entries \['residuals'\], got \[\]"),
        ("int8+ef", {"error_feedback": [], "inner": {}}, r"entries \['residuals'\], got list"),
        (
            "int8+ef",
            {"momentum": {}, "inner": {}},
            r"entries \['error_feedback', 'inner'\], got \['inner', 'momentum'\]",
        ),
        ("topk:0.1+dgc", {"momentum": {"residuals": {}}, "inner": {}}, "'calls', 'residuals', 'velocities'"),
        ("powersgd", {}, r"entries \['factors'\], got \[\]"),
    ],
)
def test_states_of_others_and_damaged_ones_are_refused(spec: str, state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(spec).load_state_dict(state)


def test_policy_goes_by_the_first_rule_then_by_shape() -> None:
    sparse = compression.error_feedback(compression.topk(0.1))
    policy = compression.policy(
        compression.quantize("int8"), min_numel=100, rules={"embed.*": sparse, "*.bias": compression.none()}
    )
    parts = [Part("embed.bias", (7,)), Part("a.weight", (20, 10)), Part("a.bias", (500,)), Part("norm", (500,)),
             Part("b.weight", (20, 10)), Part("tiny", (3, 3))]  # fmt: skip
    chosen = {parts[index].name: each.name for each, indices in policy.routes(parts) for index in indices}
    assert chosen == {"embed.bias": "error_feedback", "a.weight": "quantize", "a.bias": "none", "norm": "none",
                      "b.weight": "quantize", "tiny": "none"}  # fmt: skip
    assert policy.is_stateful  # for its rule
    assert "embed.*->" in policy.spec
    with pytest.raises(ConfigError, match=r"rule 'x': expected a compressor, got 'int8'"):
        compression.policy(compression.none(), rules={"x": "int8"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("gbit", "spec"),
    [(0.1, "topk:0.001+ef"), (9.9, "topk:0.001+ef"), (10, "topk:0.01+ef"), (24.9, "topk:0.01+ef"), (25, "int8")],
)
def test_schedule_by_bandwidth(gbit: float, spec: str) -> None:
    assert compression.by_bandwidth(gbit * 1e9) == spec
    assert parse(spec).spec


def test_schedule_by_bandwidth_takes_another_for_fast_links_and_no_nonsense() -> None:
    assert compression.by_bandwidth(1e12, fast="none") == "none"
    for bad in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="expected a bandwidth above 0"):
            compression.by_bandwidth(bad)


def test_schedule_by_stability() -> None:
    def spread(share: float) -> list[float]:
        return [2 * (1 + share), 2 * (1 - share)] * 5  # its coefficient of variation is ``share``

    assert compression.by_stability(spread(0.04)) == "topk:0.01+ef"
    assert compression.by_stability(spread(0.06)) == "int8+ef"
    assert compression.by_stability(spread(0.16)) == "none"
    assert compression.by_stability([100.0, *spread(0.04)]) == "topk:0.01+ef"  # only the last ten count
    assert compression.by_stability(spread(0.04)[:9]) == "none"
    assert compression.by_stability([*spread(0.0), math.nan]) == "none"
    assert compression.by_stability([1.0, -1.0] * 5) == "none"
    with pytest.raises(ConfigError, match="three specs"):
        compression.by_stability([], specs=("none",))


def test_parts_that_changed_their_lengths_are_refused_and_nothing_is_moved() -> None:
    compressor = parse("none+ef")
    parts = (Part("a", (4,)), Part("b", (6,)))
    compressor.begin(torch.zeros(10), Context(parts)).residual.fill_(1.0)
    before = compressor.state_dict()
    for other in ((Part("a", (6,)), Part("b", (4,))), (Part("c", (3,)), Part("a", (4,)), Part("b", (3,)))):
        with pytest.raises(ConfigError, match="had [46] when its state was made"):
            compressor.begin(torch.zeros(10), Context(other))
    compressor.begin(torch.zeros(10), Context(parts)).residual.fill_(2.0)
    after = compressor.state_dict()["error_feedback"]["residuals"]
    assert before["error_feedback"]["residuals"]["a"].tolist() == [1.0] * 4
    assert {name: each.tolist() for name, each in after.items()} == {"a": [2.0] * 4, "b": [2.0] * 6}


def test_two_periods_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one period, got two; .*every:6"):
        parse("int8+every:2+every:3")
