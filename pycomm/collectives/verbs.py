"""The collectives on single tensors. Those on lists of tensors are in ``lists.py``.

Signatures are torch.distributed's; the extra keywords of all of them are ``CallOptions``. A synchronous call returns
None, ``async_op=True`` returns a ``Work``. Results are bit-identical on every rank. ``src`` and ``dst`` are global
ranks, ``group_src`` and ``group_dst`` ranks of the group. Tensors may be torch tensors, NumPy arrays, or anything with
``__dlpack__`` or ``__cuda_array_interface__``. Arguments that cannot be right raise ConfigError before a byte moves.

[Note: short cuts]
In front of the hot verbs stands a transport's short cut: no checks of ours, one native call with the user's own
arguments. It answers False if it has done nothing, because the call is not ordinary; then the function below serves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import torch

from ..algorithms.executor import Collective
from ..errors import ConfigError, NativeUnavailableError
from ..ops import native
from ..ops.reduce import reduce_supported
from ..sizes import whole_number
from ..types import ReduceOp
from .call import Call
from .context import CallOptions, OpLike, Options, parse_op, parse_options, resolve, root_rank, state
from .group import Group
from .lazy_work import StartedWork
from .short_cuts import SHORT_CUT_STARTS
from .sparse import all_reduce_sparse
from .tensors import TORCH_OPERATORS, Flat, as_tensor, check_in_place, flatten
from .work import Work

if TYPE_CHECKING:
    from ..compression import Part

__all__ = [
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
]


class _OtherOptions(TypedDict, total=False):
    """``CallOptions`` of barrier, whose timeout may stand by its place, as torch's does."""

    algorithm: str | None
    compression: Any
    name: str | None


_PLAIN = Options()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_short_cut(name: str, rank: str | None = None, handle: object = None) -> Callable[[_Function], _Function]:
    """Puts the group's short cut ``name`` in front of a verb: a native object that calls the one, or the other.

    The argument ``rank`` is a global rank, and one of the group to the short cut. Where the verb returns handles, what
    they are made of (``handle``: their class, or ``batch_kinds``) and the group follow the caller's arguments.
    """
    verb_name = name.removeprefix("fast_")
    start = f"start_{verb_name}" if verb_name in SHORT_CUT_STARTS else None

    def decorate(function: _Function) -> _Function:
        code = function.__code__
        names, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
        place = -1 if rank is None else names.index(rank)
        try:
            verb = native().Verb(
                function, state, name, place, names, defaults, handle if start is None else StartedWork, start
            )
        except NativeUnavailableError:  # then no transport has short cuts either
            return function
        return cast(_Function, functools.update_wrapper(verb, function))

    return decorate


if TORCH_OPERATORS:
    with contextlib.suppress(NativeUnavailableError):
        native().know_torch_operators(tuple(TORCH_OPERATORS))


@with_short_cut("fast_all_reduce")
def all_reduce(
    tensor: Any, op: OpLike = ReduceOp.SUM, group: Any = None, async_op: bool = False, **options: Unpack[CallOptions]
) -> Work | None:
    """Reduces ``tensor`` over all ranks, in place on every rank. 16- and 8-bit floats accumulate in float32.

    It may be a sparse COO tensor, with SUM or AVG: afterwards it has the entries of all ranks, coalesced. ``op`` is a
    ReduceOp, ours or torch's, or a ``premul_sum``. With ``async_op`` a Work is returned at once. Every collective takes
    these ``options``: ``algorithm`` (such as "ring"), ``timeout`` (seconds or a timedelta, of this call), and those of
    all_reduce, reduce_scatter and all_gather ``compression`` and ``name`` (docs/compression.md). Raises ConfigError
    before a byte moves for what cannot be right, CollectiveMismatchError if the ranks call different things,
    PeerLostError and CollectiveTimeoutError.
    """
    return _all_reduce(tensor, op, resolve(group), async_op, parse_options(**options))


