"""What the kernel tells of another process: that it is being ended, long before it has ended; and of no other one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pycomm.ops import native

_SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
_LARGE = f"import numpy; kept = numpy.ones(1 << 25); {_SLEEPS}"  # 256 MiB, which the kernel has to take apart
# exit(2) of the main thread alone: the process lives on in the other one, and its /proc entry says that it is exiting.
_MAIN_GONE = """
import ctypes, threading, time
threading.Thread(target=lambda: (print('up', flush=True), time.sleep(600))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[__import__("platform").machine()], 0)
"""


@contextmanager
def _process(code: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    pidfd = os.pidfd_open(process.pid)
    try:
        yield process, pidfd
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        os.close(pidfd)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_dead_before_its_memory_is_taken_apart(how: signal.Signals) -> None:
    with _process(_LARGE) as (process, pidfd):
        assert not native().is_dead(pidfd, process.pid)
        state, start = native().look_at_process(process.pid)
        assert state != ""
        process.send_signal(how)
        while not native().is_dead(pidfd, process.pid):
            time.sleep(1e-4)
        assert native().exit_status(pidfd, process.pid) == how
        assert native().look_at_process(process.pid) == ("", start)
        process.wait()
        assert native().is_dead(pidfd, process.pid)


def test_an_exit_with_a_status_is_told_with_it() -> None:
    with _process("import os; print('up', flush=True); os.read(0, 1); os._exit(3)") as (process, pidfd):
        assert process.stdin is not None
        assert native().exit_status(pidfd, process.pid) == -1  # not yet
        process.stdin.close()
        while not native().is_dead(pidfd, process.pid):
            time.sleep(1e-4)
        assert native().exit_status(pidfd, process.pid) == 3 << 8


def test_a_process_whose_main_thread_has_left_is_not_dead() -> None:
    with _process(_MAIN_GONE) as (process, pidfd):
        deadline = time.monotonic() + 60
        while native().look_at_process(process.pid)[0] != "":  # the main thread is a zombie then
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        assert not native().is_dead(pidfd, process.pid)


def test_who_is_not_there_has_no_state() -> None:
    with _process(_SLEEPS) as (process, pidfd):
        pass
    assert native().look_at_process(process.pid) == ("", 0)
    assert not native().is_dead(-1, process.pid)
