"""MPI as a transport, through mpi4py: for clusters whose fast network speaks it.

[Note: waiting for MPI]
Nothing here blocks inside MPI. Every call is the nonblocking one, followed by a loop of Test that spins, then yields
(with more ranks than cores, others have to run for this to end), then sleeps. So timeouts and Ctrl-C work. A receive is
not posted but looked for by a matched probe: then its size is known before a byte is written. Every wait, whatever for,
looks for all the receives that are due, so two ranks that each send before they receive do not wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import ConfigError, TransportError
from ..types import ReduceOp
from . import _mpi_memory as memory
from . import _wording as wording
from ._mpi_frames import FrameSwap, FrameSwaps, frame_bytes_for
from ._mpi_library import import_mpi, is_cuda_aware, leave_unfinalized
from ._mpi_messages import MpiMessages
from ._patience import Look, Patience
from ._tally import Message
from ._watch import SLICE_S, Watch
from ._watched import Lateness, WatchedTransport

if TYPE_CHECKING:
    from . import ConnectSpec
    from .base import MeanwhileOnHost

__all__ = ["MpiTransport", "connect"]

_MOVES = frozenset({"broadcast", "all_gather_single", "all_to_all_single", "gather", "scatter", "barrier"})
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter_single"})

_TESTS = 10  # of one request in a row: MPI moves the data in them, and to look for everything else takes as long as ten
_SPIN_S = 20e-6
_YIELD_S = 5e-3
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


class MpiTransport(WatchedTransport):
    """The ranks of one MPI communicator, of which this object is the only user. See the contract in ``base.py``."""

    name: ClassVar[str] = "mpi"
    native = _MOVES | _REDUCTIONS
    segment_bytes = 2 << 20  # every message is probed for; docs/tuning.md has figures

    def __init__(self, communicator: Any, timeout_s: float, watch: Watch) -> None:
        """Takes ``communicator``, which mpi4py has made for it, and frees it in ``close``. ``watch`` sees its ranks."""
        self.mpi = import_mpi()
        self.communicator = communicator
        self.rank = int(communicator.Get_rank())
        self.world_size = int(communicator.Get_size())
        self.timeout_s = timeout_s
        self.devices = frozenset({"cpu", "cuda"}) if is_cuda_aware() else frozenset({"cpu"})
        self.lock = _lock_for(self.mpi)
        self.largest_tag = int(self.mpi.COMM_WORLD.Get_attr(self.mpi.TAG_UB))  # Open MPI knows it there alone
        self.watch = watch
        self._messages: MpiMessages = MpiMessages(self)
        self._under_way: dict[int, object] = {}  # by id: what MPI has and has not completed. It may touch its memory
        self.frame_bytes = frame_bytes_for(self.world_size)
        self._lateness = Lateness()  # of swaps of frames
        self._swaps: FrameSwaps | None = None

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return memory.is_reducible(dtype, op) if verb in _REDUCTIONS else verb in _MOVES

    # -- agreement and failure ------------------------------------------------------------------------------------

    def can_agree(self, device_type: str) -> bool:
        return True  # frames are in host memory, whatever the call is about

    def exchange(self, frame: torch.Tensor, verb: str, timeout_s: float | None) -> torch.Tensor:
        frames = torch.empty((self.world_size, frame.numel()), dtype=torch.uint8, device="cpu")
        buffers = memory.as_bytes(frame), memory.as_bytes(frames, self.world_size)
        self._run(verb, timeout_s, "Iallgather", buffers, frame, frames)
        return frames

    def exchange_frames(
        self,
        frame: torch.Tensor,
        nbytes: int,
        verb: str,
        timeout_s: float | None,
        meanwhile: MeanwhileOnHost | None = None,
    ) -> Sequence[torch.Tensor]:
        self.open_communicator()
        swaps = self._swaps
        if swaps is None or swaps.frame is not frame:  # a group's calls have the same one
            if swaps is not None:
                swaps.free()
            swaps = self._swaps = FrameSwaps(self, frame)
        is_late = self._lateness.begin(self.timeout_s if timeout_s is None else timeout_s)
        frames = swaps.run(nbytes, verb, timeout_s, self._swap)
        if is_late:
            self.check_given_up(verb)
        return frames

    def _swap(self, swap: FrameSwap, verb: str, timeout_s: float | None) -> None:
        try:
            with self.lock:
                request = swap.start()
                if _has_ended(request):
                    return
            self.wait_until(lambda: self.poll(request, verb), timeout_s, verb)
        except self.mpi.Exception as error:
            raise self.error_of(error, verb) from error
        except BaseException:  # also Ctrl-C: MPI goes on with the call
            self.keep(swap)
            raise

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        output.copy_(input)  # nothing happens if they are the same
        for piece in memory.pieces(output):
            arguments = self.mpi.IN_PLACE, memory.typed(piece), memory.operator(op)
            self._run("all_reduce", timeout_s, "Iallreduce", arguments, piece)
        self._divide(output, op)

    def reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, root: int, timeout_s: float | None
    ) -> None:
        is_root = self.rank == root
        for piece in memory.pieces(output.copy_(input) if is_root else input):
            typed = memory.typed(piece)
            buffers = (self.mpi.IN_PLACE, typed) if is_root else (typed, None)
            self._run("reduce", timeout_s, "Ireduce", (*buffers, memory.operator(op), root), piece)
        if is_root:
            self._divide(output, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        if input.numel() > memory.LARGEST_COUNT:
            for root, part in enumerate(memory.cut(input, [output.numel()] * self.world_size)):
                self.reduce(output, part, op, factor, root, timeout_s)
            return
        input = memory.apart(input, output)
        arguments = memory.typed(input, self.world_size), memory.typed(output), memory.operator(op)
        self._run("reduce_scatter_single", timeout_s, "Ireduce_scatter_block", arguments, input, output)
        self._divide(output, op)

    def _divide(self, output: torch.Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            output.div_(self.world_size)

    # -- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float | None) -> None:
        self._run("broadcast", timeout_s, "Ibcast", (memory.as_bytes(flat), root), flat)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        input = memory.apart(input, output)
        buffers = memory.as_bytes(input), memory.as_bytes(output, self.world_size)
        self._run("all_gather_single", timeout_s, "Iallgather", buffers, input, output)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        input = memory.apart(input, output)
        if max(input.nbytes, output.nbytes) > memory.LARGEST_COUNT:  # a displacement has to be a C int as well
            self._messages.exchange(memory.cut(output, output_splits), memory.cut(input, input_splits), timeout_s)
            return
        arguments = memory.as_parts(input, input_splits), memory.as_parts(output, output_splits)
        self._run("all_to_all_single", timeout_s, "Ialltoallv", arguments, input, output)

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, timeout_s: float | None) -> None:
        received = None if output is None else memory.as_bytes(output, self.world_size)
        input = input if output is None else memory.apart(input, output)
        self._run("gather", timeout_s, "Igather", (memory.as_bytes(input), received, root), input, output)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, timeout_s: float | None) -> None:
        input = None if input is None else memory.apart(input, output)
        sent = None if input is None else memory.as_bytes(input, self.world_size)
        self._run("scatter", timeout_s, "Iscatter", (sent, memory.as_bytes(output), root), input, output)

    def barrier(self, timeout_s: float | None) -> None:
        self._run("barrier", timeout_s, "Ibarrier", ())

    # -- lifetime -------------------------------------------------------------------------------------------------

    def check_can_make(self, ranks: Sequence[int]) -> None:
        self.open_communicator()

    def make_group(self, ranks: Sequence[int], key: int, with_all: bool, look: Look | None) -> MpiTransport:
        comm = self.open_communicator()
        rank = list(ranks).index(self.rank)
        watch = self.watch.split(ranks, rank, f"split{key}/{list(ranks)}")
        # MPI has no way to make a communicator without blocking. Once all members are here it does not block for long.
        with self.telling(ranks, watch):
            self._messages.meet(ranks, key, self.look_at_members(ranks, watch, with_all, look))
            try:
                members = comm.Get_group().Incl(list(ranks))
                child = comm.Create_group(members, key % (self.largest_tag + 1))
            except self.mpi.Exception as error:
                raise self.error_of(error, f"making a communicator of ranks {list(ranks)}") from error
        return MpiTransport(child, self.timeout_s, watch)

    def close(self) -> None:
        communicator, self.communicator = self.communicator, None
        swaps, self._swaps = self._swaps, None  # which have this object
        if communicator is None:
            return
        self.watch.close(self.calls)
        if self._under_way:
            _never_completed.extend(self._under_way.values())
            return
        if self.is_broken or self.mpi.Is_finalized():
            return
        # Collective by the letter of MPI, which adds that it "is anticipated" to be local; MPICH and Open MPI do it so.
        with contextlib.suppress(self.mpi.Exception):
            if swaps is not None:
                swaps.free()
            communicator.Free()

    # -- running: also for _mpi_messages ------------------------------------------------------------------------------

    def open_communicator(self) -> Any:
        """Returns mpi4py's communicator. Raises TransportError after ``close``."""
        if self.communicator is None:
            raise wording.used_closed(self.place("a call"))
        return self.communicator

    def progress(self) -> None:
        """Receives the messages that have come and are asked for."""
        self._messages.progress()

    def keep(self, thing: object) -> None:
        """Keeps what MPI works on, until it is complete: ``forget``."""
        self._under_way[id(thing)] = thing

    def forget(self, thing: object) -> None:
        """Lets go of what is complete."""
        self._under_way.pop(id(thing), None)

    def poll(self, request: Any, doing: str) -> bool:
        """Says whether MPI's ``request`` is complete."""
        try:
            with self.lock:
                return _has_ended(request)
        except self.mpi.Exception as error:
            raise self.error_of(error, doing) from error

    def wait_until(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        doing: str,
        message: Message | None = None,
        look: Look | None = None,
    ) -> None:
        """Polls ``is_done`` and the receives that are due; see [Note: waiting for MPI].

        ``message`` is what it waits for, its peer -1 for one from anyone; None in a collective. ``look`` looks around
        where a group is made, which leaves this one whole.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        next_look_s = SLICE_S
        while not is_done():
            self.progress()
            waited_s = time.monotonic() - start
            if waited_s > next_look_s:
                if next_look_s == SLICE_S:
                    self.watch.start_wait()
                next_look_s = waited_s + SLICE_S
                if look is None:
                    self.check(doing, message, is_done)
                else:
                    look()
            if waited_s > limit_s:
                breaks = message is None and look is None
                if breaks:
                    self.watch.announce("timeout", self.rank, self.calls)
                raise wording.timed_out(self.place(doing), limit_s, is_broken=breaks)
            _idle(waited_s)

    def failed(self, doing: str, failure: wording.Failure) -> TransportError:
        if failure.kind == "lost":
            leave_unfinalized()
        return super().failed(doing, failure)

    def error_of(self, error: Any, doing: str) -> TransportError:
        """Returns the pycomm error for an mpi4py exception raised while ``doing`` something.

        Of a rank that died MPICH says many things ("process_vm_readv failed"), so who lives is asked first.
        """
        failure = self.watch.search(self.calls)
        if failure is None:
            text = " ".join(str(error).split())
            return TransportError(f"{self.place(doing)}: failed in MPI: {text}; the group is broken, make a new one")
        return self.failed(doing, failure)

    def _run(
        self, verb: str, timeout_s: float | None, method: str, arguments: tuple[Any, ...], *alive: torch.Tensor | None
    ) -> None:
        """Starts the nonblocking collective ``method`` of MPI and waits for it. ``alive`` is its memory."""
        self.check_whole(verb)
        start = getattr(self.open_communicator(), method)
        try:
            with self.lock:
                request = start(*arguments)
                if _has_ended(request):
                    return
        except self.mpi.Exception as error:
            raise self.error_of(error, verb) from error
        try:
            self.wait_until(lambda: self.poll(request, verb), timeout_s, verb)
        except BaseException:  # also Ctrl-C: MPI goes on with the call
            self.keep((request, arguments, alive))
            raise


def _has_ended(request: Any) -> bool:
    """Says whether MPI's ``request`` is complete, having moved it forward."""
    test = request.Test
    for _ in range(_TESTS):
        if test():
            return True
    return False