def all_reduce_mean(
    tensor: Any, group: Any = None, async_op: bool = False, **options: Unpack[CallOptions]
) -> Work | None:
    """Replaces ``tensor`` on every rank by the mean over the ranks: ``all_reduce`` with AVG."""
    return all_reduce(tensor, ReduceOp.AVG, group, async_op, **options)


@with_short_cut("fast_broadcast", rank="src")
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Copies ``tensor`` of the root to every rank: of global rank ``src`` or rank ``group_src`` of the group, one of
    which has to be given.
    """
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("broadcast"):
        root = root_rank(g, src, group_src, "src")
        if is_plain(async_op, parsed) and g.fast_broadcast(tensor, root):
            return None
        is_root = g.rank == root
        t = as_tensor(tensor, "tensor", writes=not is_root)
        if _is_foreign(tensor) and is_plain(async_op, parsed) and g.fast_broadcast(t, root):
            return None
        flat = flatten(t, reads=is_root, writes=not is_root, devices=g.transport.devices)
    collective = Collective(verb="broadcast", input=flat.tensor, output=flat.tensor, root=root)
    return g.run(Call("broadcast", [collective], [flat.finish], *parsed, result=tensor), async_op)


@with_short_cut("fast_reduce", rank="dst")
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: OpLike = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduces ``tensor`` over all ranks, in place on the root, global rank ``dst`` or rank ``group_dst`` of the group.

    One of them has to be given. Elsewhere ``tensor`` is not written. ``op`` as for all_reduce.
    """
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("reduce"):
        root = root_rank(g, dst, group_dst, "dst")
        reduce_op, factor = parse_op(op)
        if is_plain(async_op, parsed, reduce_op) and g.fast_reduce(tensor, root, reduce_op):
            return None
        is_root = g.rank == root
        t = as_tensor(tensor, "tensor", writes=is_root)
        check_op(t.dtype, reduce_op)
        flat = flatten(t, reads=True, writes=is_root, devices=g.transport.devices)
    output = flat.tensor if is_root else None
    collective = Collective(verb="reduce", input=flat.tensor, output=output, op=reduce_op, factor=factor, root=root)
    return g.run(Call("reduce", [collective], [flat.finish], *parsed, result=tensor), async_op)


@with_short_cut("fast_all_gather_single")
def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False, **options: Unpack[CallOptions]
) -> Work | None:
    """Fills ``output_tensor (world_size * numel)`` with the ranks' ``input_tensor (numel)`` in rank order.

    The input may be this rank's own part of the output (in place).
    """
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("all_gather_single"):
        if is_plain(async_op, parsed) and g.fast_all_gather_single(output_tensor, input_tensor):
            return None
        output, input_ = _pair(g, output_tensor, input_tensor, whole="output_tensor", part="input_tensor")
        is_foreign = _is_foreign(output_tensor) or _is_foreign(input_tensor)
        if is_foreign and is_plain(async_op, parsed) and g.fast_all_gather_single(output, input_):
            return None
        out = flatten(output, reads=False, writes=True, devices=g.transport.devices)
        flat = flatten(input_, reads=True, writes=False, devices=g.transport.devices)
    collective = Collective(verb="all_gather_single", input=flat.tensor, output=out.tensor)
    return g.run(Call("all_gather_single", [collective], [out.finish], *parsed, result=output_tensor), async_op)


