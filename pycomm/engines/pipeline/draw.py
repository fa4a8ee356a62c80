"""A simulated schedule as text and as a picture: one row a rank, time to the right."""

from __future__ import annotations

from html import escape

from .actions import Kind, Schedule
from .simulate import Simulation

__all__ = ["to_svg", "to_text"]

_COLORS = {Kind.F: "#9cc3ea", Kind.B: "#a8d5a2", Kind.I: "#a8d5a2", Kind.W: "#f3c98b"}
_ROW, _UNIT, _LEFT = 30, 22, 60


def to_text(schedule: Schedule, simulation: Simulation, columns: int = 120) -> str:
    """Returns a line a rank: F, B, I or W with the microbatch's last digit, '.' where it waits; at most ``columns``."""
    shortest_s = min((end - start for start, end in simulation.spans.values() if end > start), default=1.0)
    cell_s = max(shortest_s / 2, simulation.total_s / columns)
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells = ["."] * (round(simulation.total_s / cell_s) + 1)
        for action in row:
            if action in simulation.spans:
                start, end = (round(moment / cell_s) for moment in simulation.spans[action])
                letters = f"{action.kind.value}{action.microbatch % 10}"
                for place in range(start, end):
                    cells[place] = letters[min(place - start, 1)]
        lines.append(f"rank {rank}: {''.join(cells[:-1])}")
    return "\n".join([*lines, _summary(schedule, simulation)])


def to_svg(schedule: Schedule, simulation: Simulation) -> str:
    """Returns an SVG of the schedule: blue F, green B or I, orange W; dark rims are the later stages of a rank."""
    shortest_s = min((end - start for start, end in simulation.spans.values() if end > start), default=1.0)
    scale = _UNIT / shortest_s
    width, height = _LEFT + simulation.total_s * scale + 10, _ROW * schedule.ranks + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        f'<text x="4" y="16">{escape(_summary(schedule, simulation))}</text>',
    ]
    for rank, row in enumerate(schedule.rows):
        y = 24 + rank * _ROW
        parts.append(f'<text x="4" y="{y + 18}">rank {rank}</text>')
        first = min(schedule.stages_of(rank))
        for action in row:
            if action not in simulation.spans:
                continue
            start, end = simulation.spans[action]
            x, wide = _LEFT + start * scale, (end - start) * scale
            rim = "#fff" if action.stage == first else "#333"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW - 4}" fill="{_COLORS[action.kind]}" '
                f'stroke="{rim}"/><text x="{x + wide / 2:.1f}" y="{y + 17}" text-anchor="middle">'
                f"{action.microbatch}</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _summary(schedule: Schedule, simulation: Simulation) -> str:
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"bubble {simulation.bubble:.1%}, at most {max(simulation.peak_activations)} activations on a rank"
    )
