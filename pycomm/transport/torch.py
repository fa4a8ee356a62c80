"""Any ``torch.distributed`` process group as a transport: gloo over TCP between hosts, NCCL on CUDA.

``connect`` makes a gloo group of its own; ``wrap`` takes one that the caller has. torch's default group is not touched.
Verbs that only move data are handed over as bytes, so that they carry every element type. Reductions are handed over
where the backend's result is the one that pycomm promises; for the rest ``supports`` says no and a plan is run.

[Note: what gloo does not reduce for us]
Measured with torch 2.13. gloo knows float16, bfloat16, float32, float64, int8, uint8, int32 and int64, no other type.
It rounds 16-bit sums after every addition, where pycomm accumulates in float32. Its MIN and MAX drop a NaN or keep it,
depending on which rank has it. It has no AVG and no PREMUL_SUM; an average is a sum that is divided here. Its ring
all_reduce reduces each element on one rank, so that all ranks get the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed

from ..errors import ConfigError, TransportError
from ..types import ReduceOp
from . import _wording as wording
from ._gloo_group import Failed, Meeting, come_together, connection_to, host_of, make_group
from ._gloo_sockets import NOT_CORKED
from ._patience import Look, Patience
from ._torch_exchange import PostedExchange
from ._torch_messages import FramedMessages, PlainMessages, timeout_of
from ._torch_waits import given_up
from ._watch import Watch, slices_s
from ._watched import WatchedTransport
from .base import FRAME_HEADER_BYTES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from . import ConnectSpec
    from ._tally import Message
    from .base import Exchange, ExchangeAmong, MeanwhileOnHost

__all__ = ["TorchTransport", "as_bytes", "connect", "wrap"]

dist: Any = torch.distributed  # its stubs lack some of the names below
c10d: Any = torch._C._distributed_c10d  # all of the option classes; torch.distributed has most of them

_MOVES = frozenset({"broadcast", "all_gather_single", "all_to_all_single", "gather", "scatter", "barrier"})
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter_single"})

_FLOATS = (torch.float32, torch.float64)
_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # summed as pairs of numbers
_FLOAT_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG})
_INT_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BIT_OPS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG})

_REDUCES: dict[str, dict[torch.dtype, frozenset[ReduceOp]]] = {
    "gloo": dict.fromkeys(_FLOATS, _FLOAT_OPS)
    | dict.fromkeys(_INTS, _INT_OPS | _BIT_OPS)
    | dict.fromkeys(_COMPLEX, _SUMS),
    # NCCL says that it sums 16-bit floats in float32. It has no bitwise operators.
    "nccl": dict.fromkeys((*_FLOATS, torch.float16, torch.bfloat16), _FLOAT_OPS)
    | dict.fromkeys(_INTS, _INT_OPS)
    | dict.fromkeys(_COMPLEX, _SUMS),
}
_REDUCES_ANYWHERE = dict.fromkeys((*_FLOATS, torch.int32, torch.int64), frozenset({ReduceOp.SUM}))

# Of ProcessGroup and Backend alike; the names with _base have newer ones, which torch 2.11 and 2.12 lack.
_METHODS = {
    "reduce": "reduce",
    "reduce_scatter_single": "_reduce_scatter_base",
    "broadcast": "broadcast",
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}

# What gloo and torch say. An earlier timeout ("pair closure") ends the connections as a death does.
_TIMEOUT_SIGNS = ("Timed out", "timed out", "imeout waiting")
_LOST_SIGNS = ("losed by peer", "onnection reset", "roken pipe", "not connected", "pair closure")

_MOST_FRAMED_BYTES = 256 << 10  # that a rank sends to all others together
_AMONG, _FRAMES = 1, 2  # the kinds of exchanges among some ranks, and of the frames that calls begin with


class TorchTransport(WatchedTransport):
    """The ranks of one torch process group, on the devices that it has a backend for.

    On CUDA a collective is complete as torch means it: for work that the current stream does next.
    """

    name: ClassVar[str] = "torch"
    native = _MOVES | _REDUCTIONS

    def __init__(
        self, group: Any, store: Store | None, timeout_s: float, host: str | None = None, watch: Watch | None = None
    ) -> None:
        """Joins the members of ``group``, a ProcessGroup or a Backend of torch.

        ``store`` is where groups made by ``split`` meet. ``host`` is the address that gloo binds to, None for torch's
        choice. ``watch`` sees the members' processes; a group without one is the caller's own, and stays as it is.
        """
        self.group = group
        self.rank = int(group.rank())
        self.world_size = int(group.size())
        self.timeout_s = timeout_s
        self.backends = _backends(group)
        self.devices = frozenset(self.backends)
        self._store = store
        self._connection: Store | None = None  # to it, for the groups made from this one
        self._host = host
        self._is_callers = watch is None
        self.watch = Watch.nobody(self.rank) if watch is None else watch
        self.is_gloo = self.exchanges_parts = self.backends.get("cpu") == "gloo"
        # One trip of what fits costs less than the ring of gloo's own all_reduce and a comparison before it. Beyond, it
        # costs more that each rank sends all it has to every other one.
        self.frame_bytes = max(1024, FRAME_HEADER_BYTES + _MOST_FRAMED_BYTES // max(1, self.world_size - 1) // 64 * 64)
        self.corked = NOT_CORKED  # holds back what goes to the other ranks
        self._swap: PostedExchange | None = None  # of the frames that calls begin with
        self._exchanges: list[PostedExchange] = []
        # Framed messages carry their size; elsewhere a message of another size is not noticed before it harms.
        self._messages: FramedMessages | PlainMessages = FramedMessages(self) if self.is_gloo else PlainMessages(self)

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if verb not in _REDUCTIONS:
            return verb in _MOVES
        backends = self.backends.values()
        return all(op in _REDUCES.get(each, _REDUCES_ANYWHERE).get(dtype, frozenset()) for each in backends)

    # -- agreement and failure ------------------------------------------------------------------------------------

    def can_agree(self, device_type: str) -> bool:
        return device_type == "cpu" and self.is_gloo  # NCCL's calls are queued: to compare them would wait for the GPU

    def exchange(self, frame: torch.Tensor, verb: str, timeout_s: float | None) -> torch.Tensor:
        if not self.is_gloo:
            return super().exchange(frame, verb, timeout_s)
        width, gathered = self.frame_bytes, frame.new_empty((self.world_size, frame.numel()))
        for part, into in zip(torch.split(frame, width), torch.split(gathered, width, dim=1)):  # as a rule one
            frames = self.exchange_frames(part, part.numel(), verb, timeout_s)
            torch.stack([each[: part.numel()] for each in frames], out=into)
        return gathered

    def exchange_frames(
        self,
        frame: torch.Tensor,
        nbytes: int,
        verb: str,
        timeout_s: float | None,
        meanwhile: MeanwhileOnHost | None = None,
    ) -> Sequence[torch.Tensor]:
        if self.world_size == 1:
            return [frame]
        if not self.is_gloo:
            return super().exchange_frames(frame, nbytes, verb, timeout_s)
        swap = self._swap
        if swap is None:
            swap = self._swap = self._post_exchange(range(self.world_size), self.frame_bytes, _FRAMES)
        return swap.swap_part(frame, nbytes, verb, timeout_s)

    def exchanger(self, nbytes: int) -> Exchange:
        return self._post_exchange(range(self.world_size), nbytes) if self.is_gloo else self.exchange

    def exchanger_among(self, ranks: Sequence[int], nbytes: int) -> ExchangeAmong:
        return self._post_exchange(ranks, nbytes, _AMONG) if self.is_gloo else super().exchanger_among(ranks, nbytes)

    def _post_exchange(self, ranks: Sequence[int], nbytes: int, kind: int = 0) -> PostedExchange:
        exchange = PostedExchange(self, ranks, nbytes, kind, is_ahead=not self._is_callers)
        self._exchanges.append(exchange)
        return exchange

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        if output is not input:
            output.copy_(input)
        self._all_reduce(output, op, "all_reduce", timeout_s)
        self._divide(output, op)

    def _all_reduce(self, flat: torch.Tensor, op: ReduceOp, verb: str, timeout_s: float | None) -> None:
        """torch's all_reduce of ``flat``, in place, for a call of ``verb``."""
        options = _options(c10d.AllreduceOptions(), reduceOp=_torch_op(op))
        self.run(verb, timeout_s, [_as_real(flat)], options, method="allreduce")

    def reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, root: int, timeout_s: float | None
    ) -> None:
        # torch works in place on every rank; away from the root that may not show.
        flat = output.copy_(input) if self.rank == root else input.clone()
        options = _options(c10d.ReduceOptions(), reduceOp=_torch_op(op), rootRank=root)
        self.run("reduce", timeout_s, [_as_real(flat)], options)
        if self.rank == root:
            self._divide(output, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        if self.backends.get(input.device.type) == "gloo":
            # torch's own is an all_reduce of a copy, too. But who waits for that waits to its end, however short the
            # slice that he asks for, and cannot look who lives.
            whole, numel = input.clone(), output.numel()
            self._all_reduce(whole, op, "reduce_scatter_single", timeout_s)
            output.copy_(whole[self.rank * numel : (self.rank + 1) * numel])
        else:
            options = _options(c10d.ReduceScatterOptions(), reduceOp=_torch_op(op))
            self.run("reduce_scatter_single", timeout_s, _as_real(output), _as_real(input), options)
        self._divide(output, op)

    def _divide(self, output: torch.Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            output.div_(self.world_size)

    # -- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float | None) -> None:
        options = _options(c10d.BroadcastOptions(), rootRank=root, rootTensor=0)
        self.run("broadcast", timeout_s, [as_bytes(flat)], options)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        self.run("all_gather_single", timeout_s, as_bytes(output), as_bytes(input), c10d.AllgatherOptions())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        width = input.itemsize
        splits = [width * split for split in output_splits], [width * split for split in input_splits]
        self.run("all_to_all_single", timeout_s, as_bytes(output), as_bytes(input), *splits, c10d.AllToAllOptions())

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, timeout_s: float | None) -> None:
        outputs = [] if output is None else [_parts(output, self.world_size)]
        self.run("gather", timeout_s, outputs, [as_bytes(input)], _options(c10d.GatherOptions(), rootRank=root))

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, timeout_s: float | None) -> None:
        inputs = [] if input is None else [_parts(input, self.world_size)]
        self.run("scatter", timeout_s, [as_bytes(output)], inputs, _options(c10d.ScatterOptions(), rootRank=root))

    def barrier(self, timeout_s: float | None) -> None:
        self.run("barrier", timeout_s, c10d.BarrierOptions())

    # -- lifetime -------------------------------------------------------------------------------------------------

    def check_can_make(self, ranks: Sequence[int]) -> None:
        if self._store is None or set(self.backends.values()) != {"gloo"}:
            kinds = ", ".join(sorted(self.backends.values()))
            raise ConfigError(
                f"cannot split a torch process group of {kinds}: expected gloo, "
                f"in a group that torch.distributed made; pass the result of torch.distributed.new_group({list(ranks)})"
            )

    def make_group(self, ranks: Sequence[int], key: int, with_all: bool, look: Look | None) -> TorchTransport:
        assert self._store is not None, "it is whole"
        names = "-".join(str(rank) for rank in ranks)
        name = f"split{key}/{names}"
        rank = list(ranks).index(self.rank)
        store, watch = dist.PrefixStore(name, self._store), self.watch.split(ranks, rank, name)
        patience = Patience(self.timeout_s)
        connection, self._connection = self._connection or connection_to(self._store), None
        look = self.look_at_members(ranks, watch, with_all, look)
        meeting = Meeting(
            store, dist.PrefixStore(name, connection), rank, len(ranks), patience.looking(look), self._host
        )
        with self.telling(ranks, watch):
            if not come_together(meeting):
                raise wording.timed_out(self.place("new_group"), patience.timeout_s, is_broken=False)
            made = _join(meeting._replace(patience=patience), watch, partial(self.failed_member, ranks))
        self._connection = connection
        return made

    def close(self) -> None:
        if self.group is not None:
            self.watch.close(self.calls)
            if not self._is_callers:
                given_up.end(self.group)
        for exchange in self._exchanges:
            exchange.close()
        self.group = None  # a gloo group of our own ends with its last reference

    # -- running --------------------------------------------------------------------------------------------------

    def open_group(self, doing: str = "a call") -> Any:
        """Returns torch's group. Raises TransportError after ``close``, and what broke the group if it is broken."""
        if self.group is None:
            raise wording.used_closed(self.place(doing))
        self.check_whole(doing)
        return self.group

    def error_of(self, error: Exception, doing: str, limit_s: float, peer: int = -1) -> TransportError:
        """Returns the pycomm error for torch's, a RuntimeError whatever it was, while ``doing`` something."""
        text = str(error).partition("\n")[0]
        place = self.place(doing)
        if self.watch.failure is None and any(sign in text for sign in _TIMEOUT_SIGNS):
            self.watch.announce("timeout", self.rank, self.calls)
            return wording.timed_out(place, limit_s)
        if self.watch.failure is not None or any(sign in text for sign in _LOST_SIGNS):
            return self.failed(doing, self.watch.explain(self.calls, peer))
        return TransportError(f"{place}: failed in torch.distributed: {text}; the group is broken, make a new one")

    def run(self, verb: str, timeout_s: float | None, *arguments: Any, method: str | None = None) -> None:
        """Runs one collective of torch's to its end, by ``method`` if that is not the one of ``verb``. Its options are
        the last of the arguments.
        """
        start = getattr(self.open_group(), method or _METHODS[verb])
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        arguments[-1].timeout = timeout_of(limit_s)
        try:
            work = start(*arguments)
            if not self.is_gloo:
                work.wait()
                return
        except (RuntimeError, ValueError) as error:
            raise self.error_of(error, verb, limit_s) from error
        self.await_work(work, verb, limit_s)

    def await_work(self, work: Any, doing: str, limit_s: float) -> None:
        """Waits for a collective of gloo's."""
        group = self.group  # which a signal handler may close
        try:
            self.wait_in_slices(partial(self._has_ended, work, doing, limit_s), doing, limit_s)
        except BaseException:
            given_up.keep(work, group)
            raise

    def _has_ended(self, work: Any, doing: str, limit_s: float, slice_s: float) -> bool:
        had_ended = work.is_completed()
        if slice_s <= 0 and not had_ended:
            return False
        try:
            work.wait(timeout_of(slice_s))
        except RuntimeError as error:  # the end of the slice, or of the call: then the next wait raises it again
            if had_ended:
                raise self.error_of(error, doing, limit_s) from error
            return False
        return True

    def wait_in_slices(
        self, has_come: Callable[[float], bool], doing: str, limit_s: float, message: Message | None = None
    ) -> None:
        """Waits in slices: between them Python handles signals, and this rank looks who lives.

        ``has_come(slice_s)`` waits that long at most, 0.0 for not at all; no closure, as errors would keep it with all
        that it holds. ``message`` is what this rank waits for, None in a collective, which breaks the group when its
        time is over.
        """
        deadline, slices = time.monotonic() + limit_s, slices_s()
        if has_come(max(0.0, min(limit_s, next(slices)))):
            return
        self.watch.start_wait()
        while True:
            self.check(doing, message, partial(has_come, 0.0))
            left_s = deadline - time.monotonic()
            if has_come(max(0.0, min(left_s, next(slices)))):
                return
            if left_s <= 0:
                if message is None:
                    self.watch.announce("timeout", self.rank, self.calls)
                raise wording.timed_out(self.place(doing), limit_s, is_broken=message is None)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a flat tensor, the same memory, as uint8 ``(nbytes,)``."""
    return flat.view(torch.uint8)


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    real = _COMPLEX.get(flat.dtype)
    return flat if real is None else flat.view(real)


def _torch_op(op: ReduceOp) -> Any:
    return getattr(dist.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)


def _parts(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Returns the bytes of ``flat`` in ``world_size`` equal parts, which share its memory."""
    width = flat.numel() // world_size
    return [as_bytes(flat[rank * width : (rank + 1) * width]) for rank in range(world_size)]


