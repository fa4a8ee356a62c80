"""Runs one collective on one rank: whole, if the transport carries it natively, else any plan on any transport."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import ConfigError
from ..ops.reduce import reduce_
from ..types import ReduceOp
from . import ALGORITHMS
from .plan import Chunk, Plan, Recv, Reduce, Space

if TYPE_CHECKING:
    from ..transport.base import Request, Transport

__all__ = ["COLLECTIVE_TAG", "Collective", "choose_algorithm", "execute", "meet"]

# MPI promises tags up to 32767 and no more; users get the ones below (see collectives/p2p.py).
COLLECTIVE_TAG = 32767


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


def choose_algorithm(transport: Transport, collective: Collective, algorithm: str | None) -> str:
    """Returns "native" or the name of the algorithm whose plan serves.

    None and "auto" take what the transport carries whole, else "direct". Raises ConfigError for a name that is not
    known, and for "native" where the transport does not carry the collective.
    """
    is_native = transport.supports(collective.verb, collective.dtype, collective.op)
    if algorithm is None or algorithm == "auto":
        return "native" if is_native else "direct"
    if algorithm == "native":
        if is_native:
            return "native"
        of_op = "" if collective.op is None else f" {collective.op.name}"
        raise ConfigError(
            f"algorithm 'native': transport {transport.name!r} does not carry {collective.verb}{of_op} of "
            f"{collective.dtype} itself; use algorithm='direct', or leave the choice to 'auto'"
        )
    known = ("auto", "native", *ALGORITHMS.names())
    if algorithm not in known:
        raise ConfigError(f"unknown algorithm {algorithm!r}; known: {', '.join(known)}")
    return algorithm


def execute(transport: Transport, collective: Collective, algorithm: str, timeout_s: float | None) -> None:
    """Runs ``collective`` by ``algorithm``, a result of ``choose_algorithm``.

    Returns when the local result is complete. Raises the TransportErrors of the transport. ``timeout_s`` None means the
    transport's own.
    """
    if algorithm == "native":
        _execute_native(transport, collective, timeout_s)
        return
    deadline = time.monotonic() + (transport.timeout_s if timeout_s is None else timeout_s)
    factors = None
    if collective.op is ReduceOp.PREMUL_SUM:
        factors = _exchange_factors(transport, collective, algorithm, deadline)
    if collective.verb == "barrier":
        token = torch.zeros(1, dtype=torch.uint8)
        collective = Collective(
            verb="barrier", input=token, output=torch.empty(transport.world_size, dtype=torch.uint8)
        )
    plan = ALGORITHMS.load(algorithm).plan(collective.verb, transport.rank, transport.world_size, collective.root)
    _run(transport, plan, collective, factors, deadline)


def meet(transport: Transport) -> None:
    """Returns once every rank has joined ``transport``, so that none leaves while another still connects to it."""
    barrier = Collective(verb="barrier")
    execute(transport, barrier, choose_algorithm(transport, barrier, None), None)


def _run(
    transport: Transport, plan: Plan, collective: Collective, factors: Sequence[float] | None, deadline: float
) -> None:
    """The one loop: posts the receives and sends of a round, waits for all of them, runs the local actions."""
    buffers = _Buffers(plan, collective)
    for round_ in plan.rounds:
        requests: list[Request] = []
        for transfer in round_.transfers:
            view = buffers.view(transfer.chunk)
            # An empty chunk is no message. Both sides know its size: it follows from arguments that are equal on all
            # ranks.
            if view.numel() == 0:
                continue
            start = transport.irecv if isinstance(transfer, Recv) else transport.isend
            requests.append(start(view, transfer.peer, COLLECTIVE_TAG))
        for request in requests:
            request.wait(max(deadline - time.monotonic(), 1e-3))
        for action in round_.local:
            if isinstance(action, Reduce):
                _reduce(buffers, action, collective.op, factors)
            else:
                buffers.view(action.output).copy_(buffers.view(action.input))


def _reduce(buffers: _Buffers, action: Reduce, op: ReduceOp | None, factors: Sequence[float] | None) -> None:
    assert op is not None, "a collective that reduces has an operator"
    output = buffers.view(action.output)
    if output.numel():
        reduce_(output, [buffers.view(chunk) for chunk in action.inputs], op, factors)


def _exchange_factors(transport: Transport, collective: Collective, algorithm: str, deadline: float) -> list[float]:
    """Returns every rank's factor, so that the reduction scales, and no rank has to round before it sends."""
    device = "cpu" if collective.input is None else collective.input.device
    gathered = torch.empty(transport.world_size, dtype=torch.float64, device=device)
    mine = torch.tensor([collective.factor], dtype=torch.float64, device=device)
    gather = Collective(verb="all_gather_single", input=mine, output=gathered)
    plan = ALGORITHMS.load(algorithm).plan("all_gather_single", transport.rank, transport.world_size)
    _run(transport, plan, gather, None, deadline)
    return gathered.tolist()


