"""Prints what is installed, built and missing, what the host offers, and what running jobs wait for.

A job that hangs needs no preparation: `pycomm doctor --jobs` in another terminal of the same user says for every group
who is to blame, and where the Python of each rank stands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from . import _facts, _facts_build
from ._arguments import check_output, positive_int
from ._facts import Fact

__all__ = ["collect", "main"]

SECTIONS: dict[str, Callable[[], list[Fact]]] = {
    "versions": _facts.versions,
    "built": _facts_build.built,
    "CUDA": _facts_build.cuda,
    "extras": _facts.extras,
    "launcher": _facts.launcher,
    "host": _facts.host,
    "environment": _facts.environment,
}


def collect() -> dict[str, list[Fact]]:
    """Returns every section's facts. A section that fails says so in a fact: the doctor must not fall ill."""
    report = {}
    for title, section in SECTIONS.items():
        try:
            report[title] = section()
        except Exception as error:
            report[title] = [Fact(title, None, f"could not be examined: {type(error).__name__}: {error}")]
    return report


def to_json(report: dict[str, list[Fact]]) -> str:
    """Returns the report as JSON: ``{section: {fact: value}, "hints": {"section.fact": what to do}}``."""
    plain: dict[str, object] = {title: {fact.name: fact.value for fact in facts} for title, facts in report.items()}
    plain["hints"] = {f"{title}.{fact.name}": fact.hint for title in report for fact in report[title] if fact.hint}
    return json.dumps(plain, indent=2)


def show(report: dict[str, list[Fact]]) -> None:
    """Prints the report as one table per section; what is missing is yellow and its remedy stands beside it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=_width())
    for title, facts in report.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(min_width=22, no_wrap=True)
        table.add_column(overflow="fold")
        for fact in facts:
            value = Text(_words(fact.value), style="yellow" if fact.value in (None, False) else "")
            if fact.hint:
                value.append(f"  {fact.hint}", style="dim" if fact.value not in (None, False) else "yellow")
            table.add_row(Text(f"  {fact.name}"), value)
        console.print(table)
        console.print()


def show_jobs(with_stacks: bool, pid: int | None = None, svg: str | None = None) -> int:
    """Prints the jobs of this user on this host, and who keeps them waiting; returns how many jobs there are.

    ``pid`` narrows it to the job of that process; ``svg`` is a file to draw what is printed into.
    """
    from rich.console import Console
    from rich.markup import escape

    from ..errors import NativeUnavailableError
    from . import _jobs

    console = Console(width=_width(), record=svg is not None)
    try:
        jobs = _jobs.find_jobs(pid)
    except NativeUnavailableError as error:
        console.print(str(error))
        return 0
    for job in jobs:
        told = _jobs.answers(job)
        console.print(_jobs.jobs_table(job, told))
        for group, waited_s, verdict in _jobs.verdicts(job):
            console.print(
                f"\n[bold]group {escape(repr(group))} has waited for {waited_s:.1f} s[/]: {escape(verdict.text)}",
                highlight=False,
            )
        for board, answer in zip(job.boards, told, strict=True) if with_stacks else ():
            console.print(f"\nrank {board.rank} (pid {board.pid})", style="bold", highlight=False)
            console.print(
                "\n".join(_jobs.stack_lines(answer, job.folder)) or "no answer", markup=False, highlight=False
            )
        console.print()
        job.close()
    if not jobs:
        console.print(_jobs.no_job(pid), highlight=False)
    if svg is not None:
        console.save_svg(svg, title="pycomm doctor --jobs")
    return len(jobs)


def _width() -> int | None:
    """A pipe has no width: give long values room instead of cutting them at 80 columns."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160


def _words(value: object) -> str:
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report and returns 0, or 1 if the native core is not there."""
    parser = argparse.ArgumentParser(prog="pycomm doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--jobs", action="store_true", help="only the jobs that run, with the stacks of their ranks")
    parser.add_argument("--pid", type=positive_int, help="with --jobs: only the job that this process is a rank of")
    parser.add_argument("--svg", help="also draw what --jobs prints into this file")
    args = parser.parse_args(None if argv is None else list(argv))
    if not args.jobs and (args.svg or args.pid is not None):
        parser.error("--pid and --svg are of --jobs; give it too")
    if args.jobs and args.json:
        parser.error("--json prints the report, and --jobs tables; give one of them")
    check_output("--svg", args.svg, (".svg",))
    if args.jobs:
        return 0 if show_jobs(True, args.pid, args.svg) else 1
    report = collect()
    if args.json:
        print(to_json(report))
    else:
        show(report)
        show_jobs(with_stacks=False)
    return 0 if any(fact.name == "native core" and fact.value for fact in report["built"]) else 1
