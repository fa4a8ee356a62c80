"""The norm of gradients that are in pieces along any axes is that of the whole model, with the same bits on all ranks.

Here the pieces are laid out by hand, on threads, which takes milliseconds; test_mesh.py clips what the engines make.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import pycomm
from harness import run_ranks
from pycomm.engines._marks import Cut, Holders, mark_cut, mark_holders, mark_shard


class Whole(NamedTuple):
    """A parameter of the whole model, and what ranks have of it.

    ``first`` is the number of elements of the first shard, of two; None: it is not sharded. ``stages`` hold it.
    """

    shape: tuple[int, ...]
    stages: tuple[int, ...] = (0,)
    is_cut: bool = False
    first: int | None = None
    dtype: torch.dtype = torch.float32
    has_gradient: bool = True


MODEL = (
    Whole((6, 4)),
    Whole((8,), (1,)),
    Whole((4, 6), (0, 1), is_cut=True),  # tied
    Whole((7,), (0, 1)),
    Whole((4, 5), (1,), is_cut=True, first=3),  # shards are uneven
    Whole((4, 4), (0,), is_cut=True, first=8),  # the second one is empty
    Whole((2, 5), (1,), first=0),  # the first one is
    Whole((6,), (0,), first=2),
    Whole((3, 3), (1,), has_gradient=False),
    Whole((4, 4), (0,), is_cut=True, first=2, dtype=torch.bfloat16),
    Whole((4, 3), (1,), is_cut=True, first=1, dtype=torch.complex64),
    Whole((5,), (0,), dtype=torch.complex64),
)
NORMS = ((100.0, 2.0), (3.0, 2.0), (2.0, 1.0), (0.1, math.inf), (1.0, 3.0), (math.inf, 2.0))


class Piece(NamedTuple):
    """A parameter of a rank, and how to take the part of a whole tensor that it has."""

    whole: int
    parameter: nn.Parameter
    part: Callable[[torch.Tensor], torch.Tensor]


def gradients(model: tuple[Whole, ...]) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(each.shape, dtype=torch.complex64, generator=draw) for each in model]
    reals = [each if whole.dtype.is_complex else each.real for whole, each in zip(model, made)]
    return [each.to(whole.dtype) if whole.has_gradient else None for whole, each in zip(model, reals)]


def alone(model: tuple[Whole, ...], max_norm: float, norm_type: float) -> tuple[torch.Tensor, list[Any]]:
    """Returns what torch finds on the whole model, and its gradients after that."""
    parameters = [nn.Parameter(torch.zeros(each.shape, dtype=each.dtype)) for each in model]
    for parameter, gradient in zip(parameters, gradients(model)):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm, [each.grad for each in parameters]


def pieces_of(model: tuple[Whole, ...], mesh: pycomm.Mesh) -> list[Piece]:
    """Returns what this rank of a mesh of pp, fsdp and tp has of the model, with its gradients."""
    found = []
    for index, (whole, gradient) in enumerate(zip(model, gradients(model))):
        if mesh["pp"] not in whole.stages:
            continue

        def part(tensor: torch.Tensor, whole: Whole = whole) -> torch.Tensor:
            tensor = tensor.chunk(2)[mesh["tp"]] if whole.is_cut else tensor
            return tensor if whole.first is None else tensor.reshape(-1).tensor_split([whole.first])[mesh["fsdp"]]

        parameter = nn.Parameter(part(torch.zeros(whole.shape, dtype=whole.dtype)))
        if gradient is not None:
            # What is alike may differ in its last bits, as where GPUs add up in no order: the numbers may not.
            off = 1.0 if whole.dtype == torch.bfloat16 else 1.0 + 1e-6 * pycomm.rank()
            parameter.grad = part(gradient) * off
        if whole.is_cut:
            mark_cut(parameter, Cut(0, 1, mesh.group("tp").ranks))
        if whole.first is not None:
            mark_shard(parameter, mesh.group("fsdp").ranks, parameter.numel())
        mark_holders(parameter, Holders(mesh.group("pp").ranks, min(whole.stages)), mesh)
        found.append(Piece(index, parameter, part))
    return found


def parameters_of(pieces: list[Piece]) -> list[nn.Parameter]:
    return [piece.parameter for piece in pieces]


def pieces_job(rank: int) -> list[bytes]:
    mesh, norms = pycomm.Mesh(pp=2, fsdp=2, tp=2), []
    axes = {"shards": mesh.group("fsdp"), "tensor": mesh.group("tp"), "stages": mesh.group("pp")}
    for max_norm, norm_type in NORMS:
        expected, wholes = alone(MODEL, max_norm, norm_type)
        pieces = pieces_of(MODEL, mesh)
        given = iter([*parameters_of(pieces), pieces[0].parameter])  # each counts once
        norm = pycomm.clip_grad_norm_(given, max_norm, norm_type, **axes)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected.float(), rtol=1e-3, atol=0)  # of some elements in bfloat16
        for index, parameter, part in pieces:
            if parameter.grad is None:
                assert wholes[index] is None
            else:
                bound = {"rtol": 1e-2} if parameter.dtype == torch.bfloat16 else {"rtol": 1e-3}
                torch.testing.assert_close(parameter.grad, part(wholes[index]), **bound, atol=1e-7)
        norms.append(norm.numpy().tobytes())
    return norms


def test_pieces_along_three_axes_have_the_norm_of_the_whole() -> None:
    first, *others = run_ranks(8, pieces_job, transport="local")
    assert all(each == first for each in others)


def single_job(rank: int) -> None:
    """Any axes alone, of which others have one rank; no gradient at all, on one rank or on all; no groups."""
    mesh = pycomm.Mesh(pp=1, fsdp=2, tp=1)
    groups = {"shards": mesh.group("fsdp"), "tensor": mesh.group("tp"), "stages": mesh.group("pp")}
    part = nn.Parameter(torch.zeros(2 + rank, dtype=torch.float64))
    mark_shard(part, mesh.group("fsdp").ranks, part.numel())
    mark_cut(part, Cut(0, 1, mesh.group("tp").ranks))
    mark_holders(part, Holders(mesh.group("pp").ranks, 0), mesh)
    assert pycomm.clip_grad_norm_(part, 1.0, **groups) == 0
    if rank == 1:
        part.grad = torch.full_like(part, 3.0)
    norm = pycomm.clip_grad_norm_([part], 1.0, shards=mesh.group("fsdp"))
    torch.testing.assert_close(norm, torch.tensor(27.0, dtype=torch.float64).sqrt())
    if rank == 1:
        torch.testing.assert_close(part.grad.norm(), torch.ones((), dtype=torch.float64))
    lone = nn.Parameter(torch.zeros(4))
    lone.grad = (torch.ones(4) + rank).requires_grad_()  # with a graph of its own, as create_graph leaves it
    norm = pycomm.clip_grad_norm_(lone, 1.0)
    assert norm == 2.0 * (1 + rank) and not norm.requires_grad
    huge = nn.Parameter(torch.zeros(2))
    huge.grad = torch.full((2,), torch.nan if rank else 1e30)
    mark_shard(huge, mesh.group("fsdp").ranks, huge.numel())
    assert pycomm.clip_grad_norm_(huge, 1.0, shards=mesh.group("fsdp")).isnan()
    assert huge.grad.isnan().all()  # as torch does


def test_one_axis_and_few_gradients() -> None:
    run_ranks(2, single_job, transport="local")


# -- mistakes are errors on every rank ---------------------------------------------------------------------------------


def mistakes_job(rank: int) -> None:
    mesh = pycomm.Mesh(pp=2, fsdp=2, tp=2)
    group, last = mesh.group, mesh["pp"] == 1
    axes = {"shards": group("fsdp"), "tensor": group("tp"), "stages": group("pp")}
    model = (Whole((4,)), Whole((4, 2), (1,), is_cut=True), Whole((5,), (1,), first=2))
    pieces = parameters_of(pieces_of(model, mesh))  # of the first stage all are whole
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)

    def check(words: str, given: Any = pieces, max_norm: Any = 1.0, norm_type: Any = 2.0, **changed: Any) -> None:
        with pytest.raises(pycomm.ConfigError, match=words) as caught:
            pycomm.clip_grad_norm_(given, max_norm, norm_type, **{**axes, **changed})
        assert "\n" not in str(caught.value)

    cut, sharded = (re.escape(str(group(name).ranks)) if last else r"\(.*\)" for name in ("tp", "fsdp"))
    check(rf"^clip_grad_norm_ on rank \d: tensor=: .* ranks {cut}, over which parameters are cut, got None; pass the "
          "group that each .* layer was made with to pycomm.clip_grad_norm_$", tensor=None)  # fmt: skip
    check(rf"shards=: .* ranks {sharded}, over which parameters are sharded, got None", shards=None)
    check("shards=: .*sharded, got group 'tp' of .*; tensor=: .*cut, got group 'fsdp' of ranks",
          tensor=group("fsdp"), shards=group("tp"))  # fmt: skip
    check(r"stages=: .* in stages, got None", stages=None)
    check(r"stages=: .* in stages, got group 'tp'", stages=group("tp"), tensor=group("pp"))
    check(r"stages=: expected parameters of a Pipeline over ranks .*, got some of none", [*pieces, plain])
    check(r"^clip_grad_norm_ on rank 5: parameters: expected those of this rank, got none", [] if rank == 5 else pieces)
    for bad in (0, -1.0, math.nan):
        check(rf"norm_type: expected a number above 0, or inf, got {bad:g}", norm_type=bad if rank == 2 else 2.0)
    check("max_norm: expected a number of at least 0, got -1", max_norm=-1.0 if rank == 7 else 1.0)
    for odd in ({"max_norm": 2.0}, {"norm_type": math.inf}):
        words = r"expected the same on every rank of group '\w+', got rank \d: max_norm=.*; rank \d: .*norm_type="
        check(words, **(odd if rank == 6 else {}))
    assert torch.equal(plain.grad, torch.ones(2))
    norm = pycomm.clip_grad_norm_(pieces, 1.0, **axes)  # the groups are as good as before
    torch.testing.assert_close(norm, alone(model, 1.0, 2.0)[0], rtol=1e-4, atol=0)


def test_mistakes_are_errors_on_every_rank() -> None:
    run_ranks(8, mistakes_job, transport="local")
