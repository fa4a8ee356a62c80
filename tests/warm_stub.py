"""What is started where a warm Python is asked for: ``warm_stub.py SOCKET ARGUMENT...``. See warm_python.py.

Hands its arguments, environment, folder and open files over to the process that takes its place, passes signals on to
that, and ends as that ends. It runs without site-packages, and imports next to nothing.
"""

import marshal
import os
import select
import signal
import socket
import sys
import time

START_S = 600.0
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)


def main(path: str, arguments: list[str]) -> int:
    """Returns the exit code, or minus the signal that ended the other process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # by which MPICH's launcher tells of a rank that has died
    deadline = time.monotonic() + START_S
    while not os.path.exists(path):  # it is still importing
        if time.monotonic() > deadline:
            sys.exit(f"the server of warm_python.py has not come to {path} in {START_S:g} s")
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as server:
        files = [int(name) for name in os.listdir("/proc/self/fd")]
        files = [fd for fd in files if fd != server.fileno() and is_handed_on(fd)]
        server.connect(path)
        request = marshal.dumps((arguments, os.getcwd(), dict(os.environb), files))
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # the program runs before its pid has come here
        socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
        server.sendall(request)
        pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
        # A signal may come just before the wait begins: Python runs its handler after the wait, and the pipe ends that.
        came, comes = os.pipe()
        os.set_blocking(comes, False)
        signal.set_wakeup_fd(comes)
        for number in PASSED_ON if pid else ():
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for fd in files:
            os.close(fd)  # whoever waits for the end of a pipe waits for the other process's alone
        while server not in select.select([server, came], [], [])[0]:
            os.read(came, 100)
        status = server.recv(8, socket.MSG_WAITALL)
    return int.from_bytes(status, "big", signed=True) if status else 1  # nobody is there who would know


def is_handed_on(fd: int) -> bool:
    """Whether a program that is started gets this file; False for that of the list, closed by now."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


if __name__ == "__main__":
    if sys.argv[2] not in ("-c", "-m", "-u") and sys.argv[2].startswith("-"):  # how it is to start matters
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