@with_short_cut("fast_reduce_scatter_single")
def reduce_scatter_single(
    output: Any,
    input: Any,
    op: OpLike = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduces ``input (world_size * numel)`` over all ranks; rank r keeps part r in ``output (numel)``.

    The output may be this rank's own part of the input (in place).
    """
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("reduce_scatter_single"):
        reduce_op, factor = parse_op(op)
        if is_plain(async_op, parsed, reduce_op) and g.fast_reduce_scatter_single(output, input, reduce_op):
            return None
        part, whole = _pair(g, output, input, whole="input", part="output")
        check_op(whole.dtype, reduce_op)
        is_foreign = _is_foreign(output) or _is_foreign(input)
        if (
            is_foreign
            and is_plain(async_op, parsed, reduce_op)
            and g.fast_reduce_scatter_single(part, whole, reduce_op)
        ):
            return None
        out = flatten(part, reads=False, writes=True, devices=g.transport.devices)
        flat = flatten(whole, reads=True, writes=False, devices=g.transport.devices)
    collective = Collective(
        verb="reduce_scatter_single", input=flat.tensor, output=out.tensor, op=reduce_op, factor=factor
    )
    return g.run(Call("reduce_scatter_single", [collective], [out.finish], *parsed, result=output), async_op)


@with_short_cut("fast_all_to_all_single")
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Iterable[Any] | None = None,
    input_split_sizes: Iterable[Any] | None = None,
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Sends part j of ``input`` to rank j; part i of ``output`` comes from rank i.

    Parts are equal slices of the first dimension, or as long there as the split sizes say: integers, in a list, an
    array or a tensor.
    """
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("all_to_all_single"):
        output_rows, input_rows = _rows(output_split_sizes, "output"), _rows(input_split_sizes, "input")
        is_even = not output_rows and not input_rows
        if is_even and is_plain(async_op, parsed) and g.fast_all_to_all_single(output, input):
            return None
        out_tensor = as_tensor(output, "output", writes=True)
        in_tensor = as_tensor(input, "input", writes=False)
        _check_same_dtype([("output", out_tensor), ("input", in_tensor)])
        check_in_place(out_tensor, in_tensor, None, 1, "output and input")
        output_splits = _splits(out_tensor, output_rows, g.world_size, "output")
        input_splits = _splits(in_tensor, input_rows, g.world_size, "input")
        if output_splits[g.rank] != input_splits[g.rank]:
            raise ConfigError(
                f"this rank sends itself {input_splits[g.rank]} elements and expects {output_splits[g.rank]}; "
                f"make input_split_sizes[{g.rank}] and output_split_sizes[{g.rank}] agree"
            )
        out = flatten(out_tensor, reads=False, writes=True, devices=g.transport.devices)
        flat = flatten(in_tensor, reads=True, writes=False, devices=g.transport.devices)
    collective = Collective(
        verb="all_to_all_single",
        input=flat.tensor,
        output=out.tensor,
        input_splits=input_splits,
        output_splits=output_splits,
    )
    return g.run(Call("all_to_all_single", [collective], [out.finish], *parsed, result=output), async_op)


@with_short_cut("fast_barrier")
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[_OtherOptions],
) -> Work | None:
    """Returns once every rank of the group has called it. ``device_ids`` is taken for torch's sake and not used."""
    g, parsed = resolve(group), parse_options(timeout=timeout, **options)
    if is_plain(async_op, parsed) and g.fast_barrier():
        return None
    return g.run(Call("barrier", [Collective(verb="barrier")], (), *parsed), async_op)


# The names that torch.distributed used before 2.13.
all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single


def _all_reduce(tensor: Any, op: OpLike, g: Group, async_op: bool, options: Options) -> Work | None:
    with g.scope("all_reduce"):
        reduce_op, factor = parse_op(op)
        if is_plain(async_op, options, reduce_op) and g.fast_all_reduce(tensor, reduce_op):
            return None
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
            check_op(tensor.dtype, reduce_op)
            return all_reduce_sparse(tensor, reduce_op, g, async_op, options)
        t = as_tensor(tensor, "tensor", writes=True)
        check_op(t.dtype, reduce_op)
        if _is_foreign(tensor) and is_plain(async_op, options, reduce_op) and g.fast_all_reduce(t, reduce_op):
            return None
        parts = _parts(t, options)
        if g.pending is not None:
            work: Work | None = g.pending.add(t, reduce_op, factor, options, tensor, async_op, parts)
            return work
        flat = flatten(t, reads=True, writes=True, devices=g.transport.devices)
    return run_all_reduce(g, [flat], flat.tensor, reduce_op, factor, options, async_op, tensor, parts)


