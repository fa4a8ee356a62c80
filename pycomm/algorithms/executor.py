"""Runs one collective on one rank: whole, if the transport carries it natively, else any plan on any transport.

[Note: how a plan reduces]
Each ``Reduce`` of a plan is one call of the native kernel (``ops/reduce``): it adds its inputs in the plan's order, 16-
and 8-bit floats in float32, and rounds once. A sum that goes on to another rank goes in the element's own type. So
`direct`, which adds all contributions at once, rounds once; a ring of n ranks rounds n - 1 times.
PREMUL_SUM scales a rank's own contribution, and rounds it, before it goes anywhere. AVG adds and then divides, alike on
every rank; 16- and 8-bit floats are divided first, as PREMUL_SUM does it, so that their sum does not overflow.

[Note: turns]
Up to ``TURNS`` instances of a plan (schedule.py says what that is) are under way: s, s + 1, ... The rank waits for one
round at a time, adds, posts the next round of that instance, and takes the one that comes next in an order that is the
same on all ranks: instances 0 to TURNS - 1 go round by round, in turns, then the TURNS after them. So there is no
deadlock: take the first round, in that order, that any rank waits for. Both ends of a message are in the same round;
whoever has to send there has waited for earlier rounds only, and so has posted it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops.reduce import reduce_
from ..topology import Topology
from ..transport._wording import Remembered
from ..transport.base import ANNOUNCEMENT_TAG
from ..types import ReduceOp
from . import find_algorithm
from .plan import Plan, Space
from .schedule import Cut, Schedule, Step, compile_plan, cut_evenly, largest_chunk

if TYPE_CHECKING:
    from ..transport.base import Request, Transport

__all__ = ["FIRST_TAG", "TURNS", "Collective", "Executor", "meet"]

TURNS = 4
FIRST_TAG = ANNOUNCEMENT_TAG + 1  # of a turn each; base.py says who has which tags
_CACHED_SCHEDULES = 128
_WHOLE = frozenset({"all_reduce", "reduce", "broadcast"})  # every rank has all the data


class Collective(NamedTuple):
    """The arguments of one collective on one rank, all tensors flat: what the transports and the plans work on.

    ``input`` or ``output`` is None where this rank has none. For all_reduce, and for reduce on its root, the two may be
    the same tensor; for broadcast both are. The splits are those of all_to_all_single, in elements.
    """

    verb: str
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    op: ReduceOp | None = None
    factor: float = 1.0
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The element type; uint8 for a barrier, which has no tensor."""
        tensor = self.input if self.input is not None else self.output
        return torch.uint8 if tensor is None else tensor.dtype

    def whole_numel(self, world_size: int) -> int:
        """Returns the elements of the whole buffer of the call, also where this rank has only a part of it."""
        numels = [tensor.numel() for tensor in (self.input, self.output) if tensor is not None]
        if self.verb in ("gather", "scatter"):
            return min(numels) * world_size
        return max(numels, default=0)

    def whole_bytes(self, world_size: int) -> int | None:
        """Returns the bytes of the whole buffer; None for all_to_all_single, whose ranks need not share a size."""
        return None if self.verb == "all_to_all_single" else self.whole_numel(world_size) * self.dtype.itemsize


class Executor:
    """Runs the plans of one group on its transport. Keeps schedules and scratch memory between calls.

    One thread at a time. After a failed call the messages of that call may still be on their way, so every later call
    raises TransportError, or PeerLostError again.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._schedules: OrderedDict[object, tuple[Plan, Schedule]] = OrderedDict()
        self._scratch: torch.Tensor | None = None
        self._failure: Remembered | None = None
        self._failed: _Run | None = None

    def run(self, plan: Plan, collective: Collective, timeout_s: float | None) -> None:
        """Runs ``plan``, this rank's for ``collective``; returns when the local result is complete.

        Raises the TransportErrors of the transport. ``timeout_s`` bounds the whole call; None: the transport's own.
        """
        if self._failure is not None:
            raise self._failure.again()
        deadline = time.monotonic() + (self._transport.timeout_s if timeout_s is None else timeout_s)
        if collective.verb == "barrier":
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            output = torch.empty(self._transport.world_size, dtype=torch.uint8, device="cpu")
            collective = collective._replace(input=token, output=output)
        schedule = self._schedule(plan, collective)
        run = _Run(self._transport, schedule, collective, self._scratch_for(schedule, collective))
        try:
            run.run(deadline)
        except BaseException as error:
            self._failure = Remembered.of(error)
            self._failed = run  # its messages are still on their way, and need their memory
            raise

    def close(self) -> None:
        """Gives the memory back."""
        self._schedules.clear()
        self._scratch = self._failed = None

    def _schedule(self, plan: Plan, call: Collective) -> Schedule:
        input_numel = 0 if call.input is None else call.input.numel()
        output_numel = 0 if call.output is None else call.output.numel()
        segment_bytes, is_scaled = self._transport.segment_bytes, _prescale(call, 1) is not None
        splits = call.input_splits, call.output_splits
        key = id(plan), input_numel, output_numel, call.dtype.itemsize, segment_bytes, is_scaled, splits
        found = self._schedules.get(key)
        if found is not None:
            return found[1]
        segments = 1
        if call.verb != "all_to_all_single":  # there no rank knows the chunks of all the others
            chunk_bytes = largest_chunk(plan, input_numel, output_numel) * call.dtype.itemsize
            segments = max(1, -(-chunk_bytes // segment_bytes))
        is_whole = call.verb in _WHOLE
        input = Cut(_cut(input_numel, plan.input_chunks, call.input_splits), segments, is_whole)
        output = Cut(_cut(output_numel, plan.output_chunks, call.output_splits), segments, is_whole)
        schedule = compile_plan(plan, input, output, is_scaled)
        self._schedules[key] = plan, schedule  # the plan too, so that no other gets its id
        if len(self._schedules) > _CACHED_SCHEDULES:
            self._schedules.popitem(last=False)
        return schedule

    def _scratch_for(self, schedule: Schedule, call: Collective) -> list[torch.Tensor]:
        """Returns the scratch of each turn, of the call's element type."""
        turns = min(TURNS, schedule.segments)
        tensor = call.input if call.input is not None else call.output
        if not schedule.scratch_numel or tensor is None:
            return [torch.empty(0, dtype=torch.uint8, device="cpu")] * turns
        nbytes = turns * schedule.scratch_numel * tensor.itemsize
        if self._scratch is None or self._scratch.nbytes < nbytes or self._scratch.device != tensor.device:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        return list(self._scratch[:nbytes].view(tensor.dtype).chunk(turns))


