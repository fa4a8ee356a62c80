"""The native core (csrc/), by pybind11."""

from collections.abc import Sequence

compiler: str
cuda_archs: str | None

# -- kernels: addresses, element counts, and the codes of pycomm.types -------------------------------------------------

def reduce(
    output: int,
    inputs: Sequence[int],
    numel: int,
    dtype: int,
    op: int,
    factors: Sequence[float] | None = None,
    stream_output: bool = False,
) -> None: ...
def reduce_cuda(
    output: int,
    inputs: Sequence[int],
    numel: int,
    dtype: int,
    op: int,
    factors: Sequence[float] | None,
    stream: int,
) -> None: ...
def reduce_supported(dtype: int, op: int) -> bool: ...
def cpu_isa() -> str: ...
def _reduce_isa(name: str | None) -> bool: ...