def _options(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _backends(group: Any) -> dict[str, str]:
    """Returns the backend of each device type that ``group`` serves, such as {"cpu": "gloo"}."""
    if not hasattr(group, "_get_backend"):  # a bare Backend
        return {"cuda" if group.name() == "nccl" else "cpu": str(group.name())}
    found = {}
    for device in ("cpu", "cuda"):
        try:
            name = str(group._get_backend(torch.device(device)).name())
        except RuntimeError:  # no backend for this device
            continue
        if device == "cpu" or name == "nccl":  # gloo and MPI reduce CUDA tensors with gaps; pycomm stages them itself
            found[device] = name
    if not found:
        raise ConfigError(f"torch process group {group.name()!r}: expected a backend for CPU, or NCCL; found none")
    return found


def wrap(group: torch.distributed.ProcessGroup, timeout_s: float = 600.0) -> TorchTransport:
    """Returns a transport over a process group that the caller made and keeps."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    try:
        store = _get_process_group_store(group)
    except KeyError:  # not made by torch.distributed's own functions; only split needs the store
        store = None
    return TorchTransport(group, store, timeout_s)


def connect(spec: ConnectSpec) -> TorchTransport:
    """Joins the ranks by a gloo group of their own that meets in ``spec.store``."""
    patience = Patience(spec.timeout_s, spec.look)
    connection = connection_to(spec.store)
    meeting = Meeting(spec.store, connection, spec.rank, spec.world_size, patience, host_of(spec))
    watch = Watch.connect(spec.store, spec.rank, spec.world_size, patience)
    return _join(meeting, watch, partial(wording.failed, f"init on rank {spec.rank} of {spec.world_size}"))


def _join(meeting: Meeting, watch: Watch, failed: Failed) -> TorchTransport:
    group, corked = make_group(meeting, watch, failed)
    transport = TorchTransport(group, meeting.store, meeting.patience.timeout_s, meeting.host, watch)
    transport.corked = corked
    return transport
