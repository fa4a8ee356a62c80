"""Jobs under measurement: N ranks that sleep until they get a command.

Every library runs in a job of its own for the whole invocation, so that figures can be taken in turns. An idle rank
sleeps in a blocking read, so that only one job uses the cores at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import PycommError
from .._interrupt import INTERRUPT
from .worker.cases import Case
from .worker.runner import Runner
from .worker.wire import Channel

__all__ = ["InsideJob", "Job", "JobFailedError", "SpawnedJob"]

START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 300.0
TAIL_BYTES = 2000
GRACE_S = 5.0  # for launchers, to end their ranks and tidy up


class JobFailedError(PycommError):
    """A job could not be started, crashed, or did not answer in time."""


class Job(ABC):
    """A set of ranks of one library that carries out commands together."""

    name: str
    version: str
    world_size: int

    def prepare(self, case: Case) -> str | None:
        """Gets the buffers of ``case`` ready; returns why the library cannot run it, or None."""
        for answer in self._ask({"do": "prepare", **asdict(case)}):
            if "unsupported" in answer:
                return str(answer["unsupported"])
        return None

    def run(self, *, num_chunks: int, chunk_calls: int, samples: int, round_index: int) -> list[dict[str, Any]]:
        """Has every rank time the prepared case; returns their answers in rank order."""
        counts = {"num_chunks": num_chunks, "chunk_calls": chunk_calls, "samples": samples}
        return self._ask({"do": "run", **counts, "round_index": round_index})

    def release(self) -> None:
        """Has every rank give its buffers back."""
        self._ask({"do": "release"})

    @abstractmethod
    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends ``command`` to every rank and returns the answers in rank order; raises JobFailedError."""

    @abstractmethod
    def close(self) -> None:
        """Ends the job; never raises."""


class InsideJob(Job):
    """This process is itself a rank, started by mpirun, torchrun or ``pycomm run``; all ranks call the same methods."""

    def __init__(self, runner: Runner) -> None:
        self.name, self.version = "pycomm", runner.library.version
        self.rank, self.world_size = runner.library.rank, runner.library.world_size
        self._runner = runner

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        import pycomm

        match command.pop("do"):
            case "prepare":
                own = self._runner.prepare(Case(**command))
            case "run":
                own = self._runner.run(**command)
            case _:
                own = self._runner.release()
        answers: list[Any] = [None] * self.world_size
        pycomm.all_gather_object(answers, own)
        return answers

    def close(self) -> None:
        """Leaves the group."""
        self._runner.release()
        self._runner.library.close()


class SpawnedJob(Job):
    """A job that this process starts: some commands, each of which starts one or all of the ranks."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name, self.version, self.world_size = name, "", world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._pidfds: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-bench-")  # mode 0700
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.socket_path)
        self._listener.listen(world_size)
        self._log = open(self.path("log"), "w+b")  # noqa: SIM115 - closed in kill()

    def path(self, name: str) -> str:
        """A file of this job's own folder."""
        return str(Path(self._folder.name) / name)

    @property
    def socket_path(self) -> str:
        """Where the ranks connect."""
        return self.path("socket")

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a process of the job in a process group of its own, so that Ctrl-C reaches this process alone."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,  # and no session; launch/_session.py
        )
        self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Waits for all ranks; raises JobFailedError with the end of their output."""
        deadline = time.monotonic() + START_TIMEOUT_S
        arrived = [self._accept(deadline) for _ in range(self.world_size)]
        by_rank: dict[int, Channel] = {}
        for channel in arrived:
            hello = self._receive(channel, max(1.0, deadline - time.monotonic()))
            if "rank" not in hello:
                raise self._failure("its worker is of another version: copy this pycomm/cli/bench/worker there")
            by_rank[int(hello["rank"])] = channel
            self.version = str(hello["version"])
        if sorted(by_rank) != list(range(self.world_size)):
            raise self._failure(
                f"expected ranks 0 to {self.world_size - 1}, got {sorted(by_rank)}; did MPI start at all?"
            )
        self._channels = [by_rank[rank] for rank in range(self.world_size)]

    def _accept(self, deadline: float) -> Channel:
        self._listener.settimeout(0.2)
        while time.monotonic() < deadline:
            INTERRUPT.raise_again()
            with contextlib.suppress(TimeoutError):
                sock = self._listener.accept()[0]
                # Asked of the kernel: a rank in a process namespace knows another pid of itself.
                pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                self._pidfds.append(os.pidfd_open(pid))
                return Channel(sock)
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended:
                raise self._failure(f"ended with code {ended[0]} while starting")
        raise self._failure(f"not all of {self.world_size} ranks connected within {START_TIMEOUT_S:.0f} s")

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        INTERRUPT.raise_again()
        try:
            for channel in self._channels:
                channel.send(command)
        except OSError as error:
            raise self._failure(f"a rank is gone ({error})") from error
        return [self._receive(channel, COMMAND_TIMEOUT_S) for channel in self._channels]

    def _receive(self, channel: Channel, timeout_s: float) -> dict[str, Any]:
        try:
            answer = channel.receive(timeout_s)
        except TimeoutError as error:
            raise self._failure(f"no answer within {timeout_s:.0f} s") from error
        except (EOFError, OSError) as error:
            raise self._failure("a rank died") from error
        if "error" in answer:
            raise self._failure(str(answer["error"]))
        return answer

    def _failure(self, reason: str) -> JobFailedError:
        time.sleep(0.1)  # the ranks' last words
        self._log.flush()
        tail = Path(self._log.name).read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        output = f" Its output ends:\n{tail}" if tail else ""
        return JobFailedError(f"{self.name}, {self.world_size} ranks: {reason}.{output}")

    def close(self) -> None:
        """Asks the ranks to leave, then kills those that did not and their launcher."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send({"do": "exit"})
        deadline = time.monotonic() + (5.0 if self._channels else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends what is still there of this job's own processes: asks, and after a while kills.

        A launcher that is killed cannot remove its folder.
        """
        deadline = time.monotonic() + GRACE_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()) if number == signal.SIGTERM else None)
        for pidfd in self._pidfds:  # ranks that their launcher put in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for channel in self._channels:
            channel.close()
        self._listener.close()
        self._log.close()
        self._folder.cleanup()
