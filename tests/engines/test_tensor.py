"""Layers cut over the ranks equal the ordinary ones: outputs, gradients, and ten steps of training."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import pycomm
from engines import cases
from engines.cases import PlainAttention, PlainMLP
from harness import run_ranks
from pycomm.engines.tensor import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    TensorParallelAttention,
    TensorParallelMLP,
    VocabParallelEmbedding,
    cut_same,
    parallelize,
)
from pycomm.engines.tensor.functions import scatter_sum

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 24, 12, 48, 36, 12  # 2, 3 and 4 ranks divide them all


KINDS = {"attention.qkv": "qkv", "attention.out": "row", "mlp.up": "column", "mlp.down": "row"}
KINDS |= {"embedding": "vocabulary", "head": "column"}


class GPT(nn.Module):
    """One layer, ordinary or cut; with a cut sequence the residual stream and the norms are cut along it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.is_cut, self.is_sequence_cut = kind != "ordinary", kind == "sequence"
        options = {"is_sequence_parallel": self.is_sequence_cut}
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH) if self.is_cut else nn.Embedding(VOCABULARY, WIDTH)
        norm = SequenceParallelLayerNorm if self.is_sequence_cut else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention = (
            TensorParallelAttention(WIDTH, HEADS, **options) if self.is_cut else PlainAttention(WIDTH, HEADS)
        )
        self.mlp = TensorParallelMLP(WIDTH, HIDDEN, **options) if self.is_cut else PlainMLP(WIDTH, HIDDEN)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head = ColumnParallelLinear.of(head, **options) if self.is_cut else head
        self.loss = ParallelCrossEntropy() if self.is_cut else None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.is_sequence_cut:
            x = cut_same(x, pycomm.get_group(), 1)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        scores = self.head(x)
        if self.loss is not None:
            return self.loss(scores, targets)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def part_of(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter of the ordinary GPT."""
    kind = KINDS.get(name.rpartition(".")[0], "")
    return cases.part_of(kind, name, whole, pycomm.get_group())


def equality_job(rank: int) -> None:
    for kind in ("cut", "sequence"):
        alone, cut = GPT("ordinary"), GPT(kind)
        ordinary = dict(alone.named_parameters())
        for name, parameter in cut.named_parameters():  # the same seed is the same layer
            assert torch.equal(parameter, part_of(name, ordinary[name])), name
        # The gradient of k's bias is zero but for rounding, which a small eps would make as large as any other.
        make = partial(torch.optim.AdamW, eps=1e-3) if kind == "cut" else torch.optim.SGD
        optimizers = [make(model.parameters(), lr=1e-2) for model in (alone, cut)]
        draw = torch.Generator().manual_seed(1)
        for _ in range(10):
            tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=draw)
            losses = []
            for model, optimizer in zip((alone, cut), optimizers):
                optimizer.zero_grad()
                losses.append(model(tokens[:, :-1], tokens[:, 1:]))
                losses[-1].backward()
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
            for name, parameter in cut.named_parameters():
                expected = part_of(name, ordinary[name].grad)
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=2e-5)
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in cut.named_parameters():
            torch.testing.assert_close(parameter, part_of(name, ordinary[name]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_ordinary_layers(world_size: int) -> None:
    run_ranks(world_size, equality_job)


def other_job(rank: int) -> None:
    torch.manual_seed(2)
    attention, mlp, x = PlainAttention(WIDTH, HEADS), PlainMLP(WIDTH, HIDDEN), torch.randn(2, LENGTH, WIDTH)
    gathered, bare = nn.Linear(WIDTH, 8), nn.Linear(8, 4)
    model = nn.ModuleDict({"attention": attention, "mlp": mlp, "gathered": gathered, "bare": bare})
    expected = [attention(x), mlp(x), bare(gathered(x))]
    torch.manual_seed(2)
    plan = {"attention.qkv": "qkv", "*.out": "row", "mlp.up": "column", "mlp.down": "row"}
    parallelize(model, {**plan, "gathered": "column, gathered"})
    attention.forward = lambda y: local_attention(attention, y)
    for output, each in zip((attention(x), mlp(x), model["bare"](model["gathered"](x))), expected):
        torch.testing.assert_close(output, each, rtol=1e-4, atol=1e-5)
    for bad, words in (
        ({"none.*": "row"}, "names no module inside of the one given; it has attention"),
        ({"bare": "diagonal"}, "expected one of column"),
        ({"bare": "vocabulary"}, "'bare' as 'vocabulary'.* expected nn.Embedding itself, got a Linear"),
    ):
        with pytest.raises(pycomm.ConfigError, match=words):
            parallelize(model, bad)
    with pytest.raises(pycomm.ConfigError, match="cannot cut 7 inputs"):
        RowParallelLinear(7, 4)
    with pytest.raises(pycomm.ConfigError, match="multiple of the 2 ranks"):
        TensorParallelAttention(9, 3)
    group = pycomm.get_group()
    for cut in (cut_same, scatter_sum):
        with pytest.raises(pycomm.ConfigError, match=r"2 ranks cannot cut dim 1 of a tensor of shape \(2, 5, 3\)"):
            cut(torch.ones(2, 5, 3), group, 1)
    for make in (
        lambda: ColumnParallelLinear(4 + 2 * rank, 4),
        lambda: RowParallelLinear(4, 4, bias=rank == 0),
        lambda: RowParallelLinear.of(nn.Linear(4 + 4 * rank, 4)),
        lambda: VocabParallelEmbedding(4 + 3 * rank, 4),
        lambda: SequenceParallelLayerNorm(4 + rank),
        lambda: TensorParallelMLP(4, 8 + 4 * rank),
        lambda: parallelize(nn.ModuleDict({"up": nn.Linear(4, 2 + 2 * rank)}), {"up": "column"}),
    ):
        with pytest.raises(pycomm.CollectiveMismatchError, match=r"different models; .*ranks \[1\] have"):
            make()
    with pytest.raises(pycomm.ConfigError, match=r"ColumnParallelLinear: parameters on ranks \[0\] are on the meta"):
        ColumnParallelLinear.of(nn.Linear(4, 4, device="cpu" if rank else "meta"))
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(pycomm.ConfigError, match=f"{next(iter(options))}.* cannot be cut"):
            VocabParallelEmbedding.of(nn.Embedding(4, 4, **options))


def local_attention(attention: PlainAttention, x: torch.Tensor) -> torch.Tensor:
    """The forward function of a converted attention: with this rank's heads."""
    projected = attention.qkv(x)
    q, k, v = projected.view(*x.shape[:2], 3, HEADS // 2, -1).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attention.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


def test_conversion_and_mistakes() -> None:
    run_ranks(2, other_job)


def penalty_job(rank: int) -> None:
    """The gradient of a gradient, which flows through both passes of every exchange."""
    for kind in ("cut", "sequence"):
        alone, cut = GPT("ordinary").double(), GPT(kind).double()
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=draw)
        for model in (alone, cut):
            embedded: list[torch.Tensor] = []
            model.embedding.register_forward_hook(lambda *args, kept=embedded: kept.append(args[-1]))
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                loss = model(tokens[:, :-1], tokens[:, 1:])
                (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
                (loss + 100 * gradient.square().sum()).backward()
        ordinary = dict(alone.named_parameters())
        for name, parameter in cut.named_parameters():
            torch.testing.assert_close(parameter.grad, part_of(name, ordinary[name].grad), rtol=1e-9, atol=1e-12)
    torch.manual_seed(2)
    whole, x = nn.Linear(WIDTH, 12).double(), torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    for blocks in (1, 2, 3):
        fused = nn.Linear(4, 36)
        pycomm.broadcast_parameters(fused)
        some = torch.ones(2, 3, 4)
        gathered = ColumnParallelLinear.of(fused, blocks=blocks, gathers_output=True)
        torch.testing.assert_close(gathered(some), fused(some))
    gathered = ColumnParallelLinear.of(whole, gathers_output=True)
    seconds = []
    for layer in (whole, gathered):
        (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(gradient.pow(2).sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("world_size", [2, 3])
def test_double_backward_equals_the_ordinary_layers(world_size: int) -> None:
    run_ranks(world_size, penalty_job)


def loss_job(rank: int) -> None:
    n = pycomm.world_size()
    torch.manual_seed(2)
    whole = torch.randn(4, 3, 4 * n, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for ignored, targets in (
            (-100, [[0, 3, -100], [1, -100, 4 * n - 1], [2, 2, 2], [5, 0, 1]]),
            (0, [[0, 3, 1], [0, 0, 4 * n - 1], [2, 2, 2], [5, 0, 1]]),
        ):
            target = torch.tensor(targets)
            scores = whole.to(dtype, copy=True).requires_grad_()
            mine = scores.detach().chunk(n, -1)[rank].clone().requires_grad_()
            loss = ParallelCrossEntropy(ignore_index=ignored)(mine, target)
            exact = scores if dtype == torch.float64 else scores.float()
            expected = functional.cross_entropy(exact.flatten(0, 1), target.flatten(), ignore_index=ignored)
            torch.testing.assert_close(loss, expected)  # their dtype, too
            loss.backward()
            expected.backward()
            torch.testing.assert_close(mine.grad, scores.grad.chunk(n, -1)[rank])
    mine = whole.chunk(n, -1)[rank].clone().requires_grad_()
    loss = ParallelCrossEntropy()(mine, torch.full((4, 3), -100))
    loss.backward()
    assert loss.isnan() and not mine.grad.any()  # as torch has it
    for bad in (4 * n, -1, -99):
        with pytest.raises(pycomm.ConfigError, match=f"from 0 to {4 * n - 1}, got {bad};"):
            ParallelCrossEntropy()(mine, torch.full((4, 3), bad))


@pytest.mark.parametrize("world_size", [2, 3])
def test_loss_equals_cross_entropy(world_size: int) -> None:
    run_ranks(world_size, loss_job)


def embedding_job(rank: int) -> None:
    n = pycomm.world_size()
    tokens = torch.tensor([[1, 4 * n - 1, 6], [1, 2, 5]])
    for padding in (None, 1, -2, 5):  # a row of the first rank, one of the last, and of the second
        torch.manual_seed(2)
        whole = nn.Embedding(4 * n, 3, padding_idx=padding)
        torch.manual_seed(2)
        drawn = VocabParallelEmbedding(4 * n, 3, padding_idx=padding)
        cut = VocabParallelEmbedding.of(whole)
        assert torch.equal(cut.weight, drawn.weight)
        assert torch.equal(cut(tokens), whole(tokens))
        for layer in (whole, cut):
            layer(tokens).pow(2).sum().backward()
        torch.testing.assert_close(cut.weight.grad, whole.weight.grad.chunk(n)[rank])
    for bad in (4 * n, -1):
        with pytest.raises(pycomm.ConfigError, match=f"from 0 to {4 * n - 1}, got {bad};"):
            cut(torch.tensor([1, bad]))
    with torch.no_grad():
        cut.weight[0] = float("inf")  # looked up in place of the others' tokens, and not to be seen
    assert torch.equal(cut(tokens), whole(tokens))


@pytest.mark.parametrize("world_size", [2, 3])
def test_embedding_equals_the_ordinary_one(world_size: int) -> None:
    run_ranks(world_size, embedding_job)


def autocast_job(rank: int) -> None:
    torch.manual_seed(2)
    whole, x = PlainMLP(WIDTH, HIDDEN), torch.randn(2, LENGTH, WIDTH)
    for is_cut in (False, True):
        torch.manual_seed(2)
        mlp = TensorParallelMLP(WIDTH, HIDDEN, is_sequence_parallel=is_cut)
        with torch.autocast("cpu", torch.bfloat16):
            expected = whole(x)
            output = mlp(cut_same(x, pycomm.get_group(), 1) if is_cut else x)
        expected = expected.chunk(2, 1)[rank] if is_cut else expected
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.01)  # their dtype, too


def test_autocast() -> None:
    run_ranks(2, autocast_job)


def clip_job(rank: int) -> list[float]:
    """Each part counts once, and what is whole once, so the norm is that of one process."""
    norms, group = [], pycomm.get_group()
    for kind, dtype in (("cut", torch.float32), ("sequence", torch.float32), ("cut", torch.bfloat16)):
        alone, cut = GPT("ordinary"), GPT(kind).to(dtype)
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        for model in (alone, cut):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        ordinary = dict(alone.named_parameters())
        bound = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.02}
        for max_norm, norm_type in ((100.0, 2.0), (0.5, 2.0), (0.4, 1.0), (0.01, float("inf"))):
            expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
            norm = pycomm.clip_grad_norm_(cut.parameters(), max_norm, norm_type, tensor=group)
            torch.testing.assert_close(norm, expected, **bound)
            for name, parameter in cut.named_parameters():
                torch.testing.assert_close(parameter.grad.float(), part_of(name, ordinary[name].grad), **bound)
            norms.append(norm.item())
    lone = pycomm.new_group([rank])
    with pytest.raises(pycomm.ConfigError, match=rf"ranks \(0, 1.* are cut, got group .* of ranks \({rank},\)"):
        pycomm.clip_grad_norm_(cut.parameters(), 1.0, tensor=lone)
    whole = PlainAttention(4, 2)
    whole(torch.ones(1, 2, 4)).sum().backward()
    expected = torch.stack([each.grad.norm() for each in whole.parameters()]).norm()
    torch.testing.assert_close(pycomm.clip_grad_norm_(whole.parameters(), 1.0, tensor=group), expected)
    cut.head.weight = nn.Parameter(cut.head.weight.detach().clone())  # as load_state_dict(assign=True) does
    cut.head.weight.grad = torch.ones_like(cut.head.weight)
    norm = pycomm.clip_grad_norm_([cut.head.weight], 1.0, tensor=group)
    assert norm.item() == pytest.approx((VOCABULARY * WIDTH) ** 0.5)
    file = io.BytesIO()
    torch.save(cut.head.weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file), cut.head.weight)  # what is said on a parameter does not hinder
    return norms


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_equals_one_process(world_size: int) -> None:
    first, *others = run_ranks(world_size, clip_job)
    assert all(each == first for each in others)  # to the bit


def mesh_job(rank: int) -> None:
    """Tensor x data parallelism: gradients of the parts are averaged along dp."""
    mesh = pycomm.Mesh(dp=2, tp=2)
    torch.manual_seed(4)
    alone = PlainMLP(WIDTH, HIDDEN)
    torch.manual_seed(4)
    cut = TensorParallelMLP(WIDTH, HIDDEN, mesh.group("tp"))
    ddp = pycomm.DistributedDataParallel(cut, mesh.group("dp"))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(6))
    alone(x).square().mean().backward()
    ddp(x.chunk(2)[mesh["dp"]]).square().mean().backward()
    expected = alone.up.weight.grad.chunk(2)[mesh["tp"]]
    torch.testing.assert_close(cut.up.weight.grad, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cut.down.bias.grad, alone.down.bias.grad, rtol=1e-4, atol=1e-6)


def test_with_data_parallelism() -> None:
    run_ranks(4, mesh_job)
