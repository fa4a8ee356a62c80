"""Prints which process, process group and session this rank is, and what becomes of a read from the terminal."""

import os

try:
    read = repr(os.read(0, 1))
except OSError as error:
    read = error.strerror
print(f"pid {os.getpid()} group {os.getpgrp()} session {os.getsid(0)}: {read}.", flush=True)
