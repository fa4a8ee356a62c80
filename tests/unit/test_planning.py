"""Planners: their formulas against what a real model holds, and the laws that their choices keep."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from engines.cases import Attention
from pycomm.cli.__main__ import main
from pycomm.engines.planning.batch import largest_micro_batch, plan_batch
from pycomm.engines.planning.checkpointing import BlockCost, apply_checkpoints, measure_blocks, plan_checkpoints
from pycomm.engines.planning.learning_rate import (
    LargeBatchLR,
    lars_ratio,
    scale_gradients_by_layer_,
    scaled_learning_rate,
)
from pycomm.engines.planning.memory import STRATEGIES, activation_bytes, state_bytes
from pycomm.engines.planning.model import ModelShape, shape_of
from pycomm.engines.planning.parallelism import links_of, plan_parallelism
from pycomm.engines.planning.peak import peak_bytes
from pycomm.engines.planning.step_time import Cluster, Layout, collective_s, groups_along
from pycomm.errors import ConfigError

WIDTH = 32


class Block(nn.Module):
    """Attention of two heads and a network of 4 widths, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, WIDTH), nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def loss_of(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    tokens = torch.randint(64, (samples, length))
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# -- parallelism -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "make"), [("adamw", torch.optim.AdamW), ("momentum", torch.optim.SGD)])
def test_predicted_state_is_what_a_model_holds(optimizer, make) -> None:
    model = GPT()
    options = {"momentum": 0.9} if optimizer == "momentum" else {}
    torch_optimizer = make(model.parameters(), lr=0.1, **options)
    loss_of(model, 2, 8).backward()
    torch_optimizer.step()
    parameters = list(model.parameters())
    states = [
        value
        for each in torch_optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor) and value.dim()  # AdamW counts its steps in a scalar of each tensor
    ]
    counted = [sum(each.nbytes for each in tensors) for tensors in (parameters, [p.grad for p in parameters], states)]
    numel = shape_of(model).parameters
    assert list(state_bytes(numel, "DDP", 4, "fp32", optimizer)[:3]) == counted
    # A shard of a flat tensor of all parameters, padded so that the ranks divide it.
    for ranks, (stage, strategy) in itertools.product((2, 3, 4), enumerate(STRATEGIES[:4])):
        shard = torch.cat([p.detach().flatten() for p in parameters] + [torch.zeros(-numel % ranks)]).chunk(ranks)[0]
        factor = shard.nbytes / counted[0]
        expected = [each * factor if stage >= 3 - place else each for place, each in enumerate(counted)]
        assert list(state_bytes(numel, strategy, ranks, "fp32", optimizer)[:3]) == pytest.approx(expected)


def test_the_zero_paper() -> None:
    """Its figure 1: 7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB."""
    found = [state_bytes(7_500_000_000, strategy, 64, "mixed", "adamw").total / 1e9 for strategy in STRATEGIES[:4]]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_predicted_activations_are_what_autograd_holds() -> None:
    torch.manual_seed(0)
    model, samples, length = GPT(), 4, 16
    saved: dict[int, int] = {}
    own = {p.data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own and tensor.is_floating_point():
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, samples, length)
    assert shape_of(nn.TransformerEncoderLayer(16, 4)).is_assumed  # of one layer nothing repeats
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 3, enable_nested_tensor=False)
    assert (shape_of(encoder).layers, shape_of(encoder).width, shape_of(encoder).heads) == (3, 16, 4)
    shape = shape_of(model, heads=2)
    assert (shape.layers, shape.width, shape.vocabulary, shape.is_assumed) == (3, WIDTH, 64, False)
    predicted = activation_bytes(shape, samples, length, layers=3)
    assert sum(saved.values()) == pytest.approx(predicted, rel=0.1)


def plan(memory: float, ranks: int = 4, hosts: int = 2, **options):
    options = {"flops_per_s": 1e13, "global_batch": 32, "length": 512, **options}
    return plan_parallelism(300_000_000, int(memory), hosts, ranks, ("8GB", "10Gbit"), **options)