def run_all_reduce(
    g: Group,
    flats: Sequence[Flat],
    buffer: torch.Tensor,
    op: ReduceOp,
    factor: float,
    options: Options,
    async_op: bool,
    result: Any,
    parts: Sequence[Part] = (),
) -> Work | None:
    """Reduces ``buffer (numel,)`` in place, then finishes ``flats``; ``parts`` are the tensors in it."""
    collective = Collective(verb="all_reduce", input=buffer, output=buffer, op=op, factor=factor)
    finishes = [flat.finish for flat in flats]
    return g.run(Call("all_reduce", [collective], finishes, *options, result=result, parts=parts), async_op)


def _parts(tensor: torch.Tensor, options: Options) -> Sequence[Part]:
    """Returns what a compressor is to know of the tensor; nothing if there is none."""
    if options.compression is None:
        return ()
    from ..compression import Part

    return (Part(options.name, tuple(tensor.shape)),)


def check_op(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raises ConfigError if ``op`` is not defined on ``dtype``."""
    if not reduce_supported(dtype, op):
        raise ConfigError(f"op {op.name} is not defined on {dtype}; cast the tensor, or choose another op")


def _is_foreign(value: Any) -> bool:
    """Whether it is an array of another library, which a short cut takes once it is a tensor."""
    return not isinstance(value, torch.Tensor)


def is_plain(async_op: bool, options: Options, op: ReduceOp | None = None) -> bool:
    """Whether a transport's short cut may serve: it has no place for options or a factor."""
    return not async_op and options == _PLAIN and op is not ReduceOp.PREMUL_SUM


def _pair(g: Group, output: Any, input_: Any, *, whole: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks an output and an input, one of which has ``world_size`` times the elements of the other; returns them."""
    out_name, in_name = (whole, part) if whole.startswith("output") else (part, whole)
    out_tensor = as_tensor(output, out_name, writes=True)
    in_tensor = as_tensor(input_, in_name, writes=False)
    _check_same_dtype([(out_name, out_tensor), (in_name, in_tensor)])
    large, small = (out_tensor, in_tensor) if out_name == whole else (in_tensor, out_tensor)
    if large.numel() != small.numel() * g.world_size:
        raise ConfigError(
            f"{whole}: expected {small.numel()} x {g.world_size} = {small.numel() * g.world_size} elements (those of "
            f"{part} for each rank), got {large.numel()}; resize it"
        )
    check_in_place(large, small, g.rank, g.world_size, f"{whole} and {part}")
    return out_tensor, in_tensor


def _check_same_dtype(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    (first_name, first), *others = named
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise ConfigError(f"{name} is {tensor.dtype} and {first_name} is {first.dtype}; expected the same dtype")


def _rows(sizes: Iterable[Any] | None, name: str) -> list[int]:
    """Returns split sizes as Python's integers, none for None. Raises ConfigError where one is not whole."""
    if sizes is None:
        return []
    if not isinstance(sizes, Iterable):
        raise ConfigError(f"{name}_split_sizes: expected one number for each rank, or None, got {sizes!r}")
    return [whole_number(rows, f"{name}_split_sizes", 0) for rows in sizes]


def _splits(tensor: torch.Tensor, rows: Sequence[int], world_size: int, name: str) -> tuple[int, ...]:
    """Returns the elements of each rank's part of ``tensor``.

    Raises ConfigError if the sizes do not fit its first dimension.
    """
    length = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if tensor.dim() == 0 or length % world_size:
            raise ConfigError(
                f"{name}: expected a first dimension divisible by {world_size} ranks, got shape {tuple(tensor.shape)}; "
                f"or pass {name}_split_sizes"
            )
        return (tensor.numel() // world_size,) * world_size
    if len(rows) != world_size or min(rows) < 0 or sum(rows) != length:
        raise ConfigError(
            f"{name}_split_sizes: expected {world_size} sizes >= 0 that sum to {length}, the first dimension of shape "
            f"{tuple(tensor.shape)}, got {rows}"
        )
    row_numel = tensor.numel() // length if length else 0
    return tuple(count * row_numel for count in rows)
