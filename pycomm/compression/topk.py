"""Top-k: the elements of largest magnitude, exactly; of the others nothing.

``exchange="gather"``: each rank gathers every rank's k elements and adds them in rank order: exact sums of what was
sent, (n - 1) k words of 8 bytes a rank. Where that is more than an all_reduce of everything would move, the ranks do
that: the union of their choices is nearly everything then.

``"balanced"``: the sparse all-reduce of Li and Hoefler, "Near-Optimal Sparse Allreduce" (Ok-Topk), PPoPP 2022 (arXiv
2201.07598): rank r reduces part r of the index space and sends on the k/n largest of the sums, 4 k numbers a rank for
any number of ranks. Each rank sends k/n of each part (their Section 3.1 balances the parts by the data instead, and
then has to tell sizes); what the second selection drops stays in the residual of the rank that owns the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import ConfigError, TransportError
from ..ops.topk import scatter_add_, scatter_sum_, topk_
from ._sparse import check_ratio, sparse_numel, sparse_payload_bytes, split_payload
from .base import Codec, Combine, Context, check_fraction, keep_finite

__all__ = ["TopK", "make"]

EXCHANGES = {"gather": Combine.GATHER, "balanced": Combine.REQUANTIZE}


@dataclass(frozen=True)
class TopK(Codec):
    """Sends ``ratio`` of the elements (rounded up).

    ``tolerance`` > 0 reuses the last call's threshold, and may then send as few as (1 - tolerance) k elements, the
    largest: see ``ops/topk.py``.
    """

    ratio: float = 0.01
    exchange: str = "gather"
    tolerance: float = 0.0
    _reports: dict[object, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    name = "topk"
    is_sparse = True

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)
        if self.exchange not in EXCHANGES:
            raise ConfigError(f"topk: unknown exchange {self.exchange!r}; known: {', '.join(EXCHANGES)}")
        check_fraction(self.name, "a tolerance", self.tolerance)

    @property
    def combine(self) -> Combine:  # type: ignore[override]
        return EXCHANGES[self.exchange]

    def payload_numel(self, numel: int, context: Context) -> int:
        return sparse_payload_bytes(sparse_numel(self.ratio, numel))

    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        indices, values = split_payload(payload, sparse_numel(self.ratio, flat.numel()))
        if flat.numel() == 0:
            return
        report = self._report(flat, context) if self.tolerance else None
        tolerance = self.tolerance or None
        topk_(indices, values, flat, residual=residual, report=report, tolerance=tolerance)
        # On a GPU, asking costs more than doing it: the answer would have to be waited for.
        if residual is not None and (residual.is_cuda or not values.isfinite().all()):
            keep_finite(residual)

    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        indices, values = split_payload(payload, sparse_numel(self.ratio, flat.numel()))
        if not add:
            flat.zero_()
        try:
            scatter_add_(flat, indices, values)
        except ConfigError as error:  # an index outside: the bytes are not those that were sent
            raise TransportError(f"topk: this payload cannot be decoded: {error}") from error

    def decode_sum(self, flat: torch.Tensor, payloads: Sequence[torch.Tensor], context: Context) -> None:
        k = sparse_numel(self.ratio, flat.numel())
        parts = [split_payload(payload, k) for payload in payloads]
        try:
            scatter_sum_(flat, parts)
        except ConfigError as error:
            raise TransportError(f"topk: a payload cannot be decoded: {error}") from error

    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        k = sparse_numel(self.ratio, flat.numel())
        if k == 0:
            return flat.abs()
        return torch.minimum(flat.abs(), flat.abs().topk(k).values[-1])

    def _report(self, flat: torch.Tensor, context: Context) -> torch.Tensor:
        """Returns where the selection of this part of these tensors keeps its threshold."""
        key = (context.parts, context.offset, context.round, flat.numel(), flat.device)
        report = self._reports.get(key)
        if report is None:
            report = self._reports[key] = torch.zeros(3, dtype=torch.int32, device=flat.device)
        return report


make = TopK
