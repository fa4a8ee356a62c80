"""``compression="auto"``: compress where that is faster, and say why.

The first calls of a kind (verb, size, element type) run uncompressed and are timed. Then each candidate's time is
predicted from what was measured here: its share of the bytes times the time on the wire, plus its codec's time on the
call's own data. The ranks exchange their measurements and each takes the slowest rank's, so all decide alike. Later the
prediction is held against what compressed calls really take.

Candidates, the mildest first: bf16, int8, and where the caller names the tensor, so that a residual can be kept,
int4 and top-k 1 % with error feedback. The mildest wins whose time is close to the best; none at all wins unless
compression saves enough to be sure of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..compression import Codec, Combine, Context, parse
from .compressed import Squeezed
from .compression_wire import CompressionReport

if TYPE_CHECKING:
    from .compression_wire import Wire

__all__ = ["AutoCompression", "AutoDecision", "Candidate"]

STATELESS = ("bf16", "int8")
STATEFUL = ("int4+ef", "topk:0.01+ef")
MIN_BYTES = 64 * 1024  # below it latency counts, and compression has no say in that
MIN_GAIN = 0.15  # what compression must promise to save, or none is chosen
CLOSE = 0.05  # times that differ by less are as good as equal, and the milder compressor is taken
WARM_UP_CALLS = 3  # measured uncompressed; the fastest counts
TRIAL_CALLS = 4  # after them a choice is held against the measured time of none
_SAMPLE_NUMEL = 1 << 20
_SEGMENTS = 4  # about how many there are between hosts
_CONTEXT = Context(parts=(), kept={})


class Candidate(NamedTuple):
    """What one choice would cost in a call: seconds of its codec, its share of the bytes, and all together."""

    spec: str
    codec_s: float
    byte_share: float
    predicted_s: float


class AutoDecision(NamedTuple):
    """What "auto" chose for calls of one kind, and why. ``measured_s`` is the time of an uncompressed call."""

    verb: str
    nbytes: int
    dtype: str
    chosen: str
    reason: str
    measured_s: float = 0.0
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.verb} of {self.nbytes} bytes ({self.dtype}): {self.chosen}, because {self.reason}"]
        if self.measured_s:
            lines.append(f"  {'none':14} measured  {self.measured_s * 1e3:10.3f} ms")
        lines += [
            f"  {each.spec:14} predicted {each.predicted_s * 1e3:10.3f} ms, "
            f"{each.byte_share:.3f} of the bytes, codec {each.codec_s * 1e3:.3f} ms"
            for each in self.candidates
        ]
        return "\n".join(lines)


class _Kind:
    """Calls that one decision is for: what was measured, and how the compressed ones fared."""

    def __init__(self) -> None:
        self.plain_s: list[float] = []
        self.trials_s: list[float] = []
        self.decision: AutoDecision | None = None


class AutoCompression:
    """The decisions of one group. All ranks make the same calls, and so decide at the same moments."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    @property
    def decisions(self) -> list[AutoDecision]:
        """What was decided so far, in the order of the first calls."""
        return [kind.decision for kind in self._kinds.values() if kind.decision is not None]

    def run(
        self,
        call: Squeezed,
        algorithm: str | None,
        wire: Wire,
        plain: Callable[[], None],
        squeezed: Callable[[str], CompressionReport],
        is_carried: Callable[[str], bool],
    ) -> CompressionReport:
        """Runs ``call`` by ``plain()``, or by ``squeezed(spec)`` where that was chosen; decides when it is time to.

        ``is_carried(spec)`` says whether the ``algorithm`` that the caller asks for takes what that sends.
        """
        assert call.collective.input is not None
        key = (call.collective.verb, call.collective.input.numel(), call.collective.dtype, _is_named(call), algorithm)
        kind = self._kinds.setdefault(key, _Kind())
        if kind.decision is None and call.collective.input.nbytes < MIN_BYTES:
            kind.decision = _decision(call, "none", f"it is below {MIN_BYTES} bytes, where latency counts")
        if kind.decision is None:
            self._measure(kind, call, wire, plain, is_carried)
            return CompressionReport()
        if kind.decision.chosen == "none":
            plain()
            return CompressionReport()
        report = squeezed(kind.decision.chosen)
        if len(kind.trials_s) < TRIAL_CALLS:
            kind.trials_s.append(report.wall_s)
            if len(kind.trials_s) == TRIAL_CALLS:
                _confirm(kind, wire)
        return report

    def _measure(
        self, kind: _Kind, call: Squeezed, wire: Wire, plain: Callable[[], None], is_carried: Callable[[str], bool]
    ) -> None:
        source = call.collective.input
        assert source is not None
        is_last = len(kind.plain_s) + 1 == WARM_UP_CALLS
        sample = source[:_SAMPLE_NUMEL].to(torch.float32, copy=True) if is_last else None
        wire.agree(f"measuring {call.collective.verb} of {source.numel()} {source.dtype} for compression 'auto'")
        start_s = time.perf_counter()
        plain()
        kind.plain_s.append(time.perf_counter() - start_s)
        if sample is not None:
            specs = [each for each in (*STATELESS, *(STATEFUL if _is_named(call) else ())) if is_carried(each)]
            mine = [min(kind.plain_s), _inside_time(call, wire)]
            for spec in specs:
                mine += _codec_times(spec, sample)
            kind.decision = _decide(call, wire, specs, _slowest(mine, wire))


def _is_named(call: Squeezed) -> bool:
    """Whether residuals can be kept of all that goes together."""
    return all(part.name is not None for part in call.parts)


