"""Selection against the plain-torch reference, bit for bit; thresholds reused; indices that are not trusted."""

from __future__ import annotations

import pytest
import torch
from codec_cases import INF, NAN, each_isa, same_bits

from pycomm.errors import ConfigError
from pycomm.ops.topk import (
    TopkReport,
    read_report,
    scatter_add_,
    scatter_add_reference,
    scatter_sum_,
    topk_,
    topk_reference,
    workspace_bytes,
)


def make_input(kind: str, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    if kind == "ties":
        x = torch.randint(-3, 4, (numel,), generator=generator).float()
    elif kind == "ascending":
        x = x.abs().sort().values
    elif kind == "one line":  # all large ones where a sample of every n-th line does not look
        x[: numel // 2] *= 1e-6
        x[17 : 17 + numel // 50] += 100
    elif kind == "special":
        x[::7], x[::5], x[::11] = NAN, INF, -0.0
    elif kind == "near":  # many that differ in their last bits, and a few far away on both sides
        x = torch.randint(0x3F800000, 0x3F802000, (numel,), dtype=torch.int32, generator=generator).view(torch.float32)
        x[::1001], x[3::1001], x[5::1001] = INF, 1e-42, 0.0
    elif kind in ("zeros", "nans"):
        x.fill_(NAN if kind == "nans" else 0.0)
    elif kind in ("mostly zeros", "mostly ones"):  # fewer are larger than are chosen, so the k-th has many equals
        x[torch.rand(numel, generator=generator) > 0.004] = 0.0 if kind == "mostly zeros" else -1.0
    return x


def select(x: torch.Tensor, k: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    indices, values = torch.full((k,), -5, dtype=torch.int32), torch.full((k,), 5.0)
    topk_(indices, values, x, **options)
    return indices, values


KINDS = ["normal", "ties", "ascending", "one line", "special", "near", "zeros", "nans", "mostly zeros", "mostly ones"]


@pytest.mark.parametrize("numel", [1, 5, 16, 1000, 70_001, 600_000])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_reference(kind: str, numel: int) -> None:
    x = make_input(kind, numel)
    before = torch.randn(numel, generator=torch.Generator().manual_seed(1)) if kind == "normal" else torch.zeros(numel)
    for k in sorted({1, max(1, numel // 1000), max(1, numel // 100), (numel + 1) // 2, numel}):
        for residual in (None, before):
            found, taken, left, expected = topk_reference(x, k, residual=residual)
            for isa in each_isa() if numel < 100_000 else ["best"]:
                kept, report = None if residual is None else residual.clone(), torch.zeros(3, dtype=torch.int32)
                indices, values = select(x, k, residual=kept, report=report)
                assert torch.equal(indices, found) and same_bits(values, taken), (isa, k)
                assert kept is None or same_bits(kept, left), (isa, k)
                assert str(read_report(report)) == str(expected), (isa, k)


def test_sent_and_residual_are_the_input() -> None:
    x, residual = make_input("normal", 50_000), make_input("ascending", 50_000)
    expected = x + residual
    indices, values = select(x, 500, residual=residual)
    scatter_add_(residual, indices, values)
    assert torch.equal(residual, expected)


def test_ties_go_to_the_lower_index() -> None:
    indices, values = select(torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0]), 2)
    assert indices.tolist() == [1, 2] and values.tolist() == [-2.0, 2.0]


@pytest.mark.parametrize("growth", [0.5, 0.9, 0.99, 1.0, 1.01, 1.2, 3.0])
def test_a_reused_threshold_sends_enough_and_says_how_much(growth: float) -> None:
    x, k, tolerance = make_input("normal", 200_000), 2000, 0.3
    report = torch.zeros(3, dtype=torch.int32)
    select(x, k, report=report, tolerance=tolerance)
    first = read_report(report)
    assert first == TopkReport(topk_reference(x, k)[3].threshold, k, True)
    expected = topk_reference(x * growth, k, threshold=first.threshold, tolerance=tolerance)
    for _ in each_isa():
        again, residual = report.clone(), x * growth
        zeros = torch.zeros_like(x)
        indices, values = select(zeros, k, residual=residual, report=again, tolerance=tolerance)
        assert torch.equal(indices, expected[0]) and same_bits(values, expected[1])
        done = read_report(again)
        assert done == expected[3] and done.selected >= (1 - tolerance) * k
        assert int((values != 0).sum()) == done.selected
        scatter_add_(residual, indices, values)
        assert torch.equal(residual, x * growth)


def test_workspace_is_used_and_no_more_than_said() -> None:
    x, k = make_input("normal", 100_000), 1000
    needed = workspace_bytes(x.numel(), k)
    room = torch.full((needed + 64,), 99, dtype=torch.uint8)
    indices, _ = select(x, k, workspace=room[:needed])
    assert torch.equal(indices, topk_reference(x, k)[0]) and (room[needed:] == 99).all()
    with pytest.raises(ConfigError, match=f"expected {needed} bytes"):
        select(x, k, workspace=room[: needed - 8])


def test_the_short_cut_and_the_ordinary_path_are_one() -> None:
    x, k = make_input("normal", 50_000), 500
    room = torch.empty(workspace_bytes(x.numel(), k), dtype=torch.uint8)
    said = []
    for workspace in (room, None, room.view(torch.int8)):  # no short cut with the last one, whose type nothing forbids
        report, residual, done = torch.zeros(3, dtype=torch.int32), torch.zeros_like(x), []
        for growth in (1.0, 0.95, 2.0, 0.1):
            done += [*select(x * growth, k, residual=residual, report=report, tolerance=0.5, workspace=workspace)]
            done.append(report.clone())
        said.append([*done, residual])
    assert all(torch.equal(one, other) for others in said[1:] for one, other in zip(said[0], others, strict=True))


def test_scatter_add() -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([3, 999, 0, 3, 999], dtype=torch.int32)
    values = torch.tensor([1.0, 0.3, -2.0, 4.0, 0.0])
    expected = scatter_add_reference(flat, indices, values, factor=0.1)
    scatter_add_(flat, indices, values, factor=0.1)
    assert same_bits(flat, expected)


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, (4 << 20) + 3])  # a chunk is 4096; the last is streamed
def test_scatter_sum_is_zeroing_and_adding_part_by_part(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    parts = []
    for k in (numel // 3, numel // 100, 0, min(numel, 2)):
        indices = torch.randint(0, max(numel, 1), (k,), generator=generator).sort().values.to(torch.int32)
        parts.append((indices, torch.randn(k, generator=generator)))
    memory = torch.full((numel + 2,), 7.0)  # what lies around is left alone, also where it is misaligned
    expected = memory.clone()
    expected[1 : 1 + numel].zero_()
    for indices, values in parts:
        scatter_add_(expected[1 : 1 + numel], indices, values)
    scatter_sum_(memory[1 : 1 + numel], parts)
    assert same_bits(memory, expected)


@pytest.mark.parametrize("bad", [-1, 3, 1000])  # 3: below the one before it
def test_scatter_sum_raises_before_anything_is_written(bad: int) -> None:
    flat, indices = torch.ones(1000), torch.arange(600, dtype=torch.int32)
    damaged = indices.clone()
    damaged[77] = bad
    with pytest.raises(ConfigError, match=f"index {bad} at position 77"):
        scatter_sum_(flat, [(indices, torch.ones(600)), (damaged, torch.ones(600))])
    assert (flat == 1).all()


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 255, 256, 599])
def test_an_index_outside_raises_before_anything_is_added(bad: int, place: int) -> None:
    flat, indices = torch.zeros(1000), torch.arange(600, dtype=torch.int32)
    indices[place] = bad
    with pytest.raises(ConfigError, match=f"index {bad} at position {place} is outside: expected 0 .. 999"):
        scatter_add_(flat, indices, torch.ones(600))
    assert (flat == 0).all()


def test_mistakes_raise_before_a_byte_moves() -> None:
    x, indices, values = torch.ones(10), torch.full((3,), 7, dtype=torch.int32), torch.ones(3)
    with pytest.raises(ConfigError, match="1 <= k <= numel"):
        topk_(indices[:0], values[:0], x)
    with pytest.raises(ConfigError, match="1 <= k <= numel"):
        topk_(indices, values, x[:2])
    with pytest.raises(ConfigError, match="expected torch.float32, got torch.int32"):
        topk_(indices, values, x.int())
    with pytest.raises(ConfigError, match="expected torch.int32, got torch.int64"):
        topk_(indices.long(), values, x)
    with pytest.raises(ConfigError, match="needs a report"):
        topk_(indices, values, x, tolerance=0.1)
    with pytest.raises(ConfigError, match="residual has the wrong length"):
        topk_(indices, values, x, residual=x[:9])
    assert (indices == 7).all()


# -- what torch.compile sees ------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    indices, values, x = torch.zeros(3, dtype=torch.int32), torch.zeros(3), torch.randn(20)
    report = torch.zeros(3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.pycomm.topk_, (indices, values, x, torch.zeros(20), report, 0.25, None))
    torch.library.opcheck(torch.ops.pycomm.topk_, (indices, values, x, None, None, None, None))
    torch.library.opcheck(torch.ops.pycomm.scatter_add_, (x, indices, values, 0.5))


def test_torch_compile_keeps_the_operators_in_the_graph() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def largest_alone(x: torch.Tensor) -> torch.Tensor:
        indices, values = torch.empty(5, dtype=torch.int32), torch.empty(5)
        topk_(indices, values, x * 2)
        y = torch.zeros_like(x)
        scatter_add_(y, indices, values)
        return y + 1

    x = torch.randn(300)
    kept = (2 * x).abs() >= (2 * x).abs().topk(5).values[-1]
    assert torch.equal(largest_alone(x), torch.where(kept, 2 * x, 0.0) + 1)
