"""Compressed training with torch's own engines: a communication hook for DDP, and FSDP2's custom collectives.

Both tell the compressor which tensors it has, which a process group cannot: error feedback, momentum and PowerSGD keep
their state by parameter name (DDP, where buckets may be laid out anew) or by module (FSDP2, whose reduce-scatter joins
the parameters of one). The group may be of any backend of torch; over ``pycomm`` calls keep their order with others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.context import Options as CallOptions
from ..collectives.context import resolve
from ..collectives.tensors import Flat
from ..collectives.verbs import all_gather_single, reduce_scatter_single, run_all_reduce
from ..compression import Part, checked_spec
from ..errors import ConfigError
from ..types import ReduceOp
from .members import Members
from .work import CallWork

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from ..collectives.group import Group

__all__ = ["DdpState", "compress_fsdp", "ddp_hook"]


class DdpState:
    """What ``ddp_hook`` returns: whose gradients it compresses, how, and the state of the compressor."""

    def __init__(self, model: DistributedDataParallel, compression: Any) -> None:
        self.compression = checked_spec(compression)
        self.process_group = model.process_group
        self.group = resolve(model.process_group)
        key_of = self.group.compression.key_of
        self.names = {parameter: key_of(name, parameter) for name, parameter in model.module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state of the group's compressors, for a checkpoint."""
        return self.group.compression.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``state_dict`` returned."""
        self.group.compression.load_state_dict(state)


def ddp_hook(model: DistributedDataParallel, compression: Any) -> DdpState:
    """Lets DDP average its gradients compressed, such as by "int4+ef"; call it once, before the first backward.

    The state of the compressor goes by parameter name, so that DDP may lay out its buckets anew. Raises ConfigError for
    a compression that does not exist, and in backward for gradients that are not float32, float16 or bfloat16.
    """
    state = DdpState(model, compression)
    model.register_comm_hook(state, _reduce_bucket)
    return state


# Torch compares the annotations of a hook with types; ours are text, so there are none.
def _reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    parts = [Part(state.names[parameter], tuple(parameter.shape)) for parameter in bucket.parameters()]

    def call(async_op: bool) -> Any:
        options = CallOptions(compression=state.compression)
        arguments = ([Flat(buffer)], buffer, ReduceOp.AVG, 1.0, options)
        return run_all_reduce(state.group, *arguments, async_op, buffer, parts)

    work = _issue(state.process_group, "all_reduce", [buffer], True, call)
    return work.get_future().then(lambda done: done.value()[0])


class _Comm:
    """FSDP2's ``Comm``: memory for a collective, and the collective, of one module."""

    def __init__(self, compression: Any, name: str, module: nn.Module) -> None:
        self.compression = compression
        self._name = f"fsdp:{name or 'root'}"
        self._module = weakref.ref(module)

    def options(self, group: Group) -> dict[str, Any]:
        """Returns the options of a call on ``group``."""
        return {"compression": self.compression, "name": group.compression.key_of(self._name, self._module())}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Comm):
    """Reduces the gradients of a module, compressed."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> CallWork:
        own = resolve(group)
        options = self.options(own)
        return _issue(
            group,
            "reduce_scatter_single",
            [output_tensor],
            async_op,
            lambda asynchronous: reduce_scatter_single(output_tensor, input_tensor, op, own, asynchronous, **options),
            [input_tensor],
        )


class _AllGather(_Comm):
    """Gathers the parameters of a module, compressed."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> CallWork:
        own = resolve(group)
        options = self.options(own)
        return _issue(
            group,
            "all_gather_single",
            [output_tensor],
            async_op,
            lambda asynchronous: all_gather_single(output_tensor, input_tensor, own, asynchronous, **options),
            [input_tensor],
        )


def compress_fsdp(model: nn.Module, compression: Any, all_gather: Any = None) -> None:
    """Lets each FSDP2 module in ``model`` reduce its gradients compressed, and, with ``all_gather``, gather parameters.

    Call it once, after ``fully_shard``. The state of the compressor goes by module. ``all_gather`` takes what keeps no
    state, such as "bf16"; every rank then computes with the same, rounded, parameters. Raises ConfigError for a
    compression that does not exist, and if ``model`` has no FSDP2 module.
    """
    from torch.distributed.fsdp import FSDPModule

    reducing = checked_spec(compression)
    gathering = None if all_gather is None else checked_spec(all_gather)
    modules: list[tuple[str, FSDPModule]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not modules:
        raise ConfigError(
            f"compress_fsdp: {type(model).__name__} has no FSDP2 module; call fully_shard(model) before, and for DDP "
            f"use ddp_hook"
        )
    for name, module in modules:
        module.set_custom_reduce_scatter(_ReduceScatter(reducing, name, module))  # type: ignore[arg-type]
        if gathering is not None:
            module.set_custom_all_gather(_AllGather(gathering, name, module))  # type: ignore[arg-type]


def _issue(
    group: dist.ProcessGroup,
    verb: str,
    written: Sequence[torch.Tensor],
    is_async: bool,
    call: Callable[[bool], Any],
    read: Sequence[torch.Tensor] = (),
) -> CallWork:
    """Makes a call of pycomm's in order with what torch itself calls on a group of ours."""
    try:
        backend: Any = group._get_backend(written[0].device)
    except RuntimeError:
        backend = None
    if isinstance(backend, Members):
        return backend._issue(verb, written, is_async, call, read)
    made = call(is_async)
    return CallWork(verb, [] if made is None else [made], written)
