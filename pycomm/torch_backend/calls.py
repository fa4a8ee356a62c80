"""What torch asks of a process group: c10d's collectives, by c10d's names and arguments, over a pycomm group.

c10d passes lists of one tensor and an options object, or a tensor and loose arguments (``pg.allreduce(t, op)``).
``asyncOp`` says whether the caller wants to go on: such a call runs on the group's own thread. Otherwise it runs here,
in the caller's thread.

[Note: one call at a time]
A pycomm group is used by one thread at a time; torch's groups may be used by any: autograd's, those of a loader of
checkpoints. ``issue`` puts the calls in order. It holds the lock while it hands a call over, or runs it if the group is
idle, but never while it waits for the group's thread, whose callbacks may issue calls themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch._C import _distributed_c10d as c10d

from ..collectives import lists, verbs
from ..collectives.coalescing import all_reduce_coalesced
from ..collectives.context import parse_op
from ..types import ReduceOp
from .ranges import is_profiling, range_of_call
from .work import DONE, CallWork

if TYPE_CHECKING:
    from ..collectives.group import Group
    from ..collectives.work import Work
    from .options import Options

__all__ = ["Calls"]

_MIN_COMPRESSED_NUMEL = 2048  # below, the bytes saved are nothing beside the call itself
_COMPRESSIBLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
_SUM, _AllreduceOptions = c10d.ReduceOp.SUM, c10d.AllreduceOptions
_UNSET = _AllreduceOptions().timeout
_AT_ONCE = {hash(op): parse_op(op)[0] for op in (_SUM, c10d.ReduceOp.AVG, c10d.ReduceOp.MAX, c10d.ReduceOp.MIN)}
_Tensors = Sequence[torch.Tensor]


class Calls:
    """The collectives of a process group; torch's classes are mixed in by ``process_group`` and ``backend``."""

    group: Group
    pycomm_options: Options

    @property
    def pycomm_group(self) -> Group:
        """The group that carries the calls; ``pycomm.all_reduce(..., group=)`` uses it too."""
        return self.group

    def _set_up(self, group: Group, options: Options) -> None:
        self.group = group
        self.pycomm_options = options
        self._is_plain = options.compression is None
        self._lock = threading.Lock()
        self._sequence_number = 0
        self._coalesced: list[CallWork] | None = None  # the calls since _start_coalescing

    def _issue(
        self,
        verb: str,
        written: _Tensors,
        is_async: bool,
        call: Callable[[bool], Work | list[Work] | None],
        read: _Tensors = (),
    ) -> CallWork:
        """Numbers a call and makes it: ``call(async_op)`` is a verb of pycomm. Returns its handle, whose result are the
        tensors that are ``written``; others are only ``read``.
        """
        with range_of_call(verb, written, read):
            with self._lock:
                self._sequence_number += 1
                is_here = not is_async and self._coalesced is None and self.group.is_idle
                made = call(not is_here)
                if made is None:
                    return CallWork(verb, (), written)
                work = CallWork(verb, made if isinstance(made, list) else [made], written)
                if self._coalesced is not None:
                    self._coalesced.append(work)
                    return work
            if not is_async:
                work.wait()
            return work

    def _compression(self, op: ReduceOp, tensor: torch.Tensor) -> Any:
        """Returns what compresses a reduction of ``tensor``, its largest buffer; None if nothing does."""
        spec = self.pycomm_options.compression
        if spec is None or op not in (ReduceOp.SUM, ReduceOp.AVG):
            return None
        is_large = tensor.numel() >= _MIN_COMPRESSED_NUMEL and tensor.dtype in _COMPRESSIBLE and not tensor.is_sparse
        return spec if is_large else None

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> CallWork:
        """Reduces in place."""
        if type(opts) is _AllreduceOptions and not opts.asyncOp and len(tensors) == 1:
            # By its hash, which is its number: to compare torch's operators takes longer than the collective.
            at_once = _AT_ONCE.get(hash(opts.reduceOp))
            if at_once is not None and self._all_reduce_at_once(tensors[0], at_once, opts):
                return DONE
        return self.allreduce_coalesced(tensors, opts if op is None else op, timeout)

    def _all_reduce_at_once(self, tensor: torch.Tensor, op: ReduceOp, opts: Any) -> bool:
        """Takes the transport's short cut, if there is one and nothing stands in its way."""
        if not self._is_plain or opts.timeout != _UNSET or is_profiling():
            return False
        with self._lock:
            # While asynchronous calls are outstanding, the group has no short cuts.
            if self._coalesced is not None or not self.group.fast_all_reduce(tensor, op):
                return False
            self._sequence_number += 1
            return True

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Reduces all of ``tensors`` in place, by one call of pycomm for each element type."""
        tensors = _list(tensors)
        op, extra = _reduction(opts, timeout)

        def call(async_op: bool) -> Any:
            parsed, _ = parse_op(op)
            if len(tensors) == 1:
                compression = self._compression(parsed, tensors[0])
                return verbs.all_reduce(tensors[0], op, self.group, async_op, compression=compression, **extra)
            return all_reduce_coalesced(tensors, op, self.group, async_op, **extra)

        return self._issue("all_reduce", tensors, _is_async(opts), call)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = _SUM, timeout: Any = None) -> CallWork:
        """Reduces in place on the root; elsewhere the tensor is not written."""
        (tensor,) = _list(tensors)
        root, extra = _root(opts, timeout)
        op = getattr(opts, "reduceOp", op)
        return self._issue(
            "reduce",
            [tensor],
            _is_async(opts),
            lambda async_op: verbs.reduce(tensor, None, op, self.group, async_op, root, **extra),
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, op: Any = None
    ) -> CallWork:
        """Reduces ``inputs[0][r]`` over the ranks into the output of rank r."""
        (output,), (parts,) = _list(outputs), _lists(inputs)
        op, extra = _reduction(opts if op is None else op, timeout)
        return self._issue(
            "reduce_scatter",
            [output],
            _is_async(opts),
            lambda async_op: lists.reduce_scatter(output, parts, op, self.group, async_op, **extra),
            parts,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> CallWork:
        """Reduces ``input (world_size * numel)``; rank r keeps part r in ``output (numel)``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts, timeout)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: Any = None
    ) -> CallWork:
        """As ``reduce_scatter_single``, for several pairs."""
        op, extra = _reduction(opts, timeout)

        def call(async_op: bool) -> Any:
            parsed, _ = parse_op(op)
            works = [
                verbs.reduce_scatter_single(
                    output, input, op, self.group, async_op, compression=self._compression(parsed, input), **extra
                )
                for output, input in zip(outputs, inputs, strict=True)
            ]
            return _made(works)

        return self._issue("reduce_scatter_single", outputs, _is_async(opts), call, inputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moves --------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Copies the root's tensor to every rank."""
        (tensor,) = _list(tensors)
        root, extra = _root(opts, timeout)
        return self._issue(
            "broadcast",
            [tensor],
            _is_async(opts),
            lambda async_op: verbs.broadcast(tensor, None, self.group, async_op, root, **extra),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Fills ``outputs[0][r]`` with the input of rank r. Sizes may differ from rank to rank."""
        (parts,), (tensor,) = _lists(outputs), _list(inputs)
        extra = _timeout(opts, timeout)
        return self._issue(
            "all_gather",
            parts,
            _is_async(opts),
            lambda async_op: lists.all_gather(parts, tensor, self.group, async_op, **extra),
            [tensor],
        )

    def allgather_coalesced(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None, timeout: Any = None
    ) -> CallWork:
        """Fills ``outputs[r][i]`` with the i-th input of rank r: the lists are one a rank, not one a tensor."""
        extra = _timeout(opts, timeout)

        def call(async_op: bool) -> Any:
            works = [
                lists.all_gather([each[index] for each in outputs], tensor, self.group, async_op, **extra)
                for index, tensor in enumerate(inputs)
            ]
            return _made(works)

        return self._issue("all_gather", [t for each in outputs for t in each], _is_async(opts), call, inputs)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: Any = None
    ) -> CallWork:
        """Fills ``output (world_size * numel)`` with the ranks' inputs in rank order."""
        return self.all_gather_single_coalesced([output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: Any = None
    ) -> CallWork:
        """As ``all_gather_single``, for several pairs."""
        extra = _timeout(opts, timeout)

        def call(async_op: bool) -> Any:
            works = [
                verbs.all_gather_single(output, input, self.group, async_op, **extra)
                for output, input in zip(outputs, inputs, strict=True)
            ]
            return _made(works)

        return self._issue("all_gather_single", outputs, _is_async(opts), call, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Fills ``outputs[0][r]`` on the root with the input of rank r; elsewhere ``outputs`` is empty."""
        (tensor,) = _list(inputs)
        parts = _lists(outputs)[0] if len(outputs) else None
        root, extra = _root(opts, timeout)
        return self._issue(
            "gather",
            parts or (),
            _is_async(opts),
            lambda async_op: lists.gather(tensor, parts, None, self.group, async_op, root, **extra),
            [tensor],
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Fills the output of rank r with ``inputs[0][r]`` of the root; elsewhere ``inputs`` is empty."""
        (tensor,) = _list(outputs)
        parts = _lists(inputs)[0] if len(inputs) else None
        root, extra = _root(opts, timeout)
        return self._issue(
            "scatter",
            [tensor],
            _is_async(opts),
            lambda async_op: lists.scatter(tensor, parts, None, self.group, async_op, root, **extra),
            parts or (),
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CallWork:
        """Sends ``inputs[r]`` to rank r and receives ``outputs[r]`` from it."""
        extra = _timeout(opts, timeout)
        return self._issue(
            "all_to_all",
            outputs,
            _is_async(opts),
            lambda async_op: lists.all_to_all(outputs, inputs, self.group, async_op, **extra),
            inputs,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> CallWork:
        """Sends rows of ``input`` to each rank and receives rows of ``output``; without sizes equally many."""
        extra = _timeout(opts, timeout)
        splits = list(output_split_sizes), list(input_split_sizes)
        return self._issue(
            "all_to_all_single",
            [output],
            _is_async(opts),
            lambda async_op: verbs.all_to_all_single(output, input, *splits, self.group, async_op, **extra),
            [input],
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> CallWork:
        """Ends once every rank has called it."""
        extra = _timeout(opts, timeout)
        return self._issue(
            "barrier", [], _is_async(opts), lambda async_op: verbs.barrier(self.group, async_op, **extra)
        )


# -- c10d's arguments --------------------------------------------------------------------------------------------------


def _list(tensors: Any) -> _Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _lists(tensors: Any) -> Sequence[_Tensors]:
    """Returns a list of lists of tensors, of one list too."""
    return [tensors] if isinstance(tensors[0], torch.Tensor) else tensors


def _is_async(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


def _reduction(opts: Any, timeout: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the operator and the timeout, of an options object or loose."""
    op = getattr(opts, "reduceOp", opts)
    return _SUM if op is None else op, _timeout(opts, timeout)


def _root(opts: Any, timeout: Any) -> tuple[int, dict[str, Any]]:
    """Returns the root's rank in the group and the timeout, of an options object or loose."""
    return int(getattr(opts, "rootRank", opts)), _timeout(opts, timeout)


def _timeout(opts: Any, timeout: Any) -> dict[str, Any]:
    """Returns the keyword ``timeout`` of a verb: c10d's "none given" is a negative time."""
    given = timeout if timeout is not None else getattr(opts, "timeout", _UNSET)
    return {} if given.total_seconds() <= 0 else {"timeout": given}


def _made(works: Sequence[Work | None]) -> list[Work] | None:
    """Returns the handles of asynchronous calls, None of those that are over."""
    kept = [work for work in works if work is not None]
    return kept or None
