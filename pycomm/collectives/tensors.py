"""Makes any argument of a verb *flat*: a 1-D, contiguous, dense tensor without autograd.

It shares the caller's memory if it can. What cannot be right raises ConfigError here, before a byte moves: sparse, meta
and quantized tensors, wrappers without memory of their own, results that overlap themselves or one another, arrays that
are read-only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ..errors import ConfigError
from ..types import DTYPES, ReduceOp, dtype_of_name

__all__ = [
    "TORCH_OPERATORS",
    "Flat",
    "as_tensor",
    "check_disjoint",
    "check_in_place",
    "consecutive",
    "dtype_name",
    "flatten",
    "joined",
    "operator_of",
]

_warned_devices: set[str] = set()
# torch's own operators, in the order of ours: all but PREMUL_SUM, which has a factor.
TORCH_OPERATORS: dict[Any, ReduceOp] = {
    getattr(torch.distributed.ReduceOp, op.name): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and torch.distributed.is_available()
}
_their_types = {type(op) for op in TORCH_OPERATORS}

_FUNCTIONAL = "torch.distributed._functional_collectives"


def operator_of(op: object) -> ReduceOp | None:
    """Returns the operator that one of torch's own stands for; None for anything else."""
    return TORCH_OPERATORS.get(op) if type(op) in _their_types else None


class Flat(NamedTuple):
    """A ``tensor (numel,)`` for a transport.

    ``finish()`` copies a result back to the caller's memory; None if it is there.
    """

    tensor: torch.Tensor
    finish: Callable[[], None] | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of ``dtype`` without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


def as_tensor(value: Any, name: str, *, writes: bool) -> torch.Tensor:
    """Returns ``value`` as a dense tensor over the same memory, detached; ``writes`` says that a result will go there.

    Takes torch tensors, NumPy arrays, and objects with ``__cuda_array_interface__`` or ``__dlpack__``. Raises
    ConfigError.
    """
    tensor = value if isinstance(value, torch.Tensor) else _from_foreign(value, name, writes)
    if type(tensor).__module__ == _FUNCTIONAL:  # its AsyncCollectiveTensor: what a functional collective returns
        tensor = cast("Any", tensor).trigger_wait()
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise ConfigError(f"{name}: expected a dense tensor, got {what}; pass its .to_dense(), or its values")
    if tensor.is_meta:
        raise ConfigError(f"{name}: expected a tensor with data, got one on the meta device; materialize it first")
    if tensor.is_quantized or dtype_of_name(dtype_name(tensor.dtype)) is None:
        known = ", ".join(dtype.name for dtype in DTYPES)
        raise ConfigError(
            f"{name}: dtype {tensor.dtype} cannot be moved; known: {known}; for raw bytes pass .view(torch.uint8)"
        )
    if not _has_memory(tensor):
        is_inside = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
        got = "one inside vmap, grad or functionalize" if is_inside else type(tensor).__name__
        advice = "call pycomm outside of these" if is_inside else "of a DTensor pass .to_local()"
        raise ConfigError(f"{name}: expected a tensor with memory of its own, got {got}; {advice}")
    tensor = tensor.detach()  # also a view made under no_grad may be written then
    if tensor.is_inference():
        tensor = _ordinary(tensor)
    if writes and not tensor.is_contiguous():
        _check_own_overlap(tensor, name)
    return tensor


def flatten(tensor: torch.Tensor, *, reads: bool, writes: bool, devices: Collection[str]) -> Flat:
    """Returns ``tensor``, a result of ``as_tensor``, flat and on one of ``devices``.

    Without a copy where the memory is already so; else ``reads`` says that the contents are needed, and ``writes`` that
    a result has to come back. Other devices than a transport's are staged through host memory, with one warning.
    """
    if not (tensor.is_cpu and "cpu" in devices) and tensor.device.type not in devices:
        return _staged(tensor, reads, writes)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # Not view(-1): one element may be contiguous with any stride, and would keep it.
        return Flat(tensor.as_strided((tensor.numel(),), (1,)))
    # Torch reads and writes through strides and conjugate or negation bits; a transport sees the copy.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return _connected(tensor, flat, reads, writes)


