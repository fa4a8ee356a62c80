"""A picture of a plan: the ranks of each round side by side, an arrow for each message, a colour for each chunk."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithms.plan import Copy, Plan, Reduce, Send, Space
from ...errors import ConfigError
from .rounds import Shown, busy_rounds, chunk_name, colour_of

if TYPE_CHECKING:
    from ...algorithms.plan import Round

__all__ = ["draw", "require_matplotlib"]

_INK, _PALE = "#22303c", "#e8ecef"
_RADIUS, _RIM = 0.2, 0.24
_PANELS_IN_A_ROW = 6
_MAX_PANELS = 48


def require_matplotlib() -> None:
    """Raises ConfigError if there will be no way to draw."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--svg and --png need matplotlib, and it is not installed: pip install 'pycomm[plot]'")


def draw(shown: Shown, path: Path, kind: str) -> None:
    """Writes the picture to ``path``; ``kind`` is "svg" or "png". Raises ConfigError if there are too many rounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pycomm"  # the same picture is the same file
    import matplotlib.pyplot as plt

    rounds = [(number, each) for number, each in busy_rounds(shown) if any(round_.transfers for round_ in each)]
    if not 0 < len(rounds) <= _MAX_PANELS:
        raise ConfigError(
            f"{shown.name} has {len(rounds)} rounds; a picture holds 1 to {_MAX_PANELS}: choose other ranks"
        )
    final = [_last_sum(plan) for plan in shown.plans]
    seats = _seats(shown)
    width, height = (max(axis) - min(axis) + 1.1 for axis in zip(*seats))
    rows = math.ceil(len(rounds) / max(1, min(len(rounds), _PANELS_IN_A_ROW, int(14 / width))))
    columns = math.ceil(len(rounds) / rows)
    scale = 0.72 if shown.topology.world_size <= 16 else 0.9  # inches
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, layout="constrained",
        figsize=(max(6.0, scale * width * columns), (scale * height + 0.3) * rows + 0.4),
    )  # fmt: skip
    for panel in axes.flat:
        panel.set_axis_off()
    for panel, (number, each) in zip(axes.flat, rounds):
        _draw_round(panel, seats, shown, each, {rank for rank in range(len(each)) if final[rank] == number})
        panel.set_title(f"round {number}", fontsize=9, color="#6b7a86", pad=2)
    counts = shown.proof.counts
    figure.suptitle(
        f"{shown.name}: {shown.verb} of {shown.topology.world_size} ranks, {counts.rounds} rounds, "
        f"{counts.sent} S sent by the busiest",
        fontsize=10, color=_INK, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)


def _seats(shown: Shown) -> list[tuple[float, float]]:
    """Returns where each rank stands: one host is a circle; several are rows, so that likes face each other."""
    hosts = shown.topology.hosts
    n = shown.topology.world_size
    if len(hosts) == 1:
        reach = max(1.0, n / 7)
        angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
        return [(reach * math.cos(angle), reach * math.sin(angle)) for angle in angles]
    seats = {rank: (1.15 * local, -1.5 * host) for host, ranks in enumerate(hosts) for local, rank in enumerate(ranks)}
    return [seats[rank] for rank in range(n)]


def _last_sum(plan: Plan) -> int:
    """Returns the round in which the rank completes what it adds up for the output; -1 if it does not."""
    sums = (number for number, round_ in enumerate(plan.rounds) for each in round_.local if _is_output_sum(each))
    return max(sums, default=-1)


def _is_output_sum(action: Reduce | Copy) -> bool:
    return isinstance(action, Reduce) and action.output.space is Space.OUTPUT


def _draw_round(
    panel: Any, seats: list[tuple[float, float]], shown: Shown, rounds: list[Round], done: set[int]
) -> None:
    from matplotlib.patches import Circle

    xs, ys = zip(*seats)
    panel.set_xlim(min(xs) - 0.55, max(xs) + 0.55)
    panel.set_ylim(min(ys) - 0.55, max(ys) + 0.55)
    panel.set_aspect("equal")
    if len(shown.topology.hosts) > 1:
        _draw_hosts(panel, seats, shown)
    messages = sum(isinstance(transfer, Send) for round_ in rounds for transfer in round_.transfers)
    for rank, round_ in enumerate(rounds):
        sends = [transfer for transfer in round_.transfers if isinstance(transfer, Send)]
        by_peer: dict[int, list[Send]] = {}
        for send in sends:
            by_peer.setdefault(send.peer, []).append(send)
        for peer, group in by_peer.items():
            is_answered = any(isinstance(each, Send) and each.peer == rank for each in rounds[peer].transfers)
            bend = -0.2 if len(shown.topology.hosts) > 1 else _bend(rank, peer, seats, is_answered)
            _draw_message(panel, (seats[rank], seats[peer]), group, bend, messages <= 2 * len(seats))
    for rank, (x, y) in enumerate(seats):
        is_busy = any(rounds[rank].transfers)
        added = [action.output for action in rounds[rank].local if isinstance(action, Reduce)]
        edge = colour_of(added[0]) if added else (_INK if is_busy else "#b8c2ca")
        is_done = rank in done
        face = edge if is_done else "white"
        panel.add_patch(
            Circle((x, y), _RADIUS, facecolor=face, edgecolor=edge, linewidth=2 if added else 1.1, zorder=3)
        )
        ink = "white" if is_done else (_INK if is_busy else "#9aa6af")
        panel.text(x, y, str(rank), ha="center", va="center_baseline", fontsize=9, color=ink, zorder=4)


def _draw_hosts(panel: Any, seats: list[tuple[float, float]], shown: Shown) -> None:
    from matplotlib.patches import FancyBboxPatch

    for ranks in shown.topology.hosts:
        xs, ys = zip(*(seats[rank] for rank in ranks))
        left, bottom = min(xs) - _RADIUS, min(ys) - _RADIUS
        box = FancyBboxPatch(
            (left, bottom), max(xs) + _RADIUS - left, max(ys) + _RADIUS - bottom,
            boxstyle="round,pad=0.07,rounding_size=0.12", facecolor="#f5f7f9", edgecolor=_PALE, zorder=0,
        )  # fmt: skip
        panel.add_patch(box)


def _bend(rank: int, peer: int, seats: list[tuple[float, float]], is_answered: bool) -> float:
    """Neighbours on the circle talk along it, others across, so that no arrow crosses a rank; two ways stay apart."""
    (x, y), (u, v) = seats[rank], seats[peer]
    turn = y * u - x * v  # above 0: clockwise
    is_neighbour = (rank - peer) % len(seats) in (1, len(seats) - 1)
    if is_answered and (is_neighbour or abs(turn) < 1e-9):
        return -0.2
    reach = 0.2 if not is_answered else 0.12 if rank < peer else 0.42
    return -reach if (turn > 0) == is_neighbour else reach


def _draw_message(panel: Any, way: Any, sends: list[Send], bend: float, is_named: bool) -> None:
    """An arrow with the chunks' names, bent to the left of its way if ``bend`` is below 0."""
    from matplotlib.patches import FancyArrowPatch

    (x, y), (u, v) = way
    length = math.hypot(u - x, v - y)
    # Of an arc that leaves and arrives on the rim of the ranks' circles.
    tilt = math.atan2(v - y, u - x)
    lean = math.atan(-2 * bend)
    out, home = tilt + lean, tilt - lean
    tail = x + _RIM * math.cos(out), y + _RIM * math.sin(out)
    head = u - _RIM * math.cos(home), v - _RIM * math.sin(home)
    colour = colour_of(sends[0].chunk)
    arrow = FancyArrowPatch(
        tail, head, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=10,
        shrinkA=0, shrinkB=0, linewidth=1.8, color=colour, zorder=2,
    )  # fmt: skip
    panel.add_patch(arrow)
    if not is_named or len(sends) > 2:
        return
    name = ",".join(chunk_name(send.chunk) for send in sends)
    # The middle of the curve lies half of bend * length beside the middle of the line.
    beside = (-bend / 2 * length - math.copysign(0.16, bend)) / max(length, 0.1)
    panel.text(
        (x + u) / 2 - beside * (v - y), (y + v) / 2 + beside * (u - x), name,
        ha="center", va="center_baseline", fontsize=7.5, color=colour, fontweight="bold", zorder=5,
    )  # fmt: skip
