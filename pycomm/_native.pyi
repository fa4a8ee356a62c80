"""The native core (csrc/), by pybind11."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
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
def reduce_kernels() -> int: ...
def cpu_isa() -> str: ...
def _reduce_isa(name: str | None) -> bool: ...

# -- codecs: addresses (0: none), element counts, the codes of pycomm.ops._formats -------------------------------------

def use_parallel_for(address: int | None) -> None: ...
def quantize(
    payload: int,
    payload_bytes: int,
    flat: int,
    numel: int,
    format: int,
    block_numel: int,
    is_stochastic: bool,
    seed: int,
    offset: int,
    residual: int,
    stream: int | None,
) -> None: ...
def dequantize(
    flat: int,
    numel: int,
    payload: int,
    payload_bytes: int,
    format: int,
    block_numel: int,
    factor: float,
    is_added: bool,
    is_part: bool,
    stream: int | None,
) -> None: ...
def topk_workspace_bytes(numel: int, k: int) -> int: ...
def topk(
    indices: int,
    values: int,
    k: int,
    flat: int,
    numel: int,
    residual: int,
    workspace: int,
    workspace_bytes: int,
    guess: int,
    accepted: int,
) -> tuple[int, int, bool]: ...
def scatter_add(flat: int, numel: int, indices: int, values: int, count: int, factor: float) -> int: ...

# Those for CUDA are missing from a build without it.
def topk_cuda(
    indices: int,
    values: int,
    k: int,
    flat: int,
    numel: int,
    residual: int,
    workspace: int,
    workspace_bytes: int,
    report: int,
    is_reusing: bool,
    accepted: int,
    stream: int,
) -> None: ...
def scatter_add_cuda(
    flat: int, numel: int, indices: int, values: int, count: int, factor: float, flag: int, stream: int
) -> None: ...

class CodecCuts:
    def __init__(self, tensor: type, parameter: type) -> None: ...
    def quantize(
        self,
        payload: object,
        flat: object,
        residual: object,
        format: int,
        block_numel: object,
        is_stochastic: bool,
        seed: object,
        offset: object,
    ) -> bool: ...
    def dequantize(
        self,
        flat: object,
        payload: object,
        format: int,
        block_numel: object,
        factor: float,
        is_added: bool,
        is_part: bool,
    ) -> bool: ...

class Packer:
    def __init__(self, tensor: type, parameter: type) -> None: ...
    def pack(self, bucket: object, tensors: Sequence[object], scale: float, stream: int | None) -> int: ...
    def unpack(self, bucket: object, tensors: Sequence[object], scale: float, stream: int | None) -> int: ...

# -- the front of a verb ----------------------------------------------------------------------------------------------

class Verb:
    def __init__(
        self,
        function: Callable[..., Any],
        state: object,
        short_cut: str,
        rank_place: int,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        handle: object,
        start: str | None,
    ) -> None: ...
    def __call__(self, *args: Any, **keywords: Any) -> Any: ...

def know_torch_operators(operators: tuple[object, ...]) -> None: ...

# -- the short cut of transports that compare by frames ---------------------------------------------------------------

class FrameCall:
    def __init__(self, tensor: type, parameter: type, frame: int, verb: int) -> None: ...
    @property
    def can_read(self) -> bool: ...
    def name(self, framed: str, other: str) -> None: ...
    def record_on(self, log: BoardLog, framed: int, other: int) -> None: ...
    def read(self, tensor: object, op: object, /) -> int: ...
    def begin(self, is_framed: bool, seq: int, /) -> int: ...
    def look_at(self, frames: Sequence[int]) -> None: ...
    def agrees(self) -> bool: ...
    def reduce(self) -> None: ...
    def end(self, has_failed: bool, /) -> None: ...

# -- waits inside torch ------------------------------------------------------------------------------------------------

class GlooMessage:
    @staticmethod
    def of(work: object) -> GlooMessage | None: ...
    def wait(self, timeout: timedelta, slice_s: float) -> bool: ...
    @property
    def is_complete(self) -> bool: ...

# -- shared memory: addresses of flat CPU buffers, element counts, codes of pycomm.types -------------------------------

SHM_MAX_RANKS: int
SHM_LAST_TAG: int

def shm_create_memory(ranks: int) -> int: ...
def shm_check_memory(fd: int, ranks: int) -> None: ...
def look_at_process(pid: int) -> tuple[str, int]: ...
def is_dead(pidfd: int, pid: int) -> bool: ...
def exit_status(pidfd: int, pid: int) -> int: ...

class ShmBlock:
    def __buffer__(self, flags: int) -> memoryview: ...

class ShmHeaps:
    def __init__(self, fd: int, host_ranks: int, host_rank: int) -> None: ...
    def allocate(self, bytes: int) -> ShmBlock: ...

class ShmHandle:
    _value: Any
    _group: Any
    _verb: str
    _error: BaseException | None
    _future: Future[Any] | None
    _is_done: bool
    _is_asked: bool
    @property
    def source(self) -> int: ...
    def is_completed(self) -> bool: ...
    def test(self) -> bool: ...
    def wait(self, timeout: float | timedelta | None = None) -> bool: ...
    def settle(self, timeout: float | timedelta | None = None) -> bool: ...

def batch_kinds(handle: type, message: type, isend: object, irecv: object) -> object: ...

class BoardLog:
    def begin(
        self,
        verb: int,
        op: int,
        dtype: int,
        algorithm: int,
        is_plan: bool,
        root: int,
        numel: int,
        bytes: int,
        seq: int,
        /,
    ) -> bool: ...
    def end(self, wire_bytes: int, has_failed: bool, /) -> None: ...
    def waits_for(self, peer: int) -> None: ...
    def close(self) -> None: ...

class Board:
    def __init__(self) -> None: ...
    @property
    def fd(self) -> int: ...
    def set_job(self, job: int, rank: int, world_size: int) -> None: ...
    def add_group(self, name: str, transport: str, members: int, rank: int, world_size: int) -> BoardLog | None: ...
    def intern(self, algorithm: str) -> int: ...
    def set_verdict(self, text: str) -> None: ...
    def await_question(self, timeout_s: float) -> bool: ...
    def answer(self, text: str) -> None: ...

def board_layout() -> dict[str, int]: ...
def board_ticks(has_tsc: bool) -> int: ...
def ask_board(fd: int, timeout_s: float) -> bool: ...

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
        ranks_per_core: int,
        heaps: ShmHeaps,
        look: Callable[[], None] | None,
    ) -> None: ...
    @property
    def line_ns(self) -> float: ...
    def short_cuts(self, tensor: type, parameter: type) -> dict[str, Callable[..., Any]]: ...
    def all_reduce(
        self, output: int, input: int, numel: int, dtype: int, op: int, factor: float, timeout_s: float
    ) -> None: ...
    def reduce(
        self, output: int, input: int, numel: int, dtype: int, op: int, factor: float, root: int, timeout_s: float
    ) -> None: ...
    def reduce_scatter(
        self, output: int, input: int, numel: int, row: int, dtype: int, op: int, factor: float, timeout_s: float
    ) -> None: ...
    def broadcast(self, data: int, numel: int, dtype: int, root: int, timeout_s: float) -> None: ...
    def all_gather(self, output: int, input: int, numel: int, row: int, dtype: int, timeout_s: float) -> None: ...
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
    def drain(self, timeout_s: float) -> bool: ...
    def start_message(self, is_send: bool, data: int, bytes: int, peer: int, tag: int, tensor: object) -> ShmHandle: ...
    def agree(
        self,
        output: int,
        input: int,
        bytes: int,
        verb: int,
        op: int,
        dtype: int,
        root: int,
        numel: int,
        timeout_s: float,
    ) -> None: ...
    def abandon(self) -> None: ...
    def check_lost(self, doing: str) -> None: ...
    def record_on(self, log: BoardLog | None) -> None: ...
    def set_name(self, name: str) -> None: ...
    def look_elsewhere_by(self, look: Callable[[], None]) -> None: ...
    @property
    def is_broken(self) -> bool: ...
    def set_timeout(self, timeout_s: float) -> None: ...
    def area_of_child(self, leader: int, key: int, look: Callable[[], None] | None) -> int: ...
    def close(self) -> None: ...

# -- streams -----------------------------------------------------------------------------------------------------------

STREAM_FRAME_BYTES: int
STREAM_GRANT_S: float

class StreamProgress:
    def __init__(self, ranks: int, segment_bytes: int) -> None: ...
    def submit(self, priority: int, digest: int, segments: int, segment_bytes: int, /) -> int: ...
    def submit_all_reduce(
        self,
        priority: int,
        digest: int,
        segment_numel: int,
        group: ShmGroup,
        data: int,
        numel: int,
        dtype: int,
        op: int,
        factor: float,
        timeout_s: float,
        /,
    ) -> int: ...
    def run(
        self,
        group: ShmGroup | None,
        exchange: Callable[[bytes], object] | None,
        refuse: Callable[[int], None],
        move: Callable[[int, int], None],
        collect: Callable[[], None] | None,
        end_grant: Callable[[], None] | None,
        /,
    ) -> None: ...
    def ended(self, number: int, start_ns: int, /) -> None: ...
    def collect(self) -> list[tuple[int, BaseException | None]]: ...
    def await_ended(self) -> list[tuple[int, BaseException | None]]: ...
    def take_moved(self) -> tuple[float, int]: ...
    def close(self) -> None: ...

class StreamScheduler:
    def __init__(self) -> None: ...
    def add(self, priority: int, segments: int, segment_bytes: int) -> int: ...
    def grant(self, agreed: int, bytes_per_s: float, /) -> list[tuple[int, int]]: ...
    @property
    def has_work(self) -> bool: ...

class StreamAgreement:
    def __init__(self) -> None: ...
    def add(self, digest: int) -> None: ...
    def frame(self, bytes_per_s: float, /) -> bytes: ...
    def agree(self, frames: Sequence[bytes], /) -> tuple[int, float, list[int]]: ...