class _Buffers:
    """The memory behind a plan's chunks: views of input and output, without copies, and lanes of scratch."""

    def __init__(self, plan: Plan, collective: Collective) -> None:
        self._tensors = {Space.INPUT: collective.input, Space.OUTPUT: collective.output}
        self._bounds = {
            Space.INPUT: _bounds(collective.input, plan.input_chunks, collective.input_splits),
            Space.OUTPUT: _bounds(collective.output, plan.output_chunks, collective.output_splits),
        }
        self._lanes = {index: self._new_lanes(index, lanes) for index, lanes in plan.lanes().items()}

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Returns the memory of ``chunk``, flat."""
        if chunk.space is Space.SCRATCH:
            return self._lanes[chunk.index][chunk.lane]
        tensor = self._tensors[chunk.space]
        assert tensor is not None, f"the plan uses the {chunk.space.value}, and this rank has none"
        start, stop = self._bounds[chunk.space][chunk.index]
        return tensor[start:stop]

    def _new_lanes(self, index: int, lanes: int) -> torch.Tensor:
        start, stop = self._bounds[Space.INPUT][index]
        source = self._tensors[Space.INPUT]
        assert source is not None, "scratch is as large as a chunk of the input"
        return torch.empty((lanes, stop - start), dtype=source.dtype, device=source.device)


def _bounds(tensor: torch.Tensor | None, chunks: int, splits: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the (start, stop) element of each chunk of ``tensor (numel,)``."""
    if tensor is None or chunks == 0:
        return []
    numel = tensor.numel()
    if not splits:
        return [(index * numel // chunks, (index + 1) * numel // chunks) for index in range(chunks)]
    stops = [sum(splits[: index + 1]) for index in range(chunks)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _execute_native(transport: Transport, call: Collective, timeout_s: float | None) -> None:
    """Calls the transport's own collective. The asserts state what ``collectives`` has made sure of."""
    match call.verb:
        case "barrier":
            transport.barrier(timeout_s)
        case "broadcast":
            assert call.output is not None
            transport.broadcast(call.output, call.root, timeout_s)
        case "gather":
            assert call.input is not None
            transport.gather(call.output, call.input, call.root, timeout_s)
        case "scatter":
            assert call.output is not None
            transport.scatter(call.output, call.input, call.root, timeout_s)
        case "all_gather_single":
            assert call.output is not None and call.input is not None
            transport.all_gather_single(call.output, call.input, timeout_s)
        case "all_to_all_single":
            assert call.output is not None and call.input is not None
            transport.all_to_all_single(call.output, call.input, call.output_splits, call.input_splits, timeout_s)
        case _:
            _execute_native_reduction(transport, call, timeout_s)


def _execute_native_reduction(transport: Transport, call: Collective, timeout_s: float | None) -> None:
    assert call.input is not None and call.op is not None
    # Only the root of a reduce has an output; the transport writes none elsewhere, so the input may stand in for it.
    output = call.input if call.output is None else call.output
    match call.verb:
        case "all_reduce":
            transport.all_reduce(output, call.input, call.op, call.factor, timeout_s)
        case "reduce":
            transport.reduce(output, call.input, call.op, call.factor, call.root, timeout_s)
        case "reduce_scatter_single":
            transport.reduce_scatter_single(output, call.input, call.op, call.factor, timeout_s)
        case _:
            raise AssertionError(f"no transport call for {call.verb}")
