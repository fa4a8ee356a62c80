"""Runs PyTorch's own suite, ``torch.testing._internal.distributed.distributed_test``, over pycomm and over gloo.

    python tests/conformance/torch_suite.py                          # two ranks, all tests
    python tests/conformance/torch_suite.py -n 4 --only 'test_ddp'   # those whose names match

Every test runs in a process of its own, its ranks in others, with a deadline. The suite asks by name whether it runs
over gloo, for what it tests and how; it is told so, and only the default group that a test gets is pycomm's. A test
that does not pass over pycomm is run over gloo. The result is a table of the tests that differ; the exit code is 1 if
one that gloo passes is neither passed nor listed in ``EXCEPTIONS`` with its reason. Some tests are skipped over gloo as
the suite believes that MPI alone can do what they test; these are run over pycomm at the end, with the suite told that
it runs over MPI. Needs ``pip install expecttest``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Why a test that gloo passes cannot apply to pycomm, one by one.
_MONITORED = "dist.monitored_barrier refuses every backend that is not called gloo; the group's own method works"
EXCEPTIONS = {
    "test_get_backend": "it compares the backend's name with gloo, as which the suite was loaded",
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
}


# What the suite says as it skips, over gloo, a test of something that pycomm has too.
ONLY_MPI = "Only MPI supports"


class Outcome(NamedTuple):
    """How a test ended: "passed", "skipped", "failed" or "late"; ``text`` says why."""

    kind: str
    text: str = ""
    s: float = 0.0


def load_suite(backend: str = "gloo") -> Any:
    """Returns the suite's module, loaded as for ``backend``, anew: it asks for that while it is loaded."""
    os.environ["BACKEND"] = backend
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    name = "torch.testing._internal.distributed.distributed_test"
    sys.modules.pop(name, None)
    suite = importlib.import_module(name)
    # Asked for once more by what skips tests of subgroups: below eight ranks, but for MPI. They need three.
    os.environ["BACKEND"] = "gloo" if int(os.environ["WORLD_SIZE"]) < 3 else "mpi"
    return suite


def test_class(suite: Any, backend: str) -> type[unittest.TestCase]:
    """Returns the suite's tests as a class whose ranks are forked: they need not import torch again."""
    import torch
    import torch.distributed as dist

    import pycomm.torch_backend

    pycomm.torch_backend.register()

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
            init = dist.init_process_group

            def init_other(**arguments: Any) -> None:
                dist.init_process_group = init  # what the test itself makes later is its own affair
                init(**{**arguments, "backend": backend})

            dist.init_process_group = init_other
            super()._run(rank, test_name, file_name, pipe, **options)

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Tests


def run_one(name: str, backend: str, suite: Any, limit_s: float) -> Outcome:
    """Runs one test in a process of its own, which leads a session that is ended at the deadline."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(name, backend, suite, folder)
        is_late = not _ends(pid, start + limit_s)
        with contextlib.suppress(ProcessLookupError):  # its own session: the test and its ranks, nothing else
            os.killpg(pid, signal.SIGKILL)
        if is_late:
            os.waitpid(pid, 0)
        spent_s = time.monotonic() - start
        printed = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        if is_late:
            return Outcome("late", f"not done after {limit_s:g} s\n{printed}", spent_s)
        if not report.exists():
            return Outcome("failed", f"its process died\n{printed}", spent_s)
        kind, text = json.loads(report.read_text())
        return Outcome(kind, f"{text}\n{printed}" if kind == "failed" else text, spent_s)


def _ends(pid: int, deadline: float) -> bool:
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _child(name: str, backend: str, suite: Any, folder: str) -> None:
    """Runs a test and writes its outcome; never returns."""
    os.setsid()
    log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TEMP_DIR"] = folder
    tests = test_class(suite, backend)
    tests.setUpClass()
    result = unittest.TestResult()
    tests(name).run(result)
    if result.skipped:
        outcome = ("skipped", result.skipped[0][1])
    elif result.wasSuccessful():
        outcome = ("passed", "")
    else:
        outcome = ("failed", (result.errors + result.failures)[0][1])
    Path(folder, "report").write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)


def names(suite: Any, pattern: str) -> list[str]:
    """Returns the names of the suite's tests that match."""
    found = unittest.TestLoader().getTestCaseNames(suite.DistributedTest._DistTestBase)
    return [name for name in found if re.search(pattern, name)]


def compare(suite: Any, chosen: list[str], limit_s: float) -> Iterator[tuple[str, Outcome, Outcome | None]]:
    """Yields each test with its outcome over pycomm and, where that is not "passed", over gloo."""
    for name in chosen:
        mine = run_one(name, "pycomm", suite, limit_s)
        gloo = None if mine.kind == "passed" else run_one(name, "gloo", suite, limit_s)
        yield name, mine, gloo


def record(path: Path | None, ranks: int, name: str, mine: Outcome, gloo: Outcome | None) -> None:
    """Adds a line of JSON to the file ``path``, if there is one."""
    if path is not None:
        with path.open("a") as file:
            print(json.dumps({"ranks": ranks, "test": name, "pycomm": mine, "gloo": gloo}), file=file)


def describe(name: str, mine: Outcome, gloo: Outcome | None, is_bad: bool) -> str:
    """Returns the line about a test."""
    if gloo is None or gloo.kind == mine.kind:
        return f"{name}: {mine.kind} ({mine.s:.1f} s)" + (f": {mine.text}" if mine.kind == "skipped" else "")
    reason = EXCEPTIONS.get(name) or mine.text.strip().splitlines()[-1:]
    return f"{'BAD' if is_bad else 'differs'} {name}: pycomm {mine.kind}, gloo {gloo.kind}: {reason}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--only", default="", help="a regular expression for the names")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--verbose", action="store_true", help="what the failing tests printed")
    parser.add_argument("--json", type=Path, help="a file that gets a line for each test: its outcomes and their texts")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    os.environ["WORLD_SIZE"] = str(arguments.n)
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        os.environ["TEMP_DIR"] = folder  # the suite opens a lock there as it is loaded; each test has its own
        return run_all(arguments)


def run_all(arguments: argparse.Namespace) -> int:
    """Runs the tests, prints how each ended, and returns the exit code."""
    suite = load_suite()
    counts: Counter[str] = Counter()
    bad, only_mpi = 0, []
    for name, mine, gloo in compare(suite, names(suite, arguments.only), arguments.limit):
        counts[f"{mine.kind} over pycomm" + ("" if gloo is None else f", {gloo.kind} over gloo")] += 1
        is_bad = gloo is not None and gloo.kind == "passed" and name not in EXCEPTIONS
        bad += is_bad
        if mine.text.startswith(ONLY_MPI):
            only_mpi.append(name)
        print(describe(name, mine, gloo, is_bad), flush=True)
        if arguments.verbose and is_bad:
            print(mine.text, flush=True)
        record(arguments.json, arguments.n, name, mine, gloo)
    suite = load_suite("mpi") if only_mpi else suite
    for name in only_mpi:
        mine = run_one(name, "pycomm", suite, arguments.limit)
        is_bad = mine.kind not in ("passed", "skipped")
        bad += is_bad
        counts[f"{mine.kind} over pycomm of those that the suite keeps for MPI"] += 1
        print(f"{'BAD ' * is_bad}{name}, told that it is MPI: {mine.kind}: {mine.text[-2000:]}", flush=True)
        record(arguments.json, arguments.n, f"{name} (as for MPI)", mine, None)
    print(f"\n{arguments.n} ranks")
    for kind, count in sorted(counts.items()):
        print(f"{count:4} {kind}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
