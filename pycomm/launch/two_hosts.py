"""Two hosts on one machine: sets of namespaces joined by a cable of a chosen rate, and jobs across them.

For whoever has one machine and wants to see what a job does between two: ``with TwoHosts(rate="1gbit") as hosts:``.
Each host has a network, a host name, processes and shared memory of its own, and this machine's files. Linux, as root.

[Note: nothing is left behind]
The namespaces have no names: they last as long as there are processes in them. The first process of each host is a
shell that reads from a pipe of ours. When this process ends, of whatever, the pipe ends, and so does the shell; with
the first process of a process namespace the kernel ends all others in it; with the last process go the network
namespace, its end of the cable and the queue that limits the rate. There is no list of things to undo, and no handler
to miss.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ..errors import ConfigError, NativeUnavailableError

__all__ = ["ADDRESSES", "TwoHosts", "unavailable"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NETWORK = "10.77.0.0"
INTERFACE = "eth0"
_NAMES = ("host0", "host1")
_SPACES = ("--net", "--uts", "--ipc", "--mount")
_UNSHARE = ("unshare", *_SPACES, "--pid", "--fork", "--kill-child", "--mount-proc")
# The burst is what a timer tick lets through at 1 Gbit/s; the queue holds 50 ms, as a home router's would.
_QUEUE = ("root", "tbf", "burst", "128kb", "latency", "50ms", "rate")
_FIRST_PORT = 29500
_GRACE_S = 3.0


def unavailable() -> str | None:
    """Returns why this machine cannot make two hosts, or None if it can; it makes a pair of them, and nothing stays."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages util-linux and iproute2)"
    attempt = f"ip link add {INTERFACE} type veth && tc qdisc add dev {INTERFACE} {' '.join(_QUEUE)} 1gbit"
    done = subprocess.run([*_UNSHARE, "sh", "-c", attempt], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return f"no namespaces with a rate-limited cable here, which takes root: {said}"


class TwoHosts:
    """A context manager: two hosts, ``ADDRESSES``, joined by a cable of ``rate`` (as tc writes it) in each direction.

    ``congestion`` is the control of TCP on it, whatever this machine's own default is: cubic, Linux's, or one of
    ``sysctl net.ipv4.tcp_available_congestion_control``. Raises NativeUnavailableError on entry if this machine cannot
    make two hosts, ConfigError if it does not know the rate or the control. See the note on top of this file.
    """

    def __init__(self, rate: str = "1gbit", congestion: str = "cubic") -> None:
        self.rate = rate
        self.congestion = congestion
        self._shells: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[Any]] = []
        self._jobs = 0

    def __enter__(self) -> TwoHosts:
        reason = unavailable()
        if reason is not None:
            raise NativeUnavailableError(f"two hosts on this machine: {reason}")
        try:
            for name in _NAMES:
                self._shells.append(_start_shell(name))
            self._connect()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that hold the hosts, for nsenter(1)."""
        return tuple(shell.pid for shell in self._shells)

    def start(self, host: int, command: Sequence[str], environ: Mapping[str, str], **options: Any) -> Any:
        """Starts ``command`` on ``host`` (0 or 1) and returns its Popen; ``options`` are Popen's.

        It is in a session of its own, and ends with this object at the latest.
        """
        shell = self._shells[host].pid
        spaces = f"--pid=/proc/{shell}/ns/pid_for_children"
        whole = ["nsenter", "--target", str(shell), *_SPACES, spaces, "--wd=.", "--", *command]
        process = subprocess.Popen(whole, env=dict(environ), start_new_session=True, **options)
        self._started.append(process)
        return process

    def start_job(
        self,
        command: Sequence[str],
        ranks: Sequence[int] = (2, 2),
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Starts ``ranks[h]`` processes of ``command`` on host h, with the variables that torchrun sets.

        Returns their Popens in rank order. ``environ`` is this process's own unless given.
        """
        if len(ranks) != 2 or min(ranks) < 1:
            raise ConfigError(f"ranks of two hosts: expected two numbers of at least 1, got {list(ranks)}")
        base = dict(os.environ if environ is None else environ)
        port = _FIRST_PORT + self._jobs  # a job's store may still hold the port of the one before
        self._jobs += 1
        base |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "WORLD_SIZE": str(sum(ranks))}
        base.setdefault("OMP_NUM_THREADS", "1")
        places = [(host, local_rank) for host, number in enumerate(ranks) for local_rank in range(number)]
        processes = []
        for rank, (host, local_rank) in enumerate(places):
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks[host], "GROUP_RANK": host}
            own_text = {name: str(value) for name, value in own.items()}
            processes.append(self.start(host, command, base | own_text, **options))
        return processes

    def run_job(
        self, command: Sequence[str], ranks: Sequence[int] = (2, 2), environ: Mapping[str, str] | None = None
    ) -> int:
        """Runs a job to its end; returns 0, or the exit code of the rank that failed first (128 + a signal).

        Once one has failed, the others get three seconds to say what they saw of it.
        """
        processes = self.start_job(command, ranks, environ)
        failed, deadline = 0, float("inf")
        while None in [process.poll() for process in processes] and time.monotonic() < deadline:
            codes = [process.returncode for process in processes if process.returncode]
            if codes and not failed:
                failed, deadline = codes[0], time.monotonic() + _GRACE_S
            time.sleep(0.02)
        for process in processes:
            self.kill(process)
        failed = failed or next((process.returncode for process in processes if process.returncode), 0)
        return failed if failed >= 0 else 128 - failed

    def kill(self, process: subprocess.Popen[Any]) -> None:
        """Ends a process that ``start`` returned, and those that it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _connect(self) -> None:
        """Lays the cable, and limits what each host sends into it."""
        first, second = (str(shell.pid) for shell in self._shells)
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        _run_in_network(first, cable)
        for pid, address in zip((first, second), ADDRESSES, strict=True):
            _run_in_network(pid, ["ip", "address", "add", f"{address}/24", "dev", INTERFACE])
            _run_in_network(pid, ["ip", "link", "set", "lo", "up"])
            _run_in_network(pid, ["ip", "link", "set", INTERFACE, "up"])
            # A property of the route: a host of its own may not make one the default that this machine reserves.
            route = [f"{_NETWORK}/24", "dev", INTERFACE, "src", address, "congctl", self.congestion]
            _run_in_network(pid, ["ip", "route", "change", *route])
            _run_in_network(pid, ["tc", "qdisc", "add", "dev", INTERFACE, *_QUEUE, self.rate])

    def _end(self) -> None:
        for process in self._started:
            self.kill(process)
        for shell in self._shells:
            assert shell.stdin is not None, "it was started with a pipe"
            shell.stdin.close()
        deadline = time.monotonic() + _GRACE_S
        for shell in self._shells:
            try:
                shell.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # A host's first process ends after all others are reaped. Those that were orphans may have gone to
                # an ancestor of ours (prctl(2), PR_SET_CHILD_SUBREAPER), which does so when it likes.
                shell.kill()
                shell.wait()
        self._started, self._shells = [], []


def _start_shell(name: str) -> subprocess.Popen[bytes]:
    """Starts the first process of a host, and returns once the host is there."""
    lines = ["127.0.0.1 localhost"]
    for address, host in zip(ADDRESSES, _NAMES, strict=True):
        lines += [f"{address} {host}", f"::ffff:{address} {host}"]  # as sockets for both kinds of addresses see it
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as hosts:
        hosts.write("\n".join(lines) + "\n")
        hosts.flush()
        # Names come from this file: no name server can be asked from there, and asking takes seconds.
        script = f"hostname {name} && mount --bind {hosts.name} /etc/hosts && echo ready && read line"
        command = [*_UNSHARE, "sh", "-c", script]
        shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert shell.stdout is not None and shell.stderr is not None, "it was started with pipes"
        if shell.stdout.readline() != b"ready\n":
            said = " ".join(shell.stderr.read().decode(errors="replace").split())
            shell.wait()
            raise NativeUnavailableError(f"two hosts on this machine: {name} could not be made: {said}")
    return shell


def _run_in_network(pid: str, command: Sequence[str]) -> None:
    done = subprocess.run(["nsenter", "--target", pid, "--net", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"two hosts on this machine: {' '.join(command)} failed: {' '.join(done.stderr.split())}")
