"""Collectives whose bytes are compressed: the exchange that a compressor's ``combine`` dictates, on any transport.

    SUM         encode; all_reduce of the payloads; decode
    GATHER      encode; all_gather of the payloads; decode and add them in rank order
    REQUANTIZE  encode a chunk for each rank; all_to_all; decode, add and encode; all_gather; decode

All ranks decode the same bytes in the same order, so results are bit-identical on every rank. What an owner's second
encoding loses in REQUANTIZE goes to its residual, so sent + residual == input holds for the sum over the ranks.

[Note: overlap of encoding and sending]
REQUANTIZE cuts every chunk into segments. A helper thread encodes segment s + 1, and reduces segment s - 1, while the
calling thread, the only one that uses the transport, exchanges segment s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from ..algorithms.executor import Collective
from ..compression import Codec, Combine, Compressor, Context, Message, Part
from ..errors import ConfigError
from ..types import ReduceOp
from .compression_chunks import Chunks, chunk_numel_of
from .compression_hosts import BetweenHosts
from .compression_wire import Wire

__all__ = ["Squeezed", "agree", "check_call", "check_kind", "payloads", "run", "why_not"]

_VERBS = ("all_reduce", "reduce_scatter_single", "all_gather_single")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SEGMENT_NUMEL = 1 << 18
_MAX_SEGMENTS = 8
_UNCACHED_BYTES = 4 << 20  # results from here on leave the caches before they are read


class Squeezed(NamedTuple):
    """A checked call: ``collective`` by ``compressor``; ``parts`` are the tensors in its input, in order."""

    collective: Collective
    compressor: Compressor
    parts: tuple[Part, ...]


def why_not(verb: str, dtype: torch.dtype, op: ReduceOp | None) -> str | None:
    """Says why no compressor takes such a call; None if some do."""
    if verb not in _VERBS:
        return (
            f"{verb} cannot be compressed (of lists, only those with equal sizes); expected all_reduce, reduce_scatter "
            f"or all_gather"
        )
    if dtype not in _DTYPES:
        return f"expected float32, float16 or bfloat16, got {dtype}"
    if op not in (None, ReduceOp.SUM, ReduceOp.AVG):
        return f"expected op SUM or AVG, got {ReduceOp(op).name}: others go by what compression leaves out"
    return None


def check_call(
    verb: str, collectives: Sequence[Collective], compressor: Compressor, parts: Sequence[Part], name: str | None
) -> Squeezed:
    """Returns the call, ready to run. Raises ConfigError for what cannot be compressed, before a byte moves."""
    collective = collectives[0]
    flat = collective.input  # there is none on some ranks of verbs that are refused here
    described = tuple(parts) or (Part(name, (0 if flat is None else flat.numel(),)),)
    check_kind(collective.verb, collective.dtype, collective.op, compressor, described, called=verb)
    for each, chosen in compressor.routes(described):
        each.check([described[index] for index in chosen])
    return Squeezed(collective, compressor, described)


def check_kind(
    verb: str, dtype: torch.dtype, op: ReduceOp | None, compressor: Compressor, parts: Sequence[Part], called: str = ""
) -> None:
    """Raises ConfigError unless ``compressor`` takes such calls, with these ``parts``; ``called``: by the caller."""
    reason = why_not(verb, dtype, op)
    if reason is not None:
        of = f" of {parts[0].name}" if len(parts) == 1 and parts[0].name else ""
        raise ConfigError(f"compression {compressor.spec!r}{of}: {reason}; pass compression=None or 'auto'")
    for each, _ in compressor.routes(parts):
        if op is None and not each.is_for_gathers:
            raise ConfigError(
                f"compression {each.spec!r} compresses sums; {called or verb} has none: use a codec, or EF around one"
            )
    if verb != "all_reduce" and not compressor.is_for_vectors:
        raise ConfigError(
            f"compression {compressor.spec!r} compresses what has two dimensions or more, and {called or verb} takes "
            f"tensors as flat, so that nothing would be compressed: use another codec, or policy:min_dim=1 around one"
        )


def payloads(call: Squeezed) -> Iterator[Collective]:
    """Yields the collectives, of no elements, that carry ``call``: an algorithm that the caller names must have plans
    of them."""
    verb, routes = call.collective.verb, call.compressor.routes(call.parts)
    for each, _ in routes:
        codec = each.codec
        verbs = _VERBS_OF[codec.combine]
        if codec.combine is Combine.GATHER and codec.is_sparse:
            verbs = (*verbs, "all_reduce")  # where the ranks' choices are nearly everything
        if verb == "all_gather_single":
            verbs = ("all_gather_single",)
        elif verb == "reduce_scatter_single" and len(routes) == 1 and not each.needs_total:
            verbs = ("reduce_scatter_single",) if _adds_up(codec) else ("all_to_all_single",)
        for carrying in verbs:
            op = ReduceOp.SUM if carrying in ("all_reduce", "reduce_scatter_single") else None
            dtype = codec.wire_dtype
            if carrying == "all_to_all_single":
                dtype = torch.uint8  # chunks
            elif op is not None and codec.combine is Combine.GATHER:
                dtype = torch.float32  # what the ranks chose, decoded
            payload = torch.empty(0, dtype=dtype, device="cpu")
            yield Collective(verb=carrying, input=payload, output=payload, op=op)


def agree(call: Squeezed, wire: Wire, seed: int, note: str = "") -> None:
    """Raises CollectiveMismatchError on every rank unless all make ``call``, with this ``seed``, another in each call,
    and this ``note``, what else they must agree on.
    """
    wire.agree(_describe(call, seed) + note)


def run(call: Squeezed, wire: Wire, seed: int) -> None:
    """Runs ``call`` on this rank, once the ranks have agreed on it and on ``seed``."""
    source, output = call.collective.input, call.collective.output
    assert source is not None and output is not None
    is_part = output.numel() * 4 >= _UNCACHED_BYTES
    context = Context(call.parts, wire.rank, wire.world_size, seed, is_part=is_part, kept={})
    workspace = wire.workspace
    flat = source if source.dtype == torch.float32 else workspace.like("input", source).copy_(source)
    total = output if output.dtype == torch.float32 else workspace.like("output", output)
    if call.collective.verb == "all_gather_single":
        _all_gather(call.compressor, flat, total, wire, context)
    elif call.collective.verb == "all_reduce":
        _all_reduce(call.compressor, flat, total, wire, context)
    else:
        _reduce_scatter(call.compressor, flat, total, wire, context)
    if call.collective.op is ReduceOp.AVG:
        total.div_(wire.world_size)
    if total is not output:
        output.copy_(total)


def _describe(call: Squeezed, seed: int) -> str:
    collective = call.collective
    assert collective.input is not None
    op = "" if collective.op is None else f" {collective.op.name}"
    names = "" if call.parts[0].name is None else f" of {','.join(str(part.name) for part in call.parts)}"
    shapes = f" shaped {[part.shape for part in call.parts]}" if call.compressor.sees_shapes else ""
    of_parts = call.compressor.calls_of(call.parts)
    calls = f", calls {list(of_parts)} of its parts" if of_parts else ""
    return (
        f"{collective.verb}{op} of {collective.input.numel()} {collective.dtype}{shapes}, "
        f"compression {call.compressor.spec}, call {seed}{calls}{names}"
    )


def _adds_up(codec: Codec) -> bool:
    """Whether a part of the payloads' sum is that of a part of the input."""
    return codec.is_elementwise and codec.combine is Combine.SUM


