"""Where the ranks of a group stand, read from the boards of one host."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from types import FrameType

from .boards import Board, CallRecord, GroupOnBoard
from .verdict import Standing

__all__ = ["main_line", "stacks", "standing_of", "standings_on"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FRAMES = 40  # of each thread, the innermost
_ANSWER_S = 0.2


def stacks() -> str:
    """Returns where the threads of this process stand: JSON, ``[{"thread", "is_main", "frames": [[file, line,
    name]]}]``.

    Frames go from the innermost outwards. The thread that asks is left out.
    """
    names = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            thread = names.get(ident)
            is_main = thread is threading.main_thread()
            entry = {"thread": thread.name if thread else str(ident), "is_main": is_main, "frames": _frames(frame)}
            found.append(entry)
    return json.dumps(sorted(found, key=lambda entry: not entry["is_main"]))


def _frames(frame: FrameType | None) -> list[list[object]]:
    rows: list[list[object]] = []
    while frame is not None and len(rows) < _FRAMES:
        rows.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return rows


def main_line(answer: str | None) -> str:
    """Returns where the main thread stands, by an answer of ``stacks``: its innermost line outside of pycomm."""
    try:
        threads = json.loads(answer or "")
    except ValueError:  # cut off: too many threads for the board
        return ""
    frames: list[tuple[str, int, str]] = next((entry["frames"] for entry in threads if entry["is_main"]), [])
    for file, line, name in frames:
        if not file.startswith(_PACKAGE):
            return f"{os.path.basename(file)}:{line} in {name}"
    return ""


def standing_of(board: Board, group: GroupOnBoard, *, with_line: bool) -> Standing:
    """Returns where the rank stands whose board this is; ``with_line`` asks its process, which may take 0.2 s."""
    latest = board.latest(group)
    state = {"": "dead", "T": "stopped", "t": "stopped"}.get(board.state, "alive")
    elsewhere = ""
    for other in board.groups():
        record = board.latest(other) if other.is_open and other.index != group.index else None
        if record is not None and not record.end_ns:
            elsewhere = f"{record.verb} #{record.seq} on group {other.name!r}"
        elif other.is_open and other.mail_peer is not None:
            whom = f"rank {other.mail_peer}" if other.mail_peer >= 0 else "any rank"
            elsewhere = elsewhere or f"a wait for a message of {whom} on group {other.name!r}"
    line = main_line(board.ask(_ANSWER_S)) if with_line and state == "alive" else ""
    return Standing(
        rank=group.rank,
        pid=board.pid,
        state=state,
        seq=group.seq,
        verb=latest.verb if latest else "",
        call=_call(latest),
        is_in=latest is not None and not latest.end_ns,
        has_failed=latest is not None and latest.has_failed,
        peer=latest.peer if latest else -1,
        elsewhere=elsewhere,
        line=line,
    )


def _call(record: CallRecord | None) -> str:
    return "" if record is None else record.describe()


def standings_on(boards: Iterable[Board], members: int, world_size: int) -> list[Standing]:
    """Returns where the ranks of the group ``members`` (its number on the boards) stand, one entry a rank.

    Those that seem to be behind are asked for their Python line, all at once; not where a rank is dead, which says
    it all and should be told soon. Ranks without a board here are "unknown".
    """
    found: dict[int, tuple[Board, GroupOnBoard]] = {}
    for board in boards:
        for group in board.groups():
            if group.members == members and (group.is_open or group.rank not in found):
                found[group.rank] = board, group
    standings = [Standing(rank, 0, "unknown") for rank in range(world_size)]

    def look(rank: int, with_line: bool) -> None:
        standings[rank] = standing_of(*found[rank], with_line=with_line)

    for rank in found:
        look(rank, with_line=False)
    newest = max((group.seq for _, group in found.values()), default=0)
    behind = [rank for rank, (_, group) in found.items() if group.seq < newest]
    if not any(standing.state == "dead" for standing in standings):
        _run_all([threading.Thread(target=look, args=(rank, True), daemon=True) for rank in behind])
    return standings


def _run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
