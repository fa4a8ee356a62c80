"""Data parallelism without a wrapper around the module: the optimizer averages the gradients before it steps.

    optimizer = pycomm.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())
    pycomm.broadcast_parameters(model)
    pycomm.broadcast_optimizer_state(optimizer)

As in Horovod; the gradients take the same path as those of DistributedDataParallel (``reducer/``).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

import pycomm

from ..errors import ConfigError
from ..reducer.layout import bucket_bytes_of
from ..reducer.reduce import Wire, refuse
from ..reducer.reducer import Reducer
from ..sizes import whole_number
from ._agreement import check_same_model
from ._buffers import broadcast_tensors

__all__ = ["DistributedOptimizer", "broadcast_optimizer_state", "broadcast_parameters"]


class _Distributed(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` puts in front of an optimizer's own class."""

    _pycomm_reducer: Reducer
    _pycomm_is_skipped: bool

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Makes sure that the gradients are averaged, then steps as the optimizer's own class does."""
        if closure is not None:
            raise ConfigError(
                "DistributedOptimizer: step() takes no closure, which would run backward() an unknown number of times; "
                "call backward() and then step()"
            )
        reducer = self._pycomm_reducer
        _check_all_averaged(self, reducer)
        if not self._pycomm_is_skipped and not reducer.is_reduced:
            reducer.reduce_now()
        reducer.is_reduced = False
        reducer.prepare()
        return super().step()

    def synchronize(self) -> None:
        """Averages the gradients now if that has not been done: before clipping them, for example."""
        if not self._pycomm_reducer.is_reduced:
            self._pycomm_reducer.reduce_now()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a DistributedOptimizer cannot be copied or pickled: it has a group, which is this process's place among "
            "the ranks; save or copy its state_dict()"
        )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` takes the gradients as they are."""
        was, self._pycomm_is_skipped = self._pycomm_is_skipped, True
        try:
            yield
        finally:
            self._pycomm_is_skipped = was


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    group: Any = None,
    *,
    compression: Any = None,
    bucket_bytes: int | str = "auto",
    backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:
    """Returns ``optimizer``, which from now on averages the gradients of all ranks before each ``step()``.

    The object stays the same and an instance of its class, so schedulers and checkpoints see no difference. With
    ``backward_passes_per_step`` > 1 the gradients of so many passes add up before they are averaged. A parameter that
    has no gradient on some ranks counts as zeros there. ``compression`` and ``bucket_bytes`` are those of
    DistributedDataParallel.

    Called by every rank; raises CollectiveMismatchError if their parameters differ, ConfigError if the optimizer has
    parameters without a name. To be called again once parameters were added to the optimizer, or unfrozen: ``step()``
    raises ConfigError for those that nobody averages.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"DistributedOptimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise ConfigError(
            "DistributedOptimizer: named_parameters: expected pairs of a name and a parameter, got something else: "
            "pass model.named_parameters()"
        )
    named = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
    known = {id(parameter) for _, parameter in named}
    held = [parameter for each in optimizer.param_groups for parameter in each["params"] if parameter.requires_grad]
    unnamed = [tuple(parameter.shape) for parameter in held if id(parameter) not in known]
    if unnamed:
        raise ConfigError(
            f"DistributedOptimizer: {len(unnamed)} parameters of the optimizer, of shapes {unnamed[:8]}, are not in "
            f"named_parameters; expected all of them: pass model.named_parameters()"
        )
    passes = whole_number(backward_passes_per_step, "backward_passes_per_step", 1)
    found = pycomm.get_group(group)
    check_same_model(named, found, "DistributedOptimizer", by_memory=True)
    reducer = Reducer(
        named,
        Wire.of(found, compression),
        bucket_bytes=bucket_bytes_of(bucket_bytes),
        finds_unused=True,
        passes_per_reduction=passes,
    )
    if isinstance(optimizer, _Distributed):
        optimizer._pycomm_reducer.close()
    else:
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
        if vars(optimizer).pop("step", None) is not None:  # of a scheduler that was made before
            optimizer.step = _counted(optimizer)  # type: ignore[method-assign]
    assert isinstance(optimizer, _Distributed)
    optimizer._pycomm_reducer, optimizer._pycomm_is_skipped = reducer, False
    return optimizer


def _check_all_averaged(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Raises ConfigError if the optimizer would step with gradients of this rank alone."""
    averaged = {id(parameter) for parameter in reducer.parameters}
    alone = [p for each in optimizer.param_groups for p in each["params"] if p.requires_grad and id(p) not in averaged]
    if not alone:
        return
    refuse(reducer.wire)
    raise ConfigError(
        f"DistributedOptimizer: {len(alone)} parameters, of shapes {[tuple(p.shape) for p in alone[:8]]}, were added "
        f"or unfrozen since it was made, so that their gradients are not averaged; expected the {len(averaged)} that "
        f"required a gradient then. Call DistributedOptimizer(optimizer, model.named_parameters()) again"
    )


def broadcast_parameters(
    parameters: nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    group: Any = None,
) -> None:
    """Copies parameters and buffers of rank ``root_rank`` of the group to all ranks, in place.

    Takes a module, its ``state_dict()``, or pairs of name and tensor. Called by every rank with the same names and
    shapes, else CollectiveMismatchError.
    """
    if isinstance(parameters, nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    else:
        named = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    found = pycomm.get_group(group)
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]
    check_same_model(tensors, found, "broadcast_parameters")
    with torch.no_grad():
        broadcast_tensors([tensor for _, tensor in tensors], found, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, group: Any = None) -> None:
    """Gives every rank the optimizer state of rank ``root_rank`` of the group: its tensors, and its settings.

    Called by every rank; those that have no state yet get it. Parameters are matched by their order.
    """
    found = pycomm.get_group(group)
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    told: list[Any] = [_without_tensors(state, tensors)] if found.rank == root_rank else [None]
    shapes: list[Any] = [[(tuple(each.shape), each.dtype, each.device.type) for each in tensors]]
    pycomm.broadcast_object_list(told, group=found, group_src=root_rank)
    pycomm.broadcast_object_list(shapes, group=found, group_src=root_rank)
    if found.rank != root_rank:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes[0]]
    broadcast_tensors(tensors, found, root_rank)
    if found.rank != root_rank:
        optimizer.load_state_dict(_with_tensors(told[0], tensors))


def _counted(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns ``step`` of the optimizer's class as torch's schedulers wrap it, who want to see that it is called."""
    step, own = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer = own()
        assert optimizer is not None, "it has this function"
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


class _Place(int):
    """Where a tensor stood in a state: its number among the tensors."""


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _alike(value, (_without_tensors(each, tensors) for each in value))
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _alike(value, (_with_tensors(each, tensors) for each in value))
    return value


def _alike(value: Any, items: Iterable[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a NamedTuple's, or another's
