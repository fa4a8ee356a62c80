"""The Python that has torch loaded when it starts does what Python does: see warm_python.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import wait_until
from warm_python import warm_python


def run(python: str, *arguments: str, **options: Any) -> tuple[int, str]:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=900, **options)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import os, sys; print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ['WORD'])", "a", "-b"],
        ["-c", "import sys, tempfile; print(input(), tempfile.gettempdir()); sys.exit(7)"],
        ["-c", "import atexit; atexit.register(print, 'at the end'); raise ValueError"],
        ["-c", "import os, signal; print('begun', flush=True); os.kill(os.getpid(), signal.SIGKILL)"],
        ["-u", "-m", "json.tool"],
        ["job.py", "a"],
        ["-I", "-c", "import sys; print(sys.flags.isolated)"],
    ],
)
def test_a_program_runs_and_ends_as_under_python(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import neighbour, sys\nprint(neighbour.WORD, sys.argv, __file__, __name__)\n")
    (tmp_path / "neighbour.py").write_text("WORD = 'imported'\n")
    options = {"cwd": tmp_path, "env": {**os.environ, "WORD": "word", "TMPDIR": str(tmp_path)}, "input": '{"a": 1}\n'}
    assert run(warm_python(), *arguments, **options) == run(sys.executable, *arguments, **options)


def test_torch_is_there_and_what_a_program_starts_is_warm_too() -> None:
    code = (
        "import subprocess, sys\n"
        "assert 'torch' in sys.modules and 'pycomm.engines' in sys.modules\n"
        "assert subprocess.run([sys.executable, '-c', 'import sys; assert \"torch\" in sys.modules']).returncode == 0\n"
    )
    assert run(warm_python(), "-c", code) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 3), (signal.SIGKILL, -9)])
def test_a_signal_reaches_the_program(number: signal.Signals, code: int) -> None:
    script = (
        "import os, sys, time\n"
        "try:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(1000)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(3)\n"
    )
    with subprocess.Popen([warm_python(), "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(600) == code
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
