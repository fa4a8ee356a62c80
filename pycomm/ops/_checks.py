"""Checks that the operators share: each raises before a byte moves, because native code believes what it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, NativeUnavailableError
from . import native

if TYPE_CHECKING:
    from .._native import CodecCuts

__all__ = ["check_dense", "check_devices", "current_stream", "cuts", "kernels"]


@cache
def kernels() -> ModuleType:
    """Returns the native core, told to run long kernels on torch's own threads (``torch.set_num_threads``).

    Raises NativeUnavailableError.
    """
    core = native()
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if library.is_file():  # loaded already; a C function of torch's stable ABI, 2.10 and later
        run = ctypes.CDLL(str(library)).torch_parallel_for
        core.use_parallel_for(ctypes.cast(run, ctypes.c_void_p).value)
    return core


@cache
def cuts() -> CodecCuts:
    """Returns the short cuts of operators: each is done, or says no and has touched nothing.

    Raises NativeUnavailableError.
    """
    made: CodecCuts = kernels().CodecCuts(torch.Tensor, torch.nn.Parameter)
    return made


def check_dense(op: str, what: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int | None = None) -> None:
    """Raises ConfigError unless ``tensor`` is 1-D, contiguous, of ``dtype`` and (if given) of ``numel`` elements."""
    if tensor.dtype != dtype:
        raise ConfigError(f"{op}: {what} has the wrong dtype: expected {dtype}, got {tensor.dtype}; convert it first")
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_neg():
        raise ConfigError(
            f"{op}: {what} is not flat: expected a 1-D contiguous tensor, got shape {tuple(tensor.shape)}, layout "
            f"{tensor.layout}; pass its .contiguous().view(-1)"
        )
    if numel is not None and tensor.numel() != numel:
        raise ConfigError(f"{op}: {what} has the wrong length: expected {numel} elements, got {tensor.numel()}")


def check_devices(op: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises ConfigError unless all tensors are on the device of ``first``."""
    for what, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ConfigError(f"{op}: {what} is on {tensor.device}, the others on {first.device}; move it")


@contextmanager
def current_stream(op: str, device: torch.device) -> Iterator[int | None]:
    """Yields None for the CPU, else the handle of the current CUDA stream of ``device``, which is made current.

    Raises NativeUnavailableError if this build has no kernels for ``device``.
    """
    if device.type == "cpu":
        yield None
        return
    if device.type != "cuda" or native().cuda_archs is None:
        raise NativeUnavailableError(
            f"{op}: this build of pycomm has no kernels for {device.type} tensors. Build them with "
            "`PYCOMM_CUDA=1 pip install -e . --no-build-isolation`, with CUDA_HOME set to a CUDA toolkit."
        )
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