# -- the verbs -----------------------------------------------------------------------------------------------------


def _all_reduce(compressor: Compressor, flat: torch.Tensor, total: torch.Tensor, wire: Wire, context: Context) -> None:
    """``total (numel,)`` = the sum of what the ranks send of ``flat (numel,)``; the two may be the same memory."""
    routes = compressor.routes(context.parts)
    if len(routes) == 1:
        _all_reduce_one(routes[0][0], flat, total, wire, context)
        return
    pieces = torch.split(flat, [part.numel for part in context.parts])
    results = torch.split(total, [part.numel for part in context.parts])
    offset = 0
    for each, chosen in routes:
        numel = sum(pieces[index].numel() for index in chosen)
        joined = wire.workspace.take("route", numel, torch.float32, flat.device)
        torch.cat([pieces[index] for index in chosen], out=joined)
        parts = tuple(context.parts[index] for index in chosen)
        _all_reduce_one(each, joined, joined, wire, context._replace(parts=parts, offset=offset, kept={}))
        for index, piece in zip(chosen, torch.split(joined, [part.numel for part in parts]), strict=True):
            results[index].copy_(piece)
        offset += numel


def _all_reduce_one(
    compressor: Compressor, flat: torch.Tensor, total: torch.Tensor, wire: Wire, context: Context
) -> None:
    with wire.timer.encoding():
        message = compressor.begin(flat, context)
    if message is None:
        total.zero_()
        return
    if wire.inside is not None and wire.between is not None:
        BetweenHosts(message, total, wire.inside, wire.between, context).run()
    else:
        _EXCHANGES[message.codec.combine](message, total, wire, context)
    with wire.timer.decoding():
        compressor.end(message, total, context)


def _reduce_scatter(
    compressor: Compressor, flat: torch.Tensor, part: torch.Tensor, wire: Wire, context: Context
) -> None:
    """``part (numel,)`` = this rank's share of the sum of what the ranks send of ``flat (world_size * numel,)``."""
    routes = compressor.routes(context.parts)
    if len(routes) > 1 or routes[0][0].needs_total:
        total = wire.workspace.take("total", flat.numel(), torch.float32, flat.device)
        _all_reduce(compressor, flat, total, wire, context)
        part.copy_(total.view(wire.world_size, -1)[wire.rank])
        return
    compressor = routes[0][0]
    with wire.timer.encoding():
        message = compressor.begin(flat, context)
    if message is None:
        part.zero_()
        return
    if _adds_up(message.codec):
        payload = _encoded(message, wire, context)
        mine = wire.workspace.take("mine", part.numel(), payload.dtype, payload.device)
        wire.reduce_scatter(mine, payload)
        with wire.timer.decoding():
            message.codec.decode(part, mine, context)
    else:
        chunks = Chunks(message, wire, context, part.numel())
        chunks.encode(0)
        wire.all_to_all(chunks.received[0], chunks.sent[0])
        chunks.add(0, part)
        chunks.add_owed(0, part)
    with wire.timer.decoding():
        compressor.end(message, part, context)