def test_the_chosen_plan_fits_and_more_memory_is_never_slower() -> None:
    before_s = float("inf")
    for memory in (1e9, 2e9, 4e9, 8e9, 64e9):
        found = plan(memory)
        assert found.chosen is not None and found.chosen.memory.total <= memory
        fitting = [option for option in found.options if option.fits]
        assert all((option.memory.total <= memory) == option.fits and option.reason for option in found.options)
        assert found.chosen.time.total_s <= 1.02 * min(option.time.total_s for option in fitting)
        assert found.chosen.time.total_s <= 1.02 * before_s
        before_s = found.chosen.time.total_s
    assert found.options[0] is found.chosen and str(found.chosen.layout) in found.reason
    nothing = plan(1e6)
    assert nothing.chosen is None and "does not fit" in nothing.reason


def test_memory_falls_from_stage_to_stage_and_with_ranks() -> None:
    by_name = {str(option.layout): option for option in plan(64e9).options}
    totals = [by_name[strategy].memory.total for strategy in ("DDP", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD")]
    assert totals == sorted(totals, reverse=True)
    assert by_name["DDP"].memory.gathered == 0 < by_name["FULL_SHARD"].memory.gathered
    for name in ("SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"):
        more = {str(option.layout): option for option in plan(64e9, ranks=8).options}
        assert more[name].memory.total < by_name[name].memory.total
    assert by_name["dp=2 tp=2 pp=2"].memory.total < by_name["dp=4 tp=1 pp=2"].memory.total


def test_slower_links_never_help() -> None:
    slow = plan_parallelism(300_000_000, "64GiB", 2, 4, ("8GB", "1Gbit"), flops_per_s=1e13, global_batch=32)
    fast = plan_parallelism(300_000_000, "64GiB", 2, 4, ("8GB", "100Gbit"), flops_per_s=1e13, global_batch=32)
    times = {str(option.layout): option.time for option in slow.options}
    assert all(option.time.total_s <= times[str(option.layout)].total_s + 1e-9 for option in fast.options)
    assert times["FULL_SHARD"].data_s > times["SHARD_OPTIMIZER"].data_s
    for option in plan(64e9, hosts=1, overlaps_inside=True).options:
        hidden = {str(each.layout): each.time.data_s for each in plan(64e9, hosts=1).options}[str(option.layout)]
        assert option.time.data_s < hidden if option.layout.pp == 1 < option.layout.dp else option.time.data_s == hidden


def test_groups_are_those_of_a_mesh() -> None:
    layout = Layout("DDP", dp=2, tp=2, pp=2)
    assert groups_along("tp", layout) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_along("dp", layout) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups_along("pp", layout) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    cluster = Cluster(hosts=2, ranks_per_host=4, links=links_of(("8GB", "1Gbit")), flops_per_s=1e12)
    inside, across = (collective_s("all_reduce", groups_along(axis, layout), 1 << 20, cluster) for axis in ("tp", "pp"))
    assert inside < across / 10  # and four groups at once share the cable
    alone = collective_s("all_reduce", groups_along("pp", layout)[:1], 1 << 20, cluster)
    assert across == pytest.approx(4 * alone, rel=0.05)


def test_bad_input() -> None:
    good = {"model": 1000, "memory": "1GiB", "flops_per_s": 1e9}
    for bad, words in (
        ({"model": 0}, "number of parameters"),
        ({"model": "big"}, "nn.Module, a number of parameters"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"memory": "lots"}, "not understood"),
        ({"memory": 0}, "memory: expected an integer from 1"),
        ({"memory": None}, "memory: expected an integer from 1"),
        ({"micro_batch": True}, "micro_batch: expected"),
        ({"hosts": 0}, "hosts: expected"),
        ({"ranks_per_host": 2.0}, "ranks_per_host: expected"),
        ({"bandwidths": (0, 1)}, "bandwidths"),
        ({"bandwidths": ("8GB",)}, "bandwidths"),
        ({"bandwidths": None}, "bandwidths"),
        ({"bandwidths": (1e9, None)}, "bandwidths"),
        ({"flops_per_s": 0.0}, "flops_per_s"),
        ({"flops_per_s": "1T"}, "flops_per_s"),
        ({"precision": "fp4"}, "precision: expected one of fp32"),
        ({"optimizer": "lion"}, "optimizer: expected one of sgd"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": "8"}, "global_batch"),
        ({"depth": 3}, "no depth"),
        ({"vocabulary": 10**6}, "vocabulary"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_parallelism(**{**good, **bad})
    assert shape_of(ModelShape(parameters=9, layers=1, width=2, heads=1), heads=2).heads == 2


def test_advise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["advise", "125M", "--memory", "4GiB", "--hosts", "2", "--ranks", "2", "--flops", "100G"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "DDP" in text and "FULL_SHARD" in text and "dp=2 tp=2 pp=1" in text and "125 M parameters" in text
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == str(told["options"][0]["strategy"]) and told["options"][0]["fits"]
    assert main(["advise", "engines.cases:TinyGPT", "--memory", "1GiB", "--ranks", "2", "--flops", "1T", "--all"]) == 0
    text = capsys.readouterr().out
    assert "(2 layers of width 16)" in text and "assumed" not in text and "and 1 more" not in text
    assert main(["advise", "7B", "--memory", "1MiB", "--flops", "1T"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert main(["advise", "torch.nn:Nothing", "--memory", "1GiB"]) == 1
    assert "module:callable" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="--svg draws with matplotlib, of the extra [plot]")
    assert main([*arguments, "--svg", str(tmp_path / "plan.svg")]) == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()


# -- batch and learning rate -------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 64))
def test_batches_are_made_up(target: int, ranks: int, largest: int) -> None:
    found = plan_batch(target, ranks, largest)
    assert found.micro_batch <= largest and found.effective_batch >= target
    assert found.effective_batch == found.micro_batch * found.accumulation_steps * ranks
    assert found.effective_batch - target < ranks * found.accumulation_steps
    if target % ranks == 0 and (target // ranks) <= largest:
        assert found == (target // ranks, 1, target)


def test_the_largest_micro_batch_is_measured() -> None:
    model = GPT(2)

    def step(samples: int) -> None:
        loss_of(model, samples, 16).backward()
        model.zero_grad(set_to_none=False)  # the gradients are there already

    step(1)
    ten, eleven = (peak_bytes(lambda samples=samples: step(samples)) for samples in (10, 11))
    assert ten < eleven
    assert largest_micro_batch(step, ten) == 10 == largest_micro_batch(step, eleven - 1)
    assert largest_micro_batch(step, ten, most=7) == 7
    with pytest.raises(ConfigError, match="one sample"):
        largest_micro_batch(step, 100)
    with pytest.raises(ConfigError, match="ranks: expected"):
        plan_batch(8, 0, 1)


def test_learning_rates() -> None:
    assert scaled_learning_rate(0.1, 256, 1024) == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, 256, 1024, "sqrt") == pytest.approx(0.2)
    assert scaled_learning_rate(0.1, 256, 256, "linear") == scaled_learning_rate(0.1, 1, 9, "none") == 0.1
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": each.parameters(), "lr": rate} for each, rate in zip(layers, (1.0, 0.5))])
    schedule = LargeBatchLR(optimizer, 1, 5, warm_up_steps=4, total_steps=8, final_share=0.1)
    rates = []
    for _ in range(9):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert [rate for rate, _ in rates[:5]] == pytest.approx([1, 2, 3, 4, 5])
    assert rates[6][0] == pytest.approx(5 * (0.1 + 0.9 * 0.5)) and rates[8][0] == pytest.approx(0.5)
    assert all(second == pytest.approx(first / 2) for first, second in rates)
    again = LargeBatchLR(torch.optim.SGD(layers[0].parameters(), lr=1.0), 1, 5, warm_up_steps=4)
    again.load_state_dict(schedule.state_dict())
    assert again.last_epoch == 9
    for arguments, words in (((0, 8), "batches"), ((8, 8, "cubic"), "rule")):
        with pytest.raises(ConfigError, match=words):
            LargeBatchLR(optimizer, *arguments)
    with pytest.raises(ConfigError, match="warm_up_steps"):
        LargeBatchLR(optimizer, 1, 2, warm_up_steps=9, total_steps=9)


def test_lars() -> None:
    assert lars_ratio(2.0, 4.0, trust=0.1) == pytest.approx(0.05)
    assert lars_ratio(2.0, 4.0, weight_decay=1.0, trust=0.1) == pytest.approx(0.2 / 6)
    assert lars_ratio(0.0, 4.0) == lars_ratio(4.0, 0.0) == 1.0
    layer = nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    bias = layer.bias.grad.clone()
    for scale in (1.0, 1000.0):  # the step is a share of the weight's norm, whatever the gradient's
        layer.weight.grad.mul_(scale)
        scale_gradients_by_layer_(layer.parameters(), trust=0.01)
        assert layer.weight.grad.norm() == pytest.approx(0.01 * layer.weight.detach().norm().item(), rel=1e-4)
    assert torch.equal(layer.bias.grad, bias)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def by_trying_all(costs: list[BlockCost], budget: int) -> float | None:
    best = None
    for chosen in itertools.product((False, True), repeat=len(costs)):
        held, fits = 0, True
        for cost, is_again in zip(costs, chosen):
            fits = fits and held + cost.kept_bytes <= budget
            held += cost.input_bytes if is_again else cost.kept_bytes
        seconds = sum(cost.forward_s for cost, is_again in zip(costs, chosen) if is_again)
        if fits and (best is None or seconds < best):
            best = seconds
    return best


BLOCKS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=7)


@given(BLOCKS, st.integers(1, 300))
def test_checkpoints_are_the_best_that_fit(sizes, budget: int) -> None:
    costs = [BlockCost(seconds / 8, inputs + more, inputs) for seconds, inputs, more in sizes]
    expected = by_trying_all(costs, budget)
    if expected is None:
        with pytest.raises(ConfigError, match="every block computed again"):
            plan_checkpoints(costs, budget)
        return
    found = plan_checkpoints(costs, budget)
    assert found.extra_s == pytest.approx(expected) and found.peak_bytes <= budget
    assert plan_checkpoints(costs, 2 * budget).extra_s <= found.extra_s + 1e-9


def test_planned_checkpoints_fit_in_a_real_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, WIDTH)
    blocks = nn.Sequential(*(Block() for _ in range(6)))
    costs = measure_blocks(blocks, x)
    whole = sum(cost.kept_bytes for cost in costs)
    gradients, peaks = [], []
    for share in (1.0, 0.6, 0.35):
        model = nn.Sequential(*(Block() for _ in range(6)))
        model.load_state_dict(blocks.state_dict())
        found = plan_checkpoints(costs, int(share * whole))
        apply_checkpoints(model, found)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        inputs = x.clone().requires_grad_()
        peaks.append(peak_bytes(lambda model=model, inputs=inputs: model(inputs).sum().backward()) - found.peak_bytes)
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert list(model.state_dict()) == list(blocks.state_dict())
    # What is above the plan is the gradient on its way, the same each time.
    assert max(peaks) <= min(peaks) + costs[0].input_bytes and max(peaks) <= 5 * costs[0].input_bytes
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others))
    with pytest.raises(ConfigError, match="names block"):
        apply_checkpoints(blocks[:1], found)
    with pytest.raises(ConfigError, match="block 0"):
        plan_checkpoints([BlockCost(1.0, 1, 2)], 10)
