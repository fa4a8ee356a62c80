"""Jobs across two hosts of this machine (pycomm/launch/two_hosts.py): what benchmarks/two_hosts.py does, in small."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pycomm.errors import ConfigError
from pycomm.launch.two_hosts import TwoHosts, unavailable
from warm_python import warm_python

REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
JOBS = Path(__file__).parent / "jobs"
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "two_hosts.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts(rate="1gbit") as made:
        yield made


def run(hosts: TwoHosts, command: Sequence[str], ranks: Sequence[int], timeout_s: float = 900) -> list[tuple[int, str]]:
    """Returns (exit code, what it printed) of each rank."""
    processes = hosts.start_job(command, ranks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + timeout_s
    ended = []
    for process in processes:
        try:
            printed = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            hosts.kill(process)
            printed = process.communicate()[0] + f"\nstill running after {timeout_s} s"
        ended.append((process.returncode, printed))
    return ended


def reports(ended: list[tuple[int, str]]) -> list[dict[str, Any]]:
    for rank, (code, printed) in enumerate(ended):
        assert code == 0, f"rank {rank}: exit code {code}\n{printed}"
    return [json.loads(printed.splitlines()[-1]) for _, printed in ended]


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)])
def test_ranks_on_two_hosts(hosts: TwoHosts, ranks: tuple[int, int]) -> None:
    found = reports(run(hosts, [warm_python(), str(JOBS / "hosts.py")], ranks))
    first, whole = list(range(ranks[0])), list(range(sum(ranks)))
    for report in found:
        assert report["transport"] == "mixed"
        assert report["hosts"] == [first, whole[ranks[0] :]]
        assert report["checksums"] == found[0]["checksums"], "ranks differ in bits"
    assert [report["local_rank"] for report in found] == [*range(ranks[0]), *range(ranks[1])]
    assert found[0]["sources"] == whole[1:]
    assert found[-1]["groups"] == {"column": "torch", "all": "mixed"}
    assert found[0]["groups"] == {"host": "shm", "column": "torch", "all": "mixed"}


def test_a_death_reaches_every_rank(hosts: TwoHosts) -> None:
    *others, (code, printed) = run(hosts, [warm_python(), str(JOBS / "hosts.py"), "die"], (2, 2))
    assert code == 9, printed
    assert [report["rank"] for report in reports(others)] == [0, 1, 2]


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_who_leaves_takes_nothing_along(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TCP has taken from a rank that is done arrives, however slow the cable; only what it never sent is lost."""
    monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    with TwoHosts(rate="10mbit") as slow:
        reports(run(slow, [warm_python(), str(JOBS / "leave_early.py")], (2, 2)))


@pytest.mark.parametrize("congestion", ["cubic", "reno"])
def test_both_ends_use_the_congestion_control_that_was_asked_for(congestion: str) -> None:
    script = (
        "import os, socket\n"
        "where = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if os.environ['RANK'] == '0':\n"
        "    end = socket.create_server(where).accept()[0]\n"
        "else:\n"
        "    end = None\n"
        "    while end is None:\n"
        "        try:\n"
        "            end = socket.create_connection(where)\n"
        "        except ConnectionRefusedError:\n"
        "            pass\n"
        "print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())\n"
    )
    with TwoHosts(congestion=congestion) as made:
        ended = run(made, [sys.executable, "-c", script], (1, 1))
    assert ended == [(0, f"{congestion}\n")] * 2
    with pytest.raises(ConfigError, match="nonsense"), TwoHosts(congestion="nonsense"):
        pass


def test_exit_codes(hosts: TwoHosts) -> None:
    assert hosts.run_job([sys.executable, "-c", "pass"]) == 0
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(1000)"
    assert hosts.run_job([sys.executable, "-c", script]) == 7
    with pytest.raises(ConfigError, match="two numbers of at least 1"):
        hosts.start_job(["true"], ranks=(2, 0))


def test_the_benchmark_runs_a_command_on_both() -> None:
    script = "import os, socket; os.environ['GROUP_RANK'] == socket.gethostname()[-1] or os._exit(3)"
    command = [warm_python(), str(BENCHMARK), "--rate", "100mbit", "--", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_the_benchmark_puts_plain_tcp_beside_pycomm() -> None:
    command = [warm_python(), str(BENCHMARK), "--rate", "1gbit", "--sizes", "64KiB", "--rounds", "1", "--turn-s", "0"]
    done = subprocess.run([*command, "--against", "tcp"], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pycomm / tcp" in done.stdout and "64 KiB" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(how: signal.Signals) -> None:
    """Whatever ends the program, the hosts and the ranks on them end with it."""
    script = (
        "import os, sys, time\n"
        "from pycomm.launch.two_hosts import TwoHosts\n"
        "with TwoHosts() as hosts:\n"
        "    started = hosts.start_job(['sleep', '1000'])\n"
        "    time.sleep(0.3)\n"
        "    print(*hosts.pids, *(process.pid for process in started), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 6
        pidfds = [os.pidfd_open(pid) for pid in pids]
        program.send_signal(how)
        try:
            program.wait(600)
        finally:
            program.kill()
    deadline = time.monotonic() + 600
    for pid, pidfd in zip(pids, pidfds, strict=True):
        while not _has_ended(pidfd):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.01)
        os.close(pidfd)


def test_an_ancestor_that_reaps_no_orphans_delays_nothing() -> None:
    script = (
        "import ctypes\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0\n"  # PR_SET_CHILD_SUBREAPER
        "from pycomm.launch.two_hosts import TwoHosts\n"
        "with TwoHosts() as hosts:\n"
        "    for process in hosts.start_job(['sh', '-c', 'echo; exec sleep 1000'], stdout=-1):\n"
        "        process.stdout.readline()\n"  # it is there, and a child of nsenter's
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])