def joined(tensors: Sequence[torch.Tensor], *, reads: bool, writes: bool, devices: Collection[str]) -> Flat:
    """Returns the tensors of a list as one flat tensor, in order; their own memory if they lie one after the other."""
    first = tensors[0]
    is_plain = (
        all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in tensors) and first.device.type in devices
    )
    whole = consecutive(tensors) if is_plain else None
    if whole is not None:
        return Flat(whole)
    parts = [flatten(tensor, reads=reads, writes=writes, devices=devices) for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    flat = torch.cat([part.tensor for part in parts])
    if not writes:
        return Flat(flat)

    def finish() -> None:
        offset = 0
        for part in parts:
            part.tensor.copy_(flat[offset : offset + part.tensor.numel()])
            offset += part.tensor.numel()
            if part.finish is not None:
                part.finish()

    return Flat(flat, finish)


def consecutive(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the memory of contiguous tensors, flat, if they are parts of one allocation, each starting where the one
    before it ends; else None.
    """
    first, numel = tensors[0], 0
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == start + numel
        if tensor.numel() and not (is_next and tensor.dtype == first.dtype):
            return None
        numel += tensor.numel()
    # Views of an array that is not torch's may have storages of their own, which begin alike and end elsewhere.
    is_whole = first.untyped_storage().nbytes() >= (start + numel) * first.itemsize
    return first.as_strided((numel,), (1,)) if is_whole else None


def check_disjoint(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigError if two of the tensors, all of which are written, share memory."""
    filled = [(*_span(tensor), name, tensor) for name, tensor in named if tensor.numel()]
    reaching: list[tuple[int, str, torch.Tensor]] = []  # beyond where the next one starts
    for start, stop, name, tensor in sorted(filled, key=lambda each: each[:2]):
        reaching = [each for each in reaching if each[0] > start]
        for _, other, earlier in reaching:
            if _share_bytes(earlier, tensor):
                raise ConfigError(f"{name} shares memory with {other}, and both receive results; pass separate tensors")
        reaching.append((stop, name, tensor))


def check_in_place(outputs: torch.Tensor, part: torch.Tensor, slot: int | None, parts: int, names: str) -> None:
    """Raises ConfigError if ``part`` overlaps ``outputs``, unless it is exactly slot ``slot`` of ``parts`` equals."""
    if not (outputs.numel() and part.numel() and outputs.is_contiguous() and part.is_contiguous()):
        return
    (start, stop), (part_start, part_stop) = _span(outputs), _span(part)
    if outputs.device != part.device or part_stop <= start or stop <= part_start:
        return
    allowed = "" if slot is None else f", or exactly part {slot} of {parts} of the larger one (in place)"
    if slot is None or part_start != start + slot * ((stop - start) // parts) or part.nbytes * parts != outputs.nbytes:
        raise ConfigError(f"{names} share memory; expected separate tensors{allowed}")


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor).__module__ == "torch._subclasses.fake_tensor":  # which would warn of being asked
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _from_foreign(value: Any, name: str, writes: bool) -> torch.Tensor:
    """Wraps an array of another library without a copy."""
    try:
        if isinstance(value, np.ndarray):
            return _from_numpy(value, name, writes)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
    except ConfigError:
        raise
    except Exception as error:  # each library has its own
        raise ConfigError(f"{name}: this {type(value).__name__} cannot be shared with torch: {error}") from error
    raise ConfigError(
        f"{name}: expected a torch tensor, a NumPy array or an object with __dlpack__ or __cuda_array_interface__, "
        f"got {type(value).__name__}; for Python objects there are the *_object verbs"
    )


def _from_numpy(array: np.ndarray[Any, Any], name: str, writes: bool) -> torch.Tensor:
    if not writes:
        # torch cannot express read-only memory and negative strides; for an input a copy will do.
        is_plain = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if is_plain else array.copy(order="C"))
    if not array.flags.writeable:
        raise ConfigError(f"{name}: this NumPy array is read-only and would receive the result; pass a writable copy")
    if min(array.strides, default=0) < 0:
        raise ConfigError(
            f"{name}: negative strides {array.strides} cannot receive a result; pass np.ascontiguousarray of it"
        )
    return torch.from_numpy(array)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an inference tensor's memory as a tensor that may be written outside of inference mode too."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _staged(tensor: torch.Tensor, reads: bool, writes: bool) -> Flat:
    kind = tensor.device.type
    if kind != "cpu" and kind not in _warned_devices:
        _warned_devices.add(kind)
        warnings.warn(
            f"this group's transport moves CPU memory: tensors on {tensor.device} are copied to the host and back; "
            f"for speed use a transport that carries {kind} tensors",
            RuntimeWarning,
            stacklevel=2,
        )
    if kind == "cpu":
        raise ConfigError("this group's transport does not carry CPU tensors; move the tensor to its device first")
    if kind == "cuda":
        # What the caller's stream still does to this memory comes first; the copies below may run on another stream.
        torch.cuda.current_stream(tensor.device).synchronize()
    host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=kind == "cuda", device="cpu")
    return _connected(tensor, host, reads, writes)


