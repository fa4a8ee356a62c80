"""What the doctor and ``top`` find out of running jobs of this user on this host, from the boards of their ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..monitor.boards import Board, GroupOnBoard, boards_of_host
from ..monitor.standing import main_line, standings_on
from ..monitor.verdict import Verdict, find_culprit

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Job", "answers", "find_jobs", "jobs_table", "no_job", "rank_cells", "stack_lines", "verdicts"]

ANSWER_S = 0.3
COMMAND_CHARACTERS = 100  # of it, at most, are shown
HUNG_S = 1.0  # in a call for so long: worth a verdict


@dataclass
class Job:
    """One job: the boards of its ranks on this host, and how it was started."""

    number: int
    boards: list[Board]
    command: str
    folder: str

    def groups(self) -> dict[int, list[tuple[Board, GroupOnBoard]]]:
        """Returns the open groups of two ranks and more, each with its ranks here."""
        found: dict[int, list[tuple[Board, GroupOnBoard]]] = {}
        for board in self.boards:
            for group in board.groups():
                if group.is_open and group.world_size > 1:
                    found.setdefault(group.members, []).append((board, group))
        return found

    def close(self) -> None:
        """Gives the boards back."""
        for board in self.boards:
            board.close()


def find_jobs(pid: int | None = None) -> list[Job]:
    """Returns the jobs of this user on this host, those with living ranks; or the one that process ``pid`` is in."""
    jobs = [Job(number, boards, *_command(boards)) for number, boards in sorted(boards_of_host().items())]
    for job in jobs:
        if pid is not None and all(board.pid != pid for board in job.boards):
            job.close()
    return [job for job in jobs if pid is None or any(board.pid == pid for board in job.boards)]


def no_job(pid: int | None) -> str:
    """Returns what is said where ``find_jobs`` finds none."""
    what = "no job of this user runs on this host"
    return what if pid is None else f"process {pid} is no rank of a job of this user on this host"


def _command(boards: Sequence[Board]) -> tuple[str, str]:
    """Returns the command of a job and the folder it runs in; paths of that folder are written without it."""
    for board in boards:
        try:
            words = Path(f"/proc/{board.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            folder = os.readlink(f"/proc/{board.pid}/cwd")
        except OSError:
            continue
        if words[0]:
            shown = [os.path.basename(words[0]), *(word.removeprefix(folder + "/") for word in words[1:] if word)]
            return " ".join(shown)[:COMMAND_CHARACTERS], folder
    return "?", ""


def verdicts(job: Job, hung_s: float = HUNG_S) -> list[tuple[str, float, Verdict]]:
    """Returns (group, seconds waited, verdict) of each group with a rank that has been in a call for ``hung_s``."""
    found = []
    now_ns = time.monotonic_ns()
    for members, entries in job.groups().items():
        waits = []
        for board, group in entries:
            record = board.latest(group)
            if record is not None and not record.end_ns and board.is_alive:
                waits.append((now_ns - record.start_ns) / 1e9)
        if waits and max(waits) >= hung_s:
            name, world_size = entries[0][1].name, entries[0][1].world_size
            verdict = find_culprit(name, standings_on(job.boards, members, world_size))
            found.append((name, max(waits), verdict))
    return found


def answers(job: Job) -> list[str | None]:
    """Asks all processes at once where they stand."""
    with ThreadPoolExecutor(max(1, len(job.boards))) as pool:
        return list(
            pool.map(lambda board: board.ask(ANSWER_S) if board.state not in ("", "T", "t") else None, job.boards)
        )


def jobs_table(job: Job, told: Sequence[str | None]) -> Table:
    """Returns a row a rank and group: what it is in, since when, for whom it waits, and where its Python stands."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    title = Text(f"job of {job.boards[0].world_size} ranks: {job.command}")
    table = Table(title=title, title_justify="left", box=None)
    for column in ("rank", "pid", "process", "group", "call", "for", "waits for", "Python"):
        table.add_column(column, overflow="fold")
    for board, answer in zip(job.boards, told, strict=True):
        is_asked = board.state not in ("", "T", "t")
        line = main_line(answer) or ("does not answer" if is_asked and answer is None else "")
        groups: list[GroupOnBoard | None] = [each for each in board.groups() if each.is_open]
        for group in groups or [None]:
            cells, style = rank_cells(board, group)
            table.add_row(*cells, escape(line), style=style)
    return table


def rank_cells(board: Board, group: GroupOnBoard | None) -> tuple[list[str], str]:
    """Returns rank, pid, state, group, call, since when, whom it waits for, as rich's markup; and the row's style."""
    from rich.markup import escape

    state = {"": "dead", "T": "stopped", "t": "stopped"}.get(board.state, "alive")
    name = "-" if group is None else escape(f"{group.name} ({group.transport})")
    style = {"dead": "red", "stopped": "yellow"}.get(state, "")
    return [str(board.rank), str(board.pid), state, name, *_cells(board, group)], style


def _cells(board: Board, group: GroupOnBoard | None) -> tuple[str, str, str]:
    record = None if group is None else board.latest(group)
    if record is None:
        return "none yet", "", ""
    now_ns = time.monotonic_ns()
    if record.end_ns:
        return f"after {record.verb} #{record.seq}", _seconds(now_ns - record.end_ns), ""
    waits = f"rank {record.peer}" if record.peer >= 0 else "any rank" if record.peer == -2 else ""
    return f"in {record.verb} #{record.seq}", _seconds(now_ns - record.start_ns), waits


def _seconds(nanoseconds: int) -> str:
    return f"{max(0, nanoseconds) / 1e9:.1f} s"


def stack_lines(answer: str | None, folder: str) -> list[str]:
    """Returns the stacks of a process as lines, the innermost frame first, as ``stacks`` told them."""
    try:
        threads = json.loads(answer or "[]")
    except ValueError:
        return ["(its stacks were too long for the board)"]
    lines = []
    for entry in threads:
        lines.append(f"thread {entry['thread']}{' (main)' if entry['is_main'] else ''}")
        lines += [f"    {file.removeprefix(folder + '/')}:{line} in {name}" for file, line, name in entry["frames"]]
    return lines