def _decide(call: Squeezed, wire: Wire, specs: Sequence[str], times: list[float]) -> AutoDecision:
    """Chooses; ``times``: none, adding up inside the host, then encoding and decoding an element of each spec."""
    plain_s, inside_s, codecs = times[0], times[1], times[2:]
    source = call.collective.input
    assert source is not None
    local = wire.inside.world_size if wire.inside is not None else 1
    peers = wire.between.world_size if wire.between is not None else wire.world_size
    numel = source.numel() // local
    wire_s = max(plain_s - inside_s, 0.0)
    candidates = []
    for index, spec in enumerate(specs):
        encode_s, decode_s = codecs[2 * index] * numel, codecs[2 * index + 1] * numel
        codec = parse(spec).codec
        share, codec_s = _cost(codec, call.collective.verb, numel, (local, peers), (encode_s, decode_s))
        share *= 4 / source.element_size()  # payloads are of float32
        took_s, computed_s = wire_s * share, inside_s + codec_s
        if wire.between is not None and not codec.is_sparse:  # in segments: one computes while the other travels
            predicted_s = max(took_s, computed_s) + min(took_s, computed_s) / _SEGMENTS
        else:
            predicted_s = took_s + computed_s
        candidates.append(Candidate(spec, codec_s, share, predicted_s))
    if not candidates:
        return _decision(call, "none", "the algorithm that is asked for has no plan of what compressors send", plain_s)
    best_s = min(each.predicted_s for each in candidates)
    if best_s > plain_s * (1 - MIN_GAIN):
        reason = f"the best compressor would take {best_s / plain_s:.0%} of its time; less than {MIN_GAIN:.0%} saved"
        return _decision(call, "none", reason, plain_s, candidates)
    chosen = next(each for each in candidates if each.predicted_s <= best_s * (1 + CLOSE))
    reason = f"it takes {chosen.predicted_s / plain_s:.0%} of the time of none"
    if not _is_named(call):
        reason += "; pass name= to allow those with error feedback"
    return _decision(call, chosen.spec, reason, plain_s, candidates)


def _confirm(kind: _Kind, wire: Wire) -> None:
    """Goes back to none if the compressed calls, the median of them on the slowest rank, took longer."""
    assert kind.decision is not None
    (taken_s,) = _slowest([sorted(kind.trials_s)[TRIAL_CALLS // 2]], wire)
    if taken_s > kind.decision.measured_s:
        chosen, plain_s = kind.decision.chosen, kind.decision.measured_s
        reason = f"{chosen} really took {taken_s * 1e3:.3f} ms, and none {plain_s * 1e3:.3f} ms"
        kind.decision = kind.decision._replace(chosen="none", reason=reason)


def _decision(
    call: Squeezed, chosen: str, reason: str, plain_s: float = 0.0, candidates: Sequence[Candidate] = ()
) -> AutoDecision:
    source = call.collective.input
    assert source is not None
    dtype = str(source.dtype).removeprefix("torch.")
    return AutoDecision(call.collective.verb, source.nbytes, dtype, chosen, reason, plain_s, tuple(candidates))


def _cost(
    codec: Codec, verb: str, numel: int, ranks: tuple[int, int], times: tuple[float, float]
) -> tuple[float, float]:
    """Returns (its bytes on the wire relative to those of none in float32, seconds of the codec).

    ``ranks``: those of a host that share the work (1: none do), and those that a payload goes to. ``times`` are those
    of encoding and of decoding the elements of this rank's share once.
    """
    (local, peers), (encode_s, decode_s) = ranks, times
    share = codec.payload_numel(numel, _CONTEXT) * codec.wire_dtype.itemsize / max(4 * numel, 1)
    if verb != "all_reduce":
        return share, encode_s + decode_s * (peers if verb == "all_gather_single" else 1)
    if codec.combine is Combine.GATHER:
        return share * peers / 2, encode_s + local * peers * decode_s
    if codec.combine is Combine.SUM and local == 1:
        return share, encode_s + decode_s
    return share, encode_s + decode_s * (local + (peers - 1) / peers)


def _codec_times(spec: str, sample: torch.Tensor) -> list[float]:
    """Returns the seconds, an element, that encoding and decoding take this rank."""
    codec, numel = parse(spec).codec, sample.numel()
    payload = torch.zeros(codec.payload_numel(numel, _CONTEXT), dtype=codec.wire_dtype, device=sample.device)
    residual = torch.zeros_like(sample) if "+ef" in spec else None
    output = torch.zeros_like(sample)
    times = [
        _fastest(lambda: codec.encode(payload, sample, _CONTEXT, residual), sample.device),
        _fastest(lambda: codec.decode(output, payload, _CONTEXT), sample.device),
    ]
    return [each / max(numel, 1) for each in times]


def _inside_time(call: Squeezed, wire: Wire) -> float:
    """Returns the seconds that a host takes to add up, when compression applies between hosts; 0 where it does not."""
    source = call.collective.input
    if wire.inside is None or source is None:
        return 0.0
    inside = wire.inside
    part_numel = source.numel() // inside.world_size
    whole = inside.workspace.take("padded", part_numel * inside.world_size, torch.float32, source.device)
    part = inside.workspace.take("shard", part_numel, torch.float32, source.device)
    return _fastest(lambda: inside.reduce_scatter(part, whole), source.device)


def _fastest(action: Callable[[], None], device: torch.device, rounds: int = 3) -> float:
    """Returns the seconds of the fastest of a few runs of ``action``."""
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start_s)
    return min(times)


def _slowest(mine: list[float], wire: Wire) -> list[float]:
    """Returns, for each measurement, that of the slowest rank; the same on all ranks."""
    slowest: list[float] = wire.tell(torch.tensor(mine, dtype=torch.float64, device="cpu")).amax(0).tolist()
    return slowest
