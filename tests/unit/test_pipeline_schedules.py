"""Schedules are data: each is valid for every size, and has the bubble and the activations that its file states."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import xml.etree.ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pycomm.engines.pipeline.actions import Action, Kind
from pycomm.engines.pipeline.draw import to_svg, to_text
from pycomm.engines.pipeline.lower import lower, validate
from pycomm.engines.pipeline.schedules import SCHEDULES, make
from pycomm.engines.pipeline.simulate import StageTimes, simulate
from pycomm.engines.pipeline.split import balance, layer_times_s, split_model
from pycomm.engines.planning.checkpointing import measure_blocks
from pycomm.errors import ConfigError, PlanError

SIZES = [(ranks, ranks * turns) for ranks in (1, 2, 3, 4, 6) for turns in (1, 2, 4)]


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_schedule_is_valid_and_lowers_to_matching_messages(name: str) -> None:
    for ranks, microbatches in SIZES:
        schedule = lower(make(name, ranks, microbatches))
        actions = list(itertools.chain(*schedule.rows))
        for sent, received, step in ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1)):
            out = sorted((a.stage + step, a.microbatch) for a in actions if a.kind is sent)
            assert out == sorted((a.stage, a.microbatch) for a in actions if a.kind is received)


def test_stated_bubbles_and_activations() -> None:
    for p, m in SIZES:
        if m < 2 * p:
            continue
        plain, first = simulate(make("gpipe", p, m)), simulate(make("one_f_one_b", p, m))
        assert plain.bubble == pytest.approx((p - 1) / (m + p - 1)) == pytest.approx(first.bubble)
        assert plain.peak_activations == (m,) * p
        assert first.peak_activations == tuple(p - rank for rank in range(p))
        between = simulate(make("interleaved_one_f_one_b", p, m, 2))
        assert between.bubble == pytest.approx((p - 1) / (2 * m + p - 1))
        assert max(between.peak_activations) <= (p - 1) * 2 + p + 1
        zero = simulate(make("zero_bubble", p, m))
        assert zero.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
        assert zero.peak_activations == (p,) * p
        v = simulate(make("zbv", p, m))
        assert max(v.peak_activations) <= 2 * p and v.bubble < zero.bubble + 1e-9


@given(st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 3), min_size=4, max_size=4))
def test_measured_times_never_make_it_slower(times) -> None:
    by_stage = {stage: StageTimes(*each) for stage, each in enumerate(times)}
    measured = simulate(make("zero_bubble", 4, 8, times=by_stage), by_stage)
    assert measured.total_s <= simulate(make("zero_bubble", 4, 8), by_stage).total_s + 1e-9
    assert measured.total_s <= simulate(make("one_f_one_b", 4, 8), by_stage).total_s * 1.2
    assert max(measured.peak_activations) <= 4


def test_times_of_actions_are_those_of_stages_if_they_are_alike() -> None:
    by_stage = {stage: StageTimes(1.0 + stage, 2.0, 0.5) for stage in range(8)}
    for name in SCHEDULES.names():
        schedule = make(name, 4, 8)
        by_action = {action: by_stage[action.stage].of(action.kind) for row in schedule.rows for action in row}
        assert simulate(schedule, by_action) == simulate(schedule, by_stage)
        late = max(by_action, key=lambda action: simulate(schedule, by_action).spans[action][1])
        slower = simulate(schedule, {**by_action, late: by_action[late] + 1.0})
        assert slower.total_s == pytest.approx(simulate(schedule, by_action).total_s + 1.0)


def test_bad_schedules_are_told_with_row_and_action() -> None:
    good = make("gpipe", 2, 2)
    first, second = good.rows
    for rows, words in (
        ((first[1:], second), "stage 0 has B of microbatch 0"),
        ((first + first[:1], second), "rank 0, action 4 .*twice"),
        ((second, first), "rank 0, action 0 .*on rank 1"),
        ((first[::-1], second), "comes to a stand: rank 0 at B0.1"),
        ((first + (Action(Kind.F, 5, 0),), second), "stage below 2"),
    ):
        with pytest.raises(PlanError, match=words):
            validate(dataclasses.replace(good, rows=rows))
    with pytest.raises(ConfigError, match="multiple of 4"):
        make("interleaved_one_f_one_b", 4, 6)
    with pytest.raises(ConfigError, match="has 1 stage"):
        make("zero_bubble", 4, 8, 2)


def test_drawings() -> None:
    schedule = make("zbv", 3, 4)
    simulation = simulate(schedule, transfer_s=0.5)
    assert to_text(schedule, simulation).splitlines()[0].startswith("rank 0: F0")
    picture = xml.etree.ElementTree.fromstring(to_svg(schedule, simulation))
    assert len(picture.findall("{*}rect")) == 1 + sum(map(len, schedule.rows))
    assert str(schedule).startswith("rank 0: F0.0")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_balance_is_optimal(costs, stages) -> None:
    if stages > len(costs):
        with pytest.raises(ConfigError):
            balance(costs, stages)
        return
    numbers = balance(costs, stages)
    assert sum(numbers) == len(costs) and min(numbers) >= 1

    def dearest(cuts) -> int:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    best = min(dearest(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    assert dearest(list(itertools.accumulate(numbers))[:-1]) == best


def test_split_by_list() -> None:
    import torch

    layers = [torch.nn.Identity() for _ in range(5)]
    assert [len(part) for part in split_model(layers, 2, [4, 1])] == [4, 1]
    with pytest.raises(ConfigError, match="sum to 5"):
        split_model(layers, 2, [4, 2])
    with pytest.raises(ConfigError, match="sample="):
        split_model(layers, 2, "time")


class Counts(nn.Module):
    """Replaces its buffer in each forward pass, as BatchNorm writes into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x


def test_measuring_leaves_no_trace() -> None:
    torch.manual_seed(5)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), Counts(), nn.Dropout(), nn.Linear(4, 4)]
    sample = torch.randn(3, 4) + 5
    before, numbers = copy.deepcopy(nn.Sequential(*layers).state_dict()), torch.get_rng_state()
    for measure in (layer_times_s, measure_blocks):
        assert len(measure(layers, sample)) == 5
        after = nn.Sequential(*layers).state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert torch.equal(torch.get_rng_state(), numbers)
        assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