def _idle(waited_s: float) -> None:
    """Gives the core away, the longer the more."""
    if waited_s > _YIELD_S:
        time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, waited_s / 100)))
    elif waited_s > _SPIN_S:
        os.sched_yield()


_one_at_a_time = threading.RLock()
_never_completed: list[object] = []  # of groups that were closed: MPI has no way to take back what it was given


def _lock_for(mpi: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns what calls of several threads have to hold. Raises ConfigError if MPI forbids threads altogether."""
    level = mpi.Query_thread()
    if level >= mpi.THREAD_MULTIPLE:
        return contextlib.nullcontext()
    if level == mpi.THREAD_SERIALIZED:
        return _one_at_a_time
    raise ConfigError(
        f"MPI was initialized for one thread only (level {level}); pycomm's asynchronous calls use another: expected "
        f"THREAD_SERIALIZED or THREAD_MULTIPLE; initialize MPI so, or leave it to mpi4py"
    )


def connect(spec: ConnectSpec) -> MpiTransport:
    """Joins the ranks by a communicator of their own made from MPI_COMM_WORLD, which has to consist of just them.

    Raises NativeUnavailableError without mpi4py, ConfigError if no MPI launcher started these ranks.
    """
    mpi = import_mpi()
    world = mpi.COMM_WORLD
    if world.Get_size() != spec.world_size:
        raise ConfigError(
            f"transport 'mpi' on rank {spec.rank}: expected an MPI world of {spec.world_size} ranks, got "
            f"{world.Get_size()} from {mpi.Get_library_version().splitlines()[0]}; start the job with that library's "
            f"own mpirun (mpirun -n {spec.world_size} python ...), or use transport 'torch'"
        )
    # Its own context, so that pycomm's messages never meet the program's. Blocks only until the others are here too,
    # and they are on their way: init has just exchanged their host ids.
    watch = Watch.connect(spec.store, spec.rank, spec.world_size, Patience(spec.timeout_s, spec.look))
    return MpiTransport(world.Split(0, spec.rank), spec.timeout_s, watch)