def _connected(tensor: torch.Tensor, flat: torch.Tensor, reads: bool, writes: bool) -> Flat:
    """Fills ``flat (numel,)`` from ``tensor`` if it is read, and ties it to ``tensor`` if it is written."""
    shaped = flat.view(tensor.shape)
    if reads:
        shaped.copy_(tensor)
    return Flat(flat, (lambda: _copy_back(tensor, shaped)) if writes else None)


def _copy_back(tensor: torch.Tensor, shaped: torch.Tensor) -> None:
    tensor.copy_(shaped)


def _check_own_overlap(tensor: torch.Tensor, name: str) -> None:
    """Raises if two indices of ``tensor`` name the same element, as after ``expand``: a result there is ambiguous."""
    dims = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    reach, is_nested = 0, True
    for stride, length in dims:
        is_nested = is_nested and stride > reach
        reach += stride * (length - 1)
    if is_nested or tensor.numel() == 0:
        return
    # Strides that do not nest may still never meet (as_strided); so rare that listing the offsets is good enough.
    if not any(stride == 0 for stride, _ in dims):
        offsets = torch.zeros((), dtype=torch.int64, device="cpu")
        for stride, length in dims:
            offsets = offsets.unsqueeze(-1) + torch.arange(length, device="cpu") * stride
        if len(set(offsets.flatten().tolist())) == tensor.numel():
            return
    raise ConfigError(
        f"{name}: elements of this tensor overlap each other (shape {tuple(tensor.shape)}, strides {tensor.stride()}), "
        f"so it cannot receive a result; pass a .contiguous() copy"
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a ``tensor`` with elements and of the one after its last."""
    reach = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _share_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte belongs to elements of both: address + steps of ``a`` = address + steps of ``b``."""
    steps = {1: [1 - b.itemsize, a.itemsize - 1]}  # by their lengths in bytes: the fewest and the most
    for tensor, sign in ((a, 1), (b, -1)):
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True):
            if stride:
                steps.setdefault(stride * tensor.itemsize, [0, 0])[sign > 0] += sign * (length - 1)
    return _is_sum(b.data_ptr() - a.data_ptr(), sorted(steps.items(), reverse=True))


def _is_sum(distance: int, steps: list[tuple[int, list[int]]]) -> bool:
    """Whether steps of the lengths, as many of each as may be, make up ``distance``. The longest come first."""
    if not steps:
        return distance == 0
    (stride, (fewest, most)), *rest = steps
    lowest = sum(length * few for length, (few, _) in rest)
    highest = sum(length * many for length, (_, many) in rest)
    first, last = -((highest - distance) // stride), (distance - lowest) // stride  # so that the rest can reach it
    return any(_is_sum(distance - number * stride, rest) for number in range(max(fewest, first), min(most, last) + 1))