def _all_gather(compressor: Compressor, flat: torch.Tensor, whole: torch.Tensor, wire: Wire, context: Context) -> None:
    """``whole (world_size * numel,)`` = what each rank sent of its ``flat (numel,)``."""
    if not flat.numel():
        return
    compressor = compressor.routes(context.parts)[0][0]
    with wire.timer.encoding():
        message = compressor.begin(flat, context)
    assert message is not None, "wrappers that may send nothing are not for gathers"
    payload = _encoded(message, wire, context._replace(world_size=1))  # nobody adds to it
    gathered = wire.workspace.take("gathered", payload.numel() * wire.world_size, payload.dtype, payload.device)
    wire.all_gather(gathered, payload)
    with wire.timer.decoding():
        for rank, (output, each) in enumerate(
            zip(whole.view(wire.world_size, -1), gathered.view(wire.world_size, -1), strict=True)
        ):
            message.codec.decode(output, each, context._replace(rank=rank))


# -- the exchanges -------------------------------------------------------------------------------------------------


def _encoded(message: Message, wire: Wire, context: Context) -> torch.Tensor:
    """Returns the payload of the whole input."""
    codec, numel = message.codec, message.input.numel()
    with wire.timer.encoding():
        length = codec.payload_numel(numel, context)
        payload = wire.workspace.take(f"payload{context.round}", length, codec.wire_dtype, message.input.device)
        codec.encode(payload, message.input, context, message.residual)
    return payload


def _exchange_sum(message: Message, total: torch.Tensor, wire: Wire, context: Context) -> None:
    codec = message.codec
    for round_ in range(codec.rounds):
        context = context._replace(round=round_)
        payload = _encoded(message, wire, context)
        wire.all_reduce(payload)
        if round_ + 1 < codec.rounds:
            with wire.timer.decoding():
                codec.advance(payload, context)
    with wire.timer.decoding():
        codec.decode(total, payload, context)


def _exchange_gather(message: Message, total: torch.Tensor, wire: Wire, context: Context) -> None:
    payload = _encoded(message, wire, context)
    is_dense = payload.nbytes * wire.world_size >= 2 * total.nbytes
    if message.codec.is_sparse and is_dense:  # the ranks' choices together are nearly everything
        with wire.timer.decoding():
            message.codec.decode(total, payload, context)
        wire.all_reduce(total)
        return
    gathered = wire.workspace.take("gathered", payload.numel() * wire.world_size, payload.dtype, payload.device)
    wire.all_gather(gathered, payload)
    with wire.timer.decoding():
        message.codec.decode_sum(total, gathered.view(wire.world_size, -1).unbind(), context)


def _exchange_requantize(message: Message, total: torch.Tensor, wire: Wire, context: Context) -> None:
    numel = message.input.numel()
    chunk_numel = chunk_numel_of(numel, wire.world_size)
    segments = 1
    if not message.codec.is_sparse and not total.is_cuda:
        segments = max(1, min(_MAX_SEGMENTS, chunk_numel // _SEGMENT_NUMEL))
    chunks = Chunks(message, wire, context, chunk_numel, segments)
    if segments == 1:
        chunks.encode(0)
        wire.all_to_all(chunks.received[0], chunks.sent[0])
        chunks.reduce(0)
        wire.all_gather(chunks.gathered[0], chunks.reduced[0])
        chunks.decode(0, total)
        return
    with wire.helper() as submit:
        _run_segments(chunks, segments, total, wire, submit)


def _run_segments(
    chunks: Chunks, segments: int, total: torch.Tensor, wire: Wire, submit: Callable[..., Future[None]]
) -> None:
    """See [Note: overlap of encoding and sending]."""
    encoded = submit(chunks.encode, 0)
    reduced: Future[None] | None = None
    for segment in range(segments + 1):
        before = reduced
        if segment < segments:
            encoded.result()
            if segment + 1 < segments:
                encoded = submit(chunks.encode, segment + 1)
            wire.all_to_all(chunks.received[segment], chunks.sent[segment])
            reduced = submit(chunks.reduce, segment)
        if before is not None:
            before.result()
            wire.all_gather(chunks.gathered[segment - 1], chunks.reduced[segment - 1])
            submit(chunks.decode, segment - 1, total)


_EXCHANGES: dict[Combine, Callable[[Message, torch.Tensor, Wire, Context], None]] = {
    Combine.SUM: _exchange_sum,
    Combine.GATHER: _exchange_gather,
    Combine.REQUANTIZE: _exchange_requantize,
}
_VERBS_OF = {
    Combine.SUM: ("all_reduce",),
    Combine.GATHER: ("all_gather_single",),
    Combine.REQUANTIZE: ("all_to_all_single", "all_gather_single"),
}