class _Run:
    """One call: its instances take turns."""

    def __init__(
        self, transport: Transport, schedule: Schedule, call: Collective, scratch: Sequence[torch.Tensor]
    ) -> None:
        self._transport = transport
        self._schedule = schedule
        self._call = call
        self._scratch = scratch
        self._factor = _prescale(call, transport.world_size)
        self._op = ReduceOp.SUM if call.op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else call.op
        self._waiting: list[_Posted] = []

    def run(self, deadline: float) -> None:
        """See [Note: turns]."""
        if not self._schedule.steps:
            return
        turns = len(self._scratch)
        for segment in range(turns):
            self._start(segment)
        while self._waiting:
            _, _, segment, index, views, requests = self._waiting[0]
            for request in requests:
                request.wait(max(deadline - time.monotonic(), 1e-3))
            heappop(self._waiting)
            self._act(self._schedule.steps[index], views)
            if index + 1 < len(self._schedule.steps):
                self._post(segment, index + 1, views)
            else:
                self._finish(segment)
                if segment + turns < self._schedule.segments:
                    self._start(segment + turns)

    def _start(self, segment: int) -> None:
        views = self._views(segment)
        if self._factor is not None:
            for source, target in self._schedule.scaled:
                if views[source].numel():
                    reduce_(views[target], [views[source]], ReduceOp.PREMUL_SUM, [self._factor])
        self._post(segment, 0, views)

    def _views(self, segment: int) -> list[torch.Tensor]:
        """Returns the memory of each place in ``segment``, without copies."""
        scratch = self._scratch[segment % len(self._scratch)]
        of = {Space.INPUT: self._call.input, Space.OUTPUT: self._call.output, Space.SCRATCH: scratch}
        views = []
        for space, start, stop in self._schedule.bounds(segment):
            tensor = of[space]
            assert tensor is not None, f"the plan uses the {space.value}, and this rank has none"
            views.append(tensor[start:stop])
        return views

    def _post(self, segment: int, index: int, views: list[torch.Tensor]) -> None:
        """Starts the messages of step ``index``."""
        lap, turn = divmod(segment, len(self._scratch))
        step, transport, tag = self._schedule.steps[index], self._transport, FIRST_TAG + turn
        # An empty chunk is a message too: so ranks that disagree about the size learn of it.
        requests = [
            (transport.irecv if is_receive else transport.isend)(views[place], peer, tag)
            for is_receive, peer, place in step.transfers
        ]
        order = lap * self._schedule.rounds + step.number
        heappush(self._waiting, _Posted(order, turn, segment, index, views, requests))

    def _act(self, step: Step, views: list[torch.Tensor]) -> None:
        """Does what is to do once all messages of a step are complete."""
        for output, inputs in step.local:
            target = views[output]
            if len(inputs) == 1:
                target.copy_(views[inputs[0]])
            elif target.numel():
                assert self._op is not None, "a collective that reduces has an operator"
                reduce_(target, [views[index] for index in inputs], self._op)

    def _finish(self, segment: int) -> None:
        output = self._call.output
        if self._call.op is ReduceOp.AVG and self._factor is None and output is not None:
            for start, stop in self._schedule.output.of(segment):
                output[start:stop].div_(self._transport.world_size)


class _Posted(NamedTuple):
    """A step under way; ``order`` and ``turn`` say when it is waited for, and no two have both alike."""

    order: int
    turn: int
    segment: int
    at: int
    views: list[torch.Tensor]
    requests: list[Request]


def meet(transport: Transport) -> None:
    """Returns once every rank has joined ``transport``, so that none leaves while another still connects to it."""
    if transport.supports("barrier", torch.uint8):
        transport.barrier(None)
    else:
        plan = find_algorithm("direct").plan("barrier", transport.rank, Topology.flat(transport.world_size))
        Executor(transport).run(plan, Collective(verb="barrier"), None)


def _prescale(call: Collective, world_size: int) -> float | None:
    """Returns what a rank's contribution is multiplied by before it goes anywhere; see [Note: how a plan reduces]."""
    if call.op is ReduceOp.PREMUL_SUM:
        return call.factor
    return 1.0 / world_size if call.op is ReduceOp.AVG and call.dtype.itemsize < 4 else None


def _cut(numel: int, chunks: int, splits: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if not splits:
        return cut_evenly(numel, chunks)
    stops = list(accumulate(splits))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))
