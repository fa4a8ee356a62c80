"""Silent corruption: replicas compared by hash, gradient norms side by side, checks of what the collectives move."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..algorithms.executor import Collective
from ..collectives.context import resolve
from ..collectives.tensors import flatten
from ..collectives.verbs import all_gather_single
from ..errors import ConfigError, TransportError

if TYPE_CHECKING:
    from ..collectives.group import Group

__all__ = ["GradientNorms", "Replicas", "checked", "gradient_norms", "verify"]

_log = logging.getLogger("pycomm")
_SAME_EVERYWHERE = {"all_reduce", "broadcast", "all_gather_single"}
_DIGEST_BYTES = 8
_MANY_DEVIATIONS = 10.0


class Replicas(NamedTuple):
    """Whether the ranks hold the same tensors; if not, the ``first`` that differs, and the minority of ``ranks``."""

    are_equal: bool
    tensors: int
    first: str = ""
    ranks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.are_equal

    def __str__(self) -> str:
        if self.are_equal:
            return f"all {self.tensors} tensors are equal on all ranks"
        return (
            f"{self.first!r} is the first of {self.tensors} tensors that differs: ranks {list(self.ranks)} hold others"
        )


def verify(what: Any, group: Any = None) -> Replicas:
    """Compares tensors over the ranks by a hash of their bytes (BLAKE2b, 64 bits); the same answer on every rank.

    ``what`` is a module (its parameters and buffers), a mapping of names, or tensors in an order that is the same on
    all ranks. Called by every rank. Raises CollectiveMismatchError if the ranks pass different numbers of tensors.
    """
    found = resolve(group)
    named = list(_named(what))
    digests = torch.tensor([_digest(tensor) for _, tensor in named], dtype=torch.int64, device=found.control_device)
    table = torch.empty(found.world_size * max(1, len(named)), dtype=torch.int64, device=found.control_device)
    all_gather_single(table, digests if named else torch.zeros_like(table[:1]), found)
    rows = table.view(found.world_size, -1).cpu()
    for index, (name, _) in enumerate(named):
        values = rows[:, index].tolist()
        if len(set(values)) > 1:
            return Replicas(False, len(named), name, _minority(values))
    return Replicas(True, len(named))


def _minority(values: list[int]) -> tuple[int, ...]:
    """Returns the ranks that do not hold what most do; where none is in the majority, those that differ from rank 0."""
    most = max(values, key=lambda value: (values.count(value), value == values[0]))
    return tuple(rank for rank, value in enumerate(values) if value != most)


def _named(what: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(what, torch.nn.Module):
        yield from what.named_parameters()
        yield from what.named_buffers()
    elif isinstance(what, Mapping):
        yield from what.items()
    elif isinstance(what, torch.Tensor):
        yield "tensor", what
    elif isinstance(what, Iterable):
        yield from ((f"tensor {index}", tensor) for index, tensor in enumerate(what))
    else:
        raise ConfigError(f"verify: expected a module, tensors or a mapping of them, got {type(what).__name__}")


def _digest(tensor: torch.Tensor) -> int:
    host = tensor.detach().cpu()
    raw = flatten(host, reads=True, writes=False, devices=("cpu",)).tensor.view(torch.uint8).numpy().data
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return int.from_bytes(blake2b(raw, digest_size=_DIGEST_BYTES, key=head[:64]).digest(), "little", signed=True)


class GradientNorms(NamedTuple):
    """Each rank's own gradient norm; ``suspects`` are ranks with NaN or inf, or far from the median of the ranks."""

    norms: tuple[float, ...]
    suspects: tuple[int, ...]


def gradient_norms(what: Any, group: Any = None) -> GradientNorms:
    """Compares the ranks' 2-norms of their local gradients, before these are reduced. Called by every rank.

    ``what`` is a module, or tensors (the gradients themselves). A rank is a suspect if it is ten deviations (by MAD)
    from the median: data that differ give norms that do, broken memory gives others.
    """
    found = resolve(group)
    is_module = isinstance(what, torch.nn.Module)
    grads = [p.grad for p in what.parameters() if p.grad is not None] if is_module else list(what)
    nothing = torch.zeros((), dtype=torch.float64, device="cpu")
    total = sum((grad.detach().double().square().sum().cpu() for grad in grads), nothing)
    mine = total.sqrt().reshape(1).to(found.control_device)
    table = torch.empty(found.world_size, dtype=torch.float64, device=found.control_device)
    all_gather_single(table, mine, found)
    norms = tuple(table.tolist())
    finite = [norm for norm in norms if norm - norm == 0]
    middle = median(finite) if finite else 0.0
    spread = max(median(abs(norm - middle) for norm in finite) if finite else 0.0, 0.01 * middle)
    suspects = [rank for rank, norm in enumerate(norms) if not abs(norm - middle) <= _MANY_DEVIATIONS * spread]
    return GradientNorms(norms, tuple(suspects))


@contextlib.contextmanager
def checked(
    group: Any = None, *, nan: bool = True, checksum: bool = True, on_nan: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Checks what the collectives of ``group`` move while the context is open. Opened by every rank alike.

    ``nan`` looks for NaN and inf before each call, and after it if there was none before, and tells ``on_nan``
    (default: a warning in the log). ``checksum`` compares the result of calls that leave the same on all ranks by hash,
    and raises TransportError, on every rank, if it differs. Costs a pass over the data, and a small collective, a call.
    """
    found = resolve(group)
    checks = _Checks(found, nan, checksum, on_nan or _log.warning)
    found.add_data_hook(checks)
    try:
        yield
    finally:
        found.remove_data_hook(checks)


class _Checks:
    def __init__(self, group: Group, nan: bool, checksum: bool, tell: Callable[[str], None]) -> None:
        self._group = group
        self._nan = nan
        self._checksum = checksum
        self._tell = tell
        self._with_nan: set[int] = set()  # ids of the collectives under way whose input has NaN or inf

    def __call__(self, collective: Collective, is_complete: bool) -> None:
        tensor = collective.output if is_complete else collective.input
        if tensor is None or tensor.numel() == 0:
            return
        if collective.verb == "broadcast" and not is_complete and collective.root != self._group.rank:
            return  # what it overwrites
        where = f"{collective.verb} on group {self._group.name!r}, rank {self._group.rank}"
        if self._nan and (tensor.is_floating_point() or tensor.is_complex()):
            is_finite = bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())
            had_nan = id(collective) in self._with_nan
            self._with_nan.discard(id(collective))
            if not is_finite and not is_complete:
                self._with_nan.add(id(collective))
                self._tell(f"{where}: the input has NaN or inf")
            elif not is_finite and not had_nan:
                self._tell(f"{where}: the result has NaN or inf, and this rank's input had none")
        if is_complete and self._checksum and collective.verb in _SAME_EVERYWHERE:
            self._compare(tensor, where)

    def _compare(self, tensor: torch.Tensor, where: str) -> None:
        mine = torch.tensor([_digest(tensor)], dtype=torch.int64, device=self._group.control_device)
        table = mine.new_empty(self._group.world_size)
        self._group.engine.execute(Collective(verb="all_gather_single", input=mine, output=table), None, None)
        values = table.tolist()
        if len(set(values)) > 1:
            raise TransportError(
                f"{where}: the result differs between ranks: ranks {list(_minority(values))} hold others; "
                f"memory or a link is broken; run the step again, and take those hosts out if it happens again"
            )
