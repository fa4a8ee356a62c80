"""PowerSGD: each gradient matrix M is sent as two thin factors, P Q^T, of rank r: one step of power iteration.

    P = sum of M_i Q  (all_reduce);  orthonormalize P;  Q = sum of M_i^T P  (all_reduce);  the sum of M_i is about P Q^T

Q starts from the last call's (warm start). Vectors, and matrices that the factors would not shrink, go as they are.
Matrices of one shape are multiplied as one batch. Vogels et al., "PowerSGD", NeurIPS 2019 (arXiv 1905.13727),
Algorithm 1. Bytes: 4 r (rows + columns) a matrix.

All ranks compute P Q^T themselves from the same factors; that is bit-identical on ranks that run the same torch on the
same kind of processor with as many threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..sizes import whole_number
from .base import Codec, Combine, Context, Part, absorb, check_entries, check_named, keep_finite

__all__ = ["PowerSGD", "make"]


class _Batch(NamedTuple):
    """Matrices of one shape: ``(count, rows, columns)``; where each lies in the flat."""

    rows: int
    columns: int
    names: list[str]
    offsets: list[int]


class _Layout(NamedTuple):
    """What becomes of the parts: batches of matrices, and (start, stop) of what is sent as it is."""

    batches: list[_Batch]
    raw: list[tuple[int, int]]


@dataclass(eq=False)
class PowerSGD(Codec):
    """Factors of ``rank`` columns. Needs names, for its warm start, and tensors of two dimensions or more to shrink."""

    rank: int = 4
    _factors: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    name = "powersgd"
    combine = Combine.SUM
    wire_dtype = torch.float32
    rounds = 2
    is_stateful = True
    needs_total = True
    is_for_shards = False
    is_for_gathers = False
    is_for_vectors = False
    sees_shapes = True

    def __post_init__(self) -> None:
        whole_number(self.rank, "powersgd: rank", 1)

    def payload_numel(self, numel: int, context: Context) -> int:
        batches, raw = self._layout(context.parts)
        sides = [len(batch.names) * (batch.columns if context.round else batch.rows) for batch in batches]
        as_is = 0 if context.round else sum(stop - start for start, stop in raw)
        return self.rank * sum(sides) + as_is

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        kept = context.kept
        if context.round == 0:
            kept["work"], kept["residual"] = absorb(flat, residual), residual
            kept["layout"] = self._layout(context.parts)
        batches, raw = kept["layout"]
        outputs = _slices(payload, [(len(b.names), b.columns if context.round else b.rows, self.rank) for b in batches])
        for index, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
            matrices = _matrices(kept["work"], batch)
            if context.round == 0:
                torch.bmm(matrices, self._warm(batch, flat), out=output)
            else:
                torch.bmm(matrices.transpose(1, 2), kept["bases"][index], out=output)
        if context.round == 0:
            position = sum(output.numel() for output in outputs)
            for start, stop in raw:
                payload[position : position + stop - start].copy_(kept["work"][start:stop])
                position += stop - start

    def advance(self, payload: torch.Tensor, context: Context) -> None:
        """Takes the sum of the first round: bases of the columns of all matrices, and the elements sent as they are."""
        kept = context.kept
        batches, _ = kept["layout"]
        outputs = _slices(payload, [(len(b.names), b.rows, self.rank) for b in batches])
        kept["bases"] = [_orthonormal(output) for output in outputs]
        kept["as_is"] = payload[sum(output.numel() for output in outputs) :].clone()

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        kept = context.kept
        batches, raw = kept["layout"]
        residual = kept["residual"]
        factors = _slices(payload, [(len(b.names), b.columns, self.rank) for b in batches])
        for batch, base, factor in zip(batches, kept["bases"], factors, strict=True):
            for index, name in enumerate(batch.names):
                self._factors[name] = factor[index].clone()
            product = torch.bmm(base, factor.transpose(1, 2))
            for offset, matrix in zip(batch.offsets, product, strict=True):
                _put(flat[offset : offset + matrix.numel()], matrix.view(-1), add)
                if residual is not None:
                    residual[offset : offset + matrix.numel()].sub_(matrix.view(-1), alpha=1 / context.world_size)
        position = 0
        for start, stop in raw:
            _put(flat[start:stop], kept["as_is"][position : position + stop - start], add)
            position += stop - start
            if residual is not None:
                residual[start:stop].zero_()
        if residual is not None:
            keep_finite(residual)

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        # P Q^T is an orthogonal projection of M: no element is off by more than M's Frobenius norm,
        # unless that is beyond float32, as products of such elements are.
        largest: torch.Tensor = (flat.double().norm() * 1.001).to(torch.float32)
        return largest.expand(flat.numel()).clone()

    def state_dict(self) -> dict[str, Any]:
        return {"factors": {name: factor.cpu().clone() for name, factor in self._factors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_entries(state, {"factors"}, self.spec)
        self._factors = {name: factor.clone() for name, factor in state["factors"].items()}

    def _layout(self, parts: Sequence[Part]) -> _Layout:
        check_named(parts, self.spec)
        batches: dict[tuple[int, int], _Batch] = {}
        raw: list[tuple[int, int]] = []
        offset = 0
        for part in parts:
            rows = part.shape[0] if len(part.shape) > 1 else 0
            columns = part.numel // rows if rows else 0
            if rows and columns and self.rank * (rows + columns) < part.numel:
                batch = batches.setdefault((rows, columns), _Batch(rows, columns, [], []))
                batch.names.append(str(part.name))
                batch.offsets.append(offset)
            else:
                raw.append((offset, offset + part.numel))
            offset += part.numel
        return _Layout(list(batches.values()), raw)

    def _warm(self, batch: _Batch, like: torch.Tensor) -> torch.Tensor:
        """Returns the Q ``(count, columns, rank)`` to start from: the last call's, or the same random one on all
        ranks."""
        factors = []
        for name in batch.names:
            factor = self._factors.get(name)
            if factor is None or factor.shape != (batch.columns, self.rank) or not bool(factor.any()):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                shape = (batch.columns, self.rank)
                factor = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            factors.append(factor.to(like.device))
        # A factor that saw an inf or NaN would stay so. Its length does not matter; that of large or small gradients,
        # squared with theirs, would be beyond float32.
        stacked = torch.stack(factors).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        largest = stacked.abs().amax((1, 2), keepdim=True)
        return torch.where(largest > 0, stacked / largest, 0.0)


def _slices(payload: torch.Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Returns the factors that lie one after the other at the beginning of ``payload``."""
    views, position = [], 0
    for count, side, rank in shapes:
        numel = count * side * rank
        views.append(payload[position : position + numel].view(count, side, rank))
        position += numel
    return views


def _matrices(work: torch.Tensor, batch: _Batch) -> torch.Tensor:
    numel = batch.rows * batch.columns
    pieces = [work[offset : offset + numel].view(batch.rows, batch.columns) for offset in batch.offsets]
    return pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(pieces)


def _orthonormal(factor: torch.Tensor) -> torch.Tensor:
    """Returns orthonormal columns that span those of ``factor (count, rows, rank)``; NaN where it is not finite."""
    is_finite = factor.isfinite().all(-1).all(-1).view(-1, 1, 1)
    base = torch.linalg.qr(torch.where(is_finite, factor, 0.0)).Q
    return torch.where(is_finite, base, float("nan"))


def _put(flat: torch.Tensor, values: torch.Tensor, add: bool) -> None:
    flat.add_(values) if add else flat.copy_(values)


make = PowerSGD
