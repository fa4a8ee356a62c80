"""The collectives on lists of tensors, one a rank.

Lists whose tensors lie one after the other in memory move without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from ..algorithms.executor import Collective
from ..errors import ConfigError
from ..types import ReduceOp
from .call import Call
from .context import CallOptions, OpLike, parse_op, parse_options, resolve, root_rank
from .group import Group
from .tensors import Flat, as_tensor, check_disjoint, check_in_place, flatten, joined
from .verbs import check_op, is_plain, with_short_cut
from .work import Work

__all__ = ["all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"]


@with_short_cut("fast_all_gather")
def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Any = None, async_op: bool = False, **options: Unpack[CallOptions]
) -> Work | None:
    """Fills ``tensor_list[r]`` with the ``tensor`` of rank r, for every r. Sizes may differ from rank to rank."""
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("all_gather"):
        if is_plain(async_op, parsed) and g.fast_all_gather(tensor_list, tensor):
            return None
        outputs = _tensors(g, tensor_list, "tensor_list", writes=True)
        own = as_tensor(tensor, "tensor", writes=False)
        _check_like(own, outputs, "tensor", "tensor_list")
        _check_numel(own, "tensor", outputs[g.rank], f"tensor_list[{g.rank}]")
        for rank, output in enumerate(outputs):
            check_in_place(output, own, 0 if rank == g.rank else None, 1, f"tensor_list[{rank}] and tensor")
        devices = g.transport.devices
        flat = flatten(own, reads=True, writes=False, devices=devices)
        if _is_even(outputs):
            out = joined(outputs, reads=False, writes=True, devices=devices)
            collectives = [Collective(verb="all_gather_single", input=flat.tensor, output=out.tensor)]
            finishes = [out.finish]
        else:  # each rank broadcasts its own
            parts = [flatten(output, reads=False, writes=True, devices=devices) for output in outputs]
            finishes = [part.finish for part in parts]
            finishes[g.rank] = lambda: _copy(outputs[g.rank], own)
            parts[g.rank] = flat
            collectives = [
                Collective(verb="broadcast", input=part.tensor, output=part.tensor, root=rank)
                for rank, part in enumerate(parts)
            ]
    return g.run(Call("all_gather", collectives, finishes, *parsed, result=tensor_list), async_op)


@with_short_cut("fast_reduce_scatter")
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: OpLike = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduces ``input_list[r]`` over all ranks into the ``output`` of rank r. Sizes may differ from rank to rank."""
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("reduce_scatter"):
        reduce_op, factor = parse_op(op)
        if is_plain(async_op, parsed, reduce_op) and g.fast_reduce_scatter(output, input_list, reduce_op):
            return None
        inputs = _tensors(g, input_list, "input_list", writes=False)
        own = as_tensor(output, "output", writes=True)
        _check_like(own, inputs, "output", "input_list")
        _check_numel(own, "output", inputs[g.rank], f"input_list[{g.rank}]")
        check_op(own.dtype, reduce_op)
        for rank, input_ in enumerate(inputs):
            check_in_place(input_, own, 0 if rank == g.rank else None, 1, f"input_list[{rank}] and output")
        devices = g.transport.devices
        out = flatten(own, reads=False, writes=True, devices=devices)
        if _is_even(inputs):
            flat = joined(inputs, reads=True, writes=False, devices=devices)
            verb_inputs: list[tuple[str, Flat, int]] = [("reduce_scatter_single", flat, 0)]
        else:  # each rank is the root of its own
            flats = [flatten(input_, reads=True, writes=False, devices=devices) for input_ in inputs]
            verb_inputs = [("reduce", flat, rank) for rank, flat in enumerate(flats)]
        collectives = [
            Collective(
                verb=verb,
                input=flat.tensor,
                output=out.tensor if verb == "reduce_scatter_single" or root == g.rank else None,
                op=reduce_op,
                factor=factor,
                root=root,
            )
            for verb, flat, root in verb_inputs
        ]
    return g.run(Call("reduce_scatter", collectives, [out.finish], *parsed, result=output), async_op)


