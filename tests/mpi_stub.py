"""What mpirun starts for a rank that lives in another process: ``mpi_stub.py FOLDER``. See mpi_harness.py.

Hands that process the environment, standard input and output and PMI's connection to the launcher, and ends when it
does, with 1 if it died.
"""

import json
import os
import signal
import socket
import sys
import time

signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # by which the launcher tells of a rank that has died
path = os.path.join(sys.argv[1], "rank" + os.environ["PMI_RANK"])
while not os.path.exists(path):
    time.sleep(0.005)
with socket.socket(socket.AF_UNIX) as rank:
    rank.connect(path)
    fds = [0, 1, 2, int(os.environ["PMI_FD"])]
    socket.send_fds(rank, [b" "], fds)
    rank.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
    os.close(fds[3])
    has_ended_well = rank.recv(4) == b"well"
sys.exit(0 if has_ended_well else 1)
