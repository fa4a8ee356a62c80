"""The native core (csrc/), by pybind11."""

from collections.abc import Callable, Sequence
from typing import Any

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

# -- the front of a verb ----------------------------------------------------------------------------------------------

class Verb:
    def __init__(self, function: Callable[..., Any], state: object, short_cut: str, takes_group: bool) -> None: ...
    def __call__(self, *args: Any, **keywords: Any) -> Any: ...

# -- shared memory: addresses of flat CPU buffers, element counts, codes of pycomm.types -------------------------------

SHM_MAX_RANKS: int

def shm_create_memory(ranks: int) -> int: ...
def shm_check_memory(fd: int, ranks: int) -> None: ...

class ShmBlock:
    def __buffer__(self, flags: int) -> memoryview: ...

class ShmHeaps:
    def __init__(self, fd: int, host_ranks: int, host_rank: int) -> None: ...
    def allocate(self, bytes: int) -> ShmBlock: ...

class ShmMessage:
    @property
    def peer(self) -> int: ...

class ShmGroup:
    def __init__(
        self,
        fd: int,
        host_ranks: int,
        area: int,
        rank: int,
        host_rank_of: Sequence[int],
        pidfds: Sequence[int],
        pids: Sequence[int],
        name: str,
        members: int,
        timeout_s: float,
        is_oversubscribed: bool,
        heaps: ShmHeaps,
    ) -> None: ...
    @property
    def line_ns(self) -> float: ...
    def short_cuts(self, tensor: type, parameter: type) -> dict[str, Callable[..., bool]]: ...
    def all_reduce(
        self, output: int, input: int, numel: int, dtype: int, op: int, factor: float, timeout_s: float
    ) -> None: ...
    def reduce(
        self, output: int, input: int, numel: int, dtype: int, op: int, factor: float, root: int, timeout_s: float
    ) -> None: ...
    def reduce_scatter(
        self, output: int, input: int, numel: int, dtype: int, op: int, factor: float, timeout_s: float
    ) -> None: ...
    def broadcast(self, data: int, numel: int, dtype: int, root: int, timeout_s: float) -> None: ...
    def all_gather(self, output: int, input: int, numel: int, dtype: int, timeout_s: float) -> None: ...
    def gather(self, output: int, input: int, numel: int, dtype: int, root: int, timeout_s: float) -> None: ...
    def scatter(self, output: int, input: int, numel: int, dtype: int, root: int, timeout_s: float) -> None: ...
    def all_to_all(
        self,
        output: int,
        input: int,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        dtype: int,
        timeout_s: float,
    ) -> None: ...
    def barrier(self, timeout_s: float) -> None: ...
    def send(self, data: int, bytes: int, peer: int, tag: int) -> ShmMessage: ...
    def receive(self, data: int, bytes: int, peer: int, tag: int) -> ShmMessage: ...
    def test(self, message: ShmMessage) -> bool: ...
    def wait(self, message: ShmMessage, timeout_s: float) -> None: ...
    def area_of_child(self, leader: int, key: int) -> int: ...
    def close(self) -> None: ...
