"""NCCL, over nccl4py: GPUs joined by PCIe, NVLink or a network. A torch NCCL group that exists is carried by ``torch``.

Everything is put on the current torch stream, in order with what the caller puts there; collectives return once they
are on the stream. With a CuPy stream as the current one (``on_stream``), CuPy's work is in that order too.

[Note: messages wait for their like]
A send of NCCL ends when the receiver takes it, and one stream runs one thing after the other: two ranks that each send
and then receive would wait for each other for ever. So isend and irecv only note the message; the first wait or test of
any of them puts all that were noted on the stream as one group, within which NCCL waits for nothing in particular.

[Note: a communicator that does not block]
No call of NCCL blocks here: communicators are non-blocking, and their state is polled until it is settled, at most for
the timeout. An error, or a timeout, aborts the communicator: NCCL has no other way to get its kernels off the GPU. What
it cannot tell: that ranks disagree about a size, which no message carries, and which rank was lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import CollectiveTimeoutError, ConfigError, PeerLostError, PycommError, TransportError
from ..types import ReduceOp
from ._nccl_library import IN_PROGRESS, REMOTE_ERROR, SUCCESS, Event, Library, import_nccl
from ._patience import Look, Patience
from .base import Request, Transport

if TYPE_CHECKING:
    from . import ConnectSpec

__all__ = ["NcclTransport", "connect", "on_stream"]

_MOVES = frozenset({"broadcast", "all_gather_single", "all_to_all_single", "gather", "scatter", "barrier"})
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter_single"})
# NCCL sums 16-bit floats in float32. Its MIN and MAX of floats may lose a NaN; it has no bitwise operators.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64})
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # summed as pairs of numbers
_OPERATORS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
}
_FLOAT_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG})
_INT_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG})

_POLL_S = 20e-6
_CLOSE_S = 5.0


class NcclTransport(Transport):
    """The ranks of one NCCL communicator, of which this object is the only user. See the notes on top of this file."""

    name: ClassVar[str] = "nccl"
    native = _MOVES | _REDUCTIONS
    devices = frozenset({"cuda"})

    def __init__(self, library: Library, communicator: Any, rank: int, world_size: int, timeout_s: float) -> None:
        """Takes a communicator whose making has been started; returns once it is joined."""
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._library = library
        self._communicator = communicator
        self._noted: list[_Message] = []
        self._failure = ""
        self._settle(f"joining {world_size} ranks", timeout_s)

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if verb not in _REDUCTIONS:
            return verb in _MOVES
        ops = _FLOAT_OPS if dtype in _FLOATS else _INT_OPS if dtype in _INTS else _SUMS if dtype in _COMPLEX else ()
        return op in ops

    # -- point to point -----------------------------------------------------------------------------------------------

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        return self._note(flat, peer, is_send=True)

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        if peer is None:
            raise ConfigError("transport 'nccl' cannot receive from any rank: NCCL has to know the sender; name it")
        return self._note(flat, peer, is_send=False)

    def flush(self) -> None:
        """Puts the messages noted so far on the stream, as one group."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        with self._calling(f"{len(noted)} messages", None) as communicator, self._library.group():
            for message in noted:
                call = communicator.send if message.is_send else communicator.recv
                if message.flat.numel():
                    call(_as_bytes(message.flat), message.source, stream=self._library.stream())
        event = self._library.mark()
        for message in noted:
            message.event = event

    def wait_for(self, event: Event, doing: str, timeout_s: float | None) -> None:
        """Blocks until ``event`` is done, watching the communicator. Raises its errors, and CollectiveTimeoutError."""
        self._poll(event.query, doing, self.timeout_s if timeout_s is None else timeout_s)

    def look(self, doing: str) -> None:
        """Raises what has gone wrong since the last call."""
        self._poll(lambda: True, doing, self.timeout_s)

    def _note(self, flat: torch.Tensor, peer: int, *, is_send: bool) -> _Message:
        self._check_open()
        message = _Message(self, flat, peer, is_send)
        self._noted.append(message)
        return message

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        if input.numel():
            with self._calling("all_reduce", timeout_s) as communicator:
                communicator.allreduce(_as_real(input), _as_real(output), self._op(op), stream=self._library.stream())
        self._divide(output, op)

    def reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, root: int, timeout_s: float | None
    ) -> None:
        if input.numel():
            with self._calling("reduce", timeout_s) as communicator:
                its_output = _as_real(output) if self.rank == root else None
                communicator.reduce(_as_real(input), its_output, self._op(op), root, stream=self._library.stream())
        if self.rank == root:
            self._divide(output, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        if input.numel():
            with self._calling("reduce_scatter_single", timeout_s) as communicator:
                buffers = _as_real(input), _as_real(output)
                communicator.reduce_scatter(*buffers, self._op(op), stream=self._library.stream())
        self._divide(output, op)

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float | None) -> None:
        if flat.numel():
            with self._calling("broadcast", timeout_s) as communicator:
                data = _as_bytes(flat)
                communicator.broadcast(data, data, root, stream=self._library.stream())

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        if input.numel():
            with self._calling("all_gather_single", timeout_s) as communicator:
                communicator.allgather(_as_bytes(input), _as_bytes(output), stream=self._library.stream())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        self._exchange(
            "all_to_all_single",
            torch.split(output, list(output_splits)),
            torch.split(input, list(input_splits)),
            timeout_s,
        )

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, timeout_s: float | None) -> None:
        nothing = input[:0]
        received = [nothing] * self.world_size if output is None else output.chunk(self.world_size) or [nothing]
        sent = [input if peer == root else nothing for peer in range(self.world_size)]
        self._exchange("gather", received, sent, timeout_s)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, timeout_s: float | None) -> None:
        nothing = output[:0]
        sent = [nothing] * self.world_size if input is None else input.chunk(self.world_size) or [nothing]
        received = [output if peer == root else nothing for peer in range(self.world_size)]
        self._exchange("scatter", received, sent, timeout_s)

    def barrier(self, timeout_s: float | None) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
        self.all_reduce(token, token, ReduceOp.MAX, 1.0, timeout_s)
        self.wait_for(self._library.mark(), "barrier", timeout_s)

    def _exchange(
        self, verb: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout_s: float | None
    ) -> None:
        """Sends ``inputs[r]`` to rank r and receives ``outputs[r]`` from it, for all r that have any."""
        stream = self._library.stream()
        with self._calling(verb, timeout_s) as communicator, self._library.group():
            for peer, flat in enumerate(outputs):
                if flat.numel():
                    communicator.recv(_as_bytes(flat), peer, stream=stream)
            for peer, flat in enumerate(inputs):
                if flat.numel():
                    communicator.send(_as_bytes(flat), peer, stream=stream)

    def _op(self, op: ReduceOp) -> Any:
        return self._library.operator(_OPERATORS[op])

    def _divide(self, output: torch.Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            output.div_(self.world_size)

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> NcclTransport | None:
        is_member = ranks is not None and self.rank in ranks
        rank = list(ranks).index(self.rank) if ranks is not None and is_member else 0
        with self._calling("split", None) as communicator:
            # Every rank has to call it. Groups are told apart by their first member.
            child = communicator.split(ranks[0] if ranks is not None and is_member else None, rank)
        if ranks is None or not is_member:
            return None
        return NcclTransport(self._library, child, rank, len(ranks), self.timeout_s)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        with contextlib.suppress(Exception):  # it may be broken in any way
            communicator.finalize()
            deadline = time.monotonic() + _CLOSE_S
            state = self._library.state(communicator)
            while state == IN_PROGRESS and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                state = self._library.state(communicator)
            if state == SUCCESS:
                communicator.destroy()
                return
        with contextlib.suppress(Exception):
            communicator.abort()

    # -- running ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self, doing: str, timeout_s: float | None) -> Iterator[Any]:
        """Runs one call of NCCL, after the messages that were noted before it, until the communicator is settled."""
        self.flush()
        self._check_open()
        try:
            yield self._communicator
        except (ConfigError, TransportError):
            raise
        except Exception as error:  # NCCLError, NcclInvalid: nccl4py has no base for them
            raise self._broken(TransportError(f"{doing} failed in NCCL: {error}")) from error
        self._settle(doing, self.timeout_s if timeout_s is None else timeout_s)

    def _settle(self, doing: str, limit_s: float) -> None:
        self._poll(lambda: True, doing, limit_s)

    def _poll(self, is_done: Callable[[], bool], doing: str, limit_s: float) -> None:
        """Waits until the communicator is settled and ``is_done``."""
        self._check_open()
        deadline = time.monotonic() + limit_s
        while True:
            state = self._library.state(self._communicator)
            if state not in (SUCCESS, IN_PROGRESS):
                said = self._library.explain(self._communicator)
                if state == REMOTE_ERROR:
                    raise self._broken(
                        PeerLostError(f"{doing} failed: NCCL lost another rank, and does not say which: {said}")
                    )
                raise self._broken(TransportError(f"{doing} failed in NCCL (code {state}): {said}"))
            if state == SUCCESS and is_done():
                return
            if time.monotonic() > deadline:
                raise self._broken(
                    CollectiveTimeoutError(
                        f"{doing} among {self.world_size} ranks did not finish within {limit_s:.3g} s; see whether "
                        f"every rank makes the same calls, or raise the timeout"
                    )
                )
            time.sleep(_POLL_S)

    def _broken(self, error: TransportError) -> TransportError:
        """Aborts the communicator, so that no kernel of it stays on the GPU; returns ``error``."""
        communicator, self._communicator = self._communicator, None
        self._failure = str(error)
        with contextlib.suppress(Exception):
            communicator.abort()
        return error

    def _check_open(self) -> None:
        if self._failure:
            raise TransportError(f"an earlier call broke this group, make a new one; it said: {self._failure}")
        if self._communicator is None:
            raise TransportError(f"rank {self.rank} used a group that it had closed; make a new group")


class _Message(Request):
    """A message that is noted, or on the stream once it has an event. It is done when the stream has come that far."""

    def __init__(self, transport: NcclTransport, flat: torch.Tensor, peer: int, is_send: bool) -> None:
        self.flat = flat
        self.source = peer
        self.is_send = is_send
        self.event: Event | None = None
        self._transport = transport
        self._doing = f"{'sending to' if is_send else 'receiving from'} rank {peer} {flat.nbytes} bytes"

    def test(self) -> bool:
        event = self._started()
        self._transport.look(self._doing)
        return event.query()

    def wait(self, timeout_s: float | None = None) -> None:
        self._transport.wait_for(self._started(), self._doing, timeout_s)

    def _started(self) -> Event:
        if self.event is None:
            self._transport.flush()
        if self.event is None:
            raise TransportError(f"{self._doing}: the group broke before the message was on its way; make a new group")
        return self.event


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    real = _COMPLEX.get(flat.dtype)
    return flat if real is None else flat.view(real)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes ``stream`` the current torch stream, so that collectives go there: a CuPy stream, or one of torch."""
    own = stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(int(stream.ptr))  # type: ignore[no-untyped-call]
    return torch.cuda.stream(own)


def connect(spec: ConnectSpec) -> NcclTransport:
    """Joins the ranks of ``spec``, each with the current CUDA device of torch, which no two may share.

    Raises NativeUnavailableError without nccl4py or a GPU.
    """
    return join(import_nccl(), spec)


def join(library: Library, spec: ConnectSpec) -> NcclTransport:
    """As ``connect``, over ``library``."""
    store: Any = spec.store
    if spec.rank == 0:
        store.set("unique_id", library.unique_id())
    try:
        Patience(spec.timeout_s, spec.look).wait(store, ["unique_id"])
    except PycommError:  # somebody is lost
        raise
    except RuntimeError as error:  # torch's DistStoreError
        raise CollectiveTimeoutError(
            f"rank {spec.rank} of {spec.world_size}: rank 0 did not start NCCL within {spec.timeout_s:.3g} s; see its "
            f"own error"
        ) from error
    communicator = library.connect(spec.world_size, spec.rank, store.get("unique_id"))
    return NcclTransport(library, communicator, spec.rank, spec.world_size, spec.timeout_s)