@with_short_cut("fast_all_to_all")
def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Sends ``input_tensor_list[r]`` to rank r and receives ``output_tensor_list[r]`` from it. Sizes may differ."""
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("all_to_all"):
        if is_plain(async_op, parsed) and g.fast_all_to_all(output_tensor_list, input_tensor_list):
            return None
        outputs = _tensors(g, output_tensor_list, "output_tensor_list", writes=True)
        inputs = _tensors(g, input_tensor_list, "input_tensor_list", writes=False)
        _check_like(outputs[0], inputs, "output_tensor_list[0]", "input_tensor_list")
        _check_numel(outputs[g.rank], f"output_tensor_list[{g.rank}]", inputs[g.rank], f"input_tensor_list[{g.rank}]")
        named = [(f"input_tensor_list[{rank}]", tensor) for rank, tensor in enumerate(inputs)]
        for rank, output in enumerate(outputs):
            for name, input_ in named:
                check_in_place(output, input_, None, 1, f"output_tensor_list[{rank}] and {name}")
        out = joined(outputs, reads=False, writes=True, devices=g.transport.devices)
        flat = joined(inputs, reads=True, writes=False, devices=g.transport.devices)
    collective = Collective(
        verb="all_to_all_single",
        input=flat.tensor,
        output=out.tensor,
        input_splits=tuple(tensor.numel() for tensor in inputs),
        output_splits=tuple(tensor.numel() for tensor in outputs),
    )
    return g.run(Call("all_to_all", [collective], [out.finish], *parsed, result=output_tensor_list), async_op)


@with_short_cut("fast_gather", rank="dst")
def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Fills ``gather_list[r]`` on the root (default: global rank 0) with the ``tensor`` of rank r, all of one size."""
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("gather"):
        root = root_rank(g, dst, group_dst, "dst", default=0)
        if is_plain(async_op, parsed) and g.fast_gather(tensor, gather_list, root):
            return None
        own = as_tensor(tensor, "tensor", writes=False)
        flat = flatten(own, reads=True, writes=False, devices=g.transport.devices)
        out = Flat(flat.tensor)
        if _has_list(g, gather_list, root, "gather_list"):
            outputs = _tensors(g, gather_list or (), "gather_list", writes=True)
            _check_like(own, outputs, "tensor", "gather_list")
            for rank, output in enumerate(outputs):
                _check_numel(output, f"gather_list[{rank}]", own, "tensor")
                check_in_place(output, own, 0 if rank == g.rank else None, 1, f"gather_list[{rank}] and tensor")
            out = joined(outputs, reads=False, writes=True, devices=g.transport.devices)
    collective = Collective(verb="gather", input=flat.tensor, output=out.tensor if g.rank == root else None, root=root)
    return g.run(Call("gather", [collective], [out.finish], *parsed, result=gather_list), async_op)


@with_short_cut("fast_scatter", rank="src")
def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Fills ``tensor`` on rank r with ``scatter_list[r]`` of the root (default: global rank 0), all of one size."""
    g, parsed = resolve(group), parse_options(**options)
    with g.scope("scatter"):
        root = root_rank(g, src, group_src, "src", default=0)
        if is_plain(async_op, parsed) and g.fast_scatter(tensor, scatter_list, root):
            return None
        own = as_tensor(tensor, "tensor", writes=True)
        out = flatten(own, reads=False, writes=True, devices=g.transport.devices)
        flat: Flat | None = None
        if _has_list(g, scatter_list, root, "scatter_list"):
            inputs = _tensors(g, scatter_list or (), "scatter_list", writes=False)
            _check_like(own, inputs, "tensor", "scatter_list")
            for rank, input_ in enumerate(inputs):
                _check_numel(input_, f"scatter_list[{rank}]", own, "tensor")
                check_in_place(input_, own, 0 if rank == g.rank else None, 1, f"scatter_list[{rank}] and tensor")
            flat = joined(inputs, reads=True, writes=False, devices=g.transport.devices)
    collective = Collective(verb="scatter", input=None if flat is None else flat.tensor, output=out.tensor, root=root)
    return g.run(Call("scatter", [collective], [out.finish], *parsed, result=tensor), async_op)


def _tensors(g: Group, values: Sequence[Any], name: str, *, writes: bool) -> list[torch.Tensor]:
    """Returns the tensors of a list argument.

    Raises ConfigError unless there is one a rank, of one dtype, apart if written.
    """
    if not isinstance(values, (list, tuple)) or len(values) != g.world_size:
        got = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ConfigError(f"{name}: expected a list of {g.world_size} tensors, one a rank, got {got}")
    tensors = [as_tensor(value, f"{name}[{rank}]", writes=writes) for rank, value in enumerate(values)]
    _check_like(tensors[0], tensors, f"{name}[0]", name)
    if writes:
        check_disjoint([(f"{name}[{rank}]", tensor) for rank, tensor in enumerate(tensors)])
    return tensors


def _check_like(tensor: torch.Tensor, others: Sequence[torch.Tensor], name: str, list_name: str) -> None:
    for rank, other in enumerate(others):
        if other.dtype != tensor.dtype or other.device != tensor.device:
            raise ConfigError(
                f"{list_name}[{rank}] is {other.dtype} on {other.device} and {name} is {tensor.dtype} on "
                f"{tensor.device}; expected the same dtype and device"
            )


def _check_numel(tensor: torch.Tensor, name: str, like: torch.Tensor, like_name: str) -> None:
    if tensor.numel() != like.numel():
        raise ConfigError(
            f"{name}: expected {like.numel()} elements as {like_name} has, got {tensor.numel()}; resize it"
        )


def _has_list(g: Group, values: Sequence[Any] | None, root: int, name: str) -> bool:
    """Says whether this rank, the root, has to pass a list. Raises ConfigError if another rank does."""
    if g.rank != root and values:
        raise ConfigError(f"{name}: expected None on ranks other than the root {root}, got {len(values)} entries")
    return g.rank == root


def _is_even(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _copy(output: torch.Tensor, input_: torch.Tensor) -> None:
    if output.data_ptr() != input_.data_ptr() or output.stride() != input_.stride():
        output.copy_(input_.view(output.shape) if input_.is_contiguous() else input_.reshape(output.shape))
