"""``import pycomm`` starts no thread, reads no variable of ours, and imports neither MPI, CuPy nor the native core."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, os, sys, threading
import numpy, torch  # what they do at import is theirs

read = []
class Spy(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)
os.environ.__class__ = Spy
threads = len(os.listdir("/proc/self/task"))
import pycomm
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "python_threads": threading.active_count() - 1,
    "read": [key for key in read if key.startswith("PYCOMM_")],
    "spy_works": os.environ.get("PYCOMM_PROBE") == "1" and read[-1] == "PYCOMM_PROBE",
    "heavy": [name for name in ("mpi4py", "cupy", "pycomm._native", "rich") if name in sys.modules],
}))
"""


def test_import_is_quiet(monkeypatch) -> None:
    monkeypatch.setenv("PYCOMM_PROBE", "1")
    monkeypatch.setenv("PYCOMM_LOG", "not-a-level")  # nobody may look
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    seen = json.loads(result.stdout)
    assert seen == {"threads": 0, "python_threads": 0, "read": [], "spy_works": True, "heavy": []}
