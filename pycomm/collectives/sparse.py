"""all_reduce of sparse COO tensors: the ranks gather each other's entries, and each adds them in rank order.

The ranks' tensors have different numbers of entries, so the call is two gathers: what each rank has, then its entries,
padded to the longest. Its bytes grow with the number of ranks: ``world_size * entries``, where a dense all_reduce would
move the whole tensor twice. So it pays while the ranks' entries together are few, as are the rows of an embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..algorithms.executor import Collective
from ..errors import CollectiveMismatchError, ConfigError
from ..types import ReduceOp, dtype_of_code, dtype_of_name
from .call import Call
from .tensors import dtype_name, flatten

if TYPE_CHECKING:
    from .context import Options
    from .group import Group
    from .work import Work

__all__ = ["all_reduce_sparse"]

_MAX_DIMS = 64  # torch's own limit
_HEADER = 4 + _MAX_DIMS


class _Header(NamedTuple):
    """What the ranks tell each other first; all but ``entries`` has to be equal."""

    entries: int
    dtype_code: int
    op: int
    sparse_dim: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        kind = f"{ReduceOp(self.op).name} of {dtype_of_code(self.dtype_code).name}"
        return f"{kind}, shape {list(self.shape)}, the first {self.sparse_dim} dims sparse"

    def packed(self) -> torch.Tensor:
        """Returns it as ``(_HEADER,)`` int64."""
        numbers = [*self[:4], *self.shape]
        return torch.tensor(numbers + [-1] * (_HEADER - len(numbers)), dtype=torch.int64, device="cpu")

    @classmethod
    def unpack(cls, numbers: list[int]) -> _Header:
        """Returns what ``packed`` packed."""
        entries, dtype_code, op, sparse_dim, *shape = numbers
        return cls(entries, dtype_code, op, sparse_dim, tuple(size for size in shape if size >= 0))

    def empty(self, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns room for ``indices (entries, sparse_dim)``, an index a row, and ``values (entries, ...)``."""
        dtype = getattr(torch, dtype_of_code(self.dtype_code).name)
        indices = torch.empty(entries, self.sparse_dim, dtype=torch.int64, device="cpu")
        return indices, torch.empty(entries, *self.shape[self.sparse_dim :], dtype=dtype, device="cpu")


def all_reduce_sparse(
    tensor: torch.Tensor, op: ReduceOp, group: Group, async_op: bool, options: Options
) -> Work | None:
    """Reduces a sparse COO ``tensor`` over all ranks, in place: afterwards it has the entries of all, coalesced.

    ``op`` is SUM or AVG: with any other the entries that are not there would count. 16-bit floats accumulate in
    float32. Raises ConfigError, and CollectiveMismatchError on every rank if shapes, dtypes or operators differ.
    """
    _check(tensor, op, group, options)
    own = _summed(tensor.detach().cpu())
    code = dtype_of_name(dtype_name(tensor.dtype))
    assert code is not None  # what torch can coalesce, pycomm can move
    mine = _Header(own._nnz(), code.code, int(op), tensor.sparse_dim(), tuple(tensor.shape))
    device = group.control_device
    packed = mine.packed().to(device)
    told = torch.empty(group.world_size * _HEADER, dtype=packed.dtype, device=device)

    def exchange_entries(timeout_s: float) -> None:
        headers = [_Header.unpack(each) for each in told.view(-1, _HEADER).tolist()]
        _check_alike(headers)
        row_bytes = sum(each.nbytes for each in mine.empty(1))
        payload = torch.zeros(max(each.entries for each in headers) * row_bytes, dtype=torch.uint8, device="cpu")
        _fill(payload, [own._indices().t(), own._values()])
        payload = payload.to(device)
        payloads = torch.empty(group.world_size * payload.numel(), dtype=torch.uint8, device=device)
        gather = Collective(verb="all_gather_single", input=payload, output=payloads)
        group.engine.execute(gather, options.algorithm, timeout_s)
        divisor = group.world_size if op is ReduceOp.AVG else 1
        total = _total(headers, payloads.cpu().view(group.world_size, -1), divisor)
        with torch.no_grad():
            tensor.copy_(total)

    first = Collective(verb="all_gather_single", input=packed, output=told)
    return group.run(Call("all_reduce", [first], (), *options, result=tensor, follow_up=exchange_entries), async_op)


def _check(tensor: torch.Tensor, op: ReduceOp, group: Group, options: Options) -> None:
    """Raises ConfigError if this rank's own arguments cannot be reduced. Operator and dtype fit each other already."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ConfigError(
            f"op {op.name} is not defined on sparse tensors, as it would ask for the entries that are not there; use "
            f"SUM or AVG, or pass the tensor's .to_dense()"
        )
    if options.compression not in (None, "auto"):
        raise ConfigError("compression: expected a dense tensor, got a sparse one; leave compression out")
    if group.pending is not None:
        raise ConfigError("a sparse tensor cannot be coalesced with others; reduce it outside the coalescing context")


def _check_alike(headers: list[_Header]) -> None:
    if len({each[1:] for each in headers}) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(headers))
        raise CollectiveMismatchError(f"the ranks' sparse tensors differ: {listed}; make them equal")


def _summed(tensor: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """Returns ``tensor`` coalesced, each index once and in order, over ``divisor``. Raises ConfigError."""
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    try:
        total = (tensor.float() if is_narrow else tensor).coalesce()
        return (total if divisor == 1 else total / divisor).to(tensor.dtype)
    except NotImplementedError as error:
        raise ConfigError(
            f"torch cannot coalesce a sparse tensor of {tensor.dtype}; cast it, or pass its .to_dense()"
        ) from error


def _fill(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Writes the bytes of ``tensors``, one after the other, to the beginning of ``flat``, bytes."""
    start = 0
    for tensor in tensors:
        source = flatten(tensor, reads=True, writes=False, devices=("cpu",)).tensor.view(torch.uint8)
        flat[start : start + source.numel()] = source
        start += source.numel()


def _total(headers: list[_Header], payloads: torch.Tensor, divisor: int) -> torch.Tensor:
    """Returns the sum of the ranks' entries, added in rank order, over ``divisor``.

    ``payloads (world_size, bytes)`` begin with what each rank has.
    """
    mine = headers[0]
    indices, values = mine.empty(sum(each.entries for each in headers))
    start = 0
    for header, payload in zip(headers, payloads, strict=True):
        end, taken = start + header.entries, 0
        for part in (indices[start:end], values[start:end]):
            flat = part.view(-1).view(torch.uint8)
            flat.copy_(payload[taken : taken + flat.numel()])
            taken += flat.numel()
        start = end
    total = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=True, device="cpu")
    return _summed(total, divisor)
