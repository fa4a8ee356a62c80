"""Why a call is carried as it is: the rule that chose, and what the other algorithms would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import torch

from ..algorithms import tuned
from ..algorithms.cost import Level, LinkModel
from ..algorithms.executor import Collective
from ..algorithms.selection import Choice
from ..errors import ConfigError
from ..ops.reduce import reduce_supported
from ..sizes import format_bytes
from ..types import VERBS, ReduceOp
from .context import OpLike, parse_op, resolve
from .group import Group

__all__ = ["Explanation", "explain"]

# For groups that nobody has tuned: about what two processes of one host do, and a 10 Gbit/s network.
_GUESSED = LinkModel(
    host=Level(latency_s=5e-6, bytes_per_s=4e9, shared_bytes_per_s=1e10),
    rack=Level(latency_s=3e-5, bytes_per_s=1.25e9, shared_bytes_per_s=1.25e9),
    far=Level(latency_s=5e-5, bytes_per_s=1.25e9, shared_bytes_per_s=1.25e9),
    added_bytes_per_s=1e10,
    message_s=2e-6,
)
_REDUCES = ("all_reduce", "reduce", "reduce_scatter_single")
_NEAR = log(2.1)  # a time measured at a size within this factor is shown


class Row(NamedTuple):
    """What one algorithm costs: predicted by the model, and measured at ``measured_bytes``; None where that is not
    known."""

    algorithm: str
    predicted_us: float | None
    measured_us: float | None
    measured_bytes: int | None


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns; ``str()`` gives a paragraph and a table."""

    verb: str
    nbytes: int
    algorithm: str
    reason: str
    is_tuned: bool
    rows: tuple[Row, ...]
    compression: str = ""  # what compresses such calls, and why

    def __str__(self) -> str:
        lines = [self.reason, "", f"  {'algorithm':<22} {'predicted':>12} {'measured':>12}"]
        for row in self.rows:
            mark = "*" if row.algorithm == self.algorithm else " "
            measured = _us(row.measured_us)
            at = f"  at {format_bytes(row.measured_bytes)}" if row.measured_bytes not in (None, self.nbytes) else ""
            lines.append(f"{mark} {row.algorithm:<22} {_us(row.predicted_us):>12} {measured:>12}{at}")
        return "\n".join(lines + (["", self.compression] if self.compression else []))


def explain(
    verb: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
    *,
    op: OpLike = ReduceOp.SUM,
    algorithm: str | None = None,
    compression: Any = None,
) -> Explanation:
    """Says which algorithm carries ``verb`` with a largest buffer of ``numel`` elements, why, and what others cost.

    Nothing is sent. ``verb`` is a name of ``types.VERBS``. Predictions come from the links that `pycomm tune` fitted
    for such groups, else from a guess, and then say so; they are those of an uncompressed call. ``compression="auto"``
    adds what auto decided for such calls in this group, with its numbers. Raises ConfigError and PlanError as the call
    itself would.
    """
    g = resolve(group)
    if verb not in VERBS:
        raise ConfigError(f"explain: unknown collective {verb!r}; known: {', '.join(VERBS)}")
    parsed = parse_op(op)[0] if verb in _REDUCES else None
    if parsed is not None and not reduce_supported(dtype, parsed):
        raise ConfigError(f"explain: op {parsed.name} is not defined on {dtype}")
    call = Collective(verb=verb, input=torch.empty(numel, dtype=dtype, device="meta"), op=parsed)
    if verb in ("gather", "scatter"):
        call = call._replace(input=torch.empty(numel // g.world_size, dtype=dtype, device="meta"))
    compressed_by = "" if compression is None else g.compression.explain(verb, numel, dtype, parsed, compression)
    choice = g.engine.choose(call, algorithm)
    nbytes = numel * dtype.itemsize
    place = (g.transport.name, g.world_size, len(g.engine.selector.topology.hosts))
    stored = tuned.read_place(place)
    links, measured = (_GUESSED, []) if stored is None else stored
    is_native = g.transport.supports(verb, dtype, parsed)
    names = [*(["native"] if is_native else []), *g.engine.selector.candidates(verb)]
    names = list(dict.fromkeys([choice.name, *names]))
    rows = [_row(g, name, verb, nbytes, links, measured) for name in names]
    rows.sort(key=lambda row: row.measured_us or row.predicted_us or 0.0)
    reason = _reason(g, verb, nbytes, choice, place, stored is not None)
    return Explanation(verb, nbytes, choice.name, reason, stored is not None, tuple(rows), compressed_by)


def _row(g: Group, name: str, verb: str, nbytes: int, links: LinkModel, measured: Sequence[dict[str, Any]]) -> Row:
    predicted_us = None
    if name != "native" and verb != "barrier":
        topology, segment_bytes = g.engine.selector.topology, g.transport.segment_bytes
        predicted_us = 1e6 * tuned.predict_call(name, verb, topology, links, nbytes, segment_bytes=segment_bytes)
    near = [
        (abs(log(each["nbytes"] / nbytes)), each)
        for each in measured
        if nbytes and each["verb"] == verb and each["algorithm"] == name
    ]
    distance, nearest = min(near, key=lambda pair: pair[0], default=(_NEAR, None))
    if nearest is None or distance >= _NEAR:
        return Row(name, predicted_us, None, None)
    return Row(name, predicted_us, 1e6 * nearest["seconds"], nearest["nbytes"])


def _reason(g: Group, verb: str, nbytes: int, choice: Choice, place: tuned.Place, is_tuned: bool) -> str:
    what = f"{verb} of {format_bytes(nbytes)} over {place[0]}, {place[1]} ranks on {place[2]} host(s), is carried by"
    who = "the transport's own collective (native)" if choice.name == "native" else choice.name
    why = "as the caller asks" if choice.rule is None else f"by the rule `{choice.rule}` ({choice.rule.source})"
    short = " on the short cut" if choice.name == "native" and verb in g.transport.fast and choice.rule else ""
    source = (
        "Predictions are from the links that `pycomm tune` fitted for such groups."
        if is_tuned
        else "Nobody has tuned such groups here, so predictions are from guessed links: run `pycomm tune`."
    )
    return f"{what} {who}{short}, {why}. {source}"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} us" if value < 1e4 else f"{value / 1e3:.1f} ms"
