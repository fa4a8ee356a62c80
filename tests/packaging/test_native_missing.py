"""Without the native core, or with a broken one: pycomm imports, and the first native call says what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "pycomm._native":
            raise {error}
sys.meta_path.insert(0, Hide())
"""
MISSING = "ModuleNotFoundError(\"No module named 'pycomm._native'\", name=name)"
BROKEN = "ImportError('_native.so: undefined symbol: _ZN5wrong')"


def python(error: str, code: str) -> subprocess.CompletedProcess[str]:
    program = HIDE.format(error=error) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize(("error", "reason"), [(MISSING, "pycomm._native"), (BROKEN, "undefined symbol: _ZN5wrong")])
def test_first_native_call_explains_itself(error: str, reason: str) -> None:
    code = """
import pycomm
from pycomm.ops import native
from pycomm.errors import NativeUnavailableError
try:
    native()
except NativeUnavailableError as error:
    print(error)
"""
    result = python(error, code)
    assert result.returncode == 0, result.stderr
    assert reason in result.stdout
    assert "pip install" in result.stdout
    assert not re.search(r"pip install [^`]*\bpycomm\b", result.stdout), "PyPI's pycomm is another project's"


@pytest.mark.parametrize(("error", "reason"), [(MISSING, "not built"), (BROKEN, "broken: ImportError")])
def test_doctor_names_the_remedy(error: str, reason: str) -> None:
    result = python(error, "from pycomm.cli.__main__ import main\nsys.exit(main(['doctor', '--json']))")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["built"]["native core"] is None
    assert reason in report["hints"]["built.native core"]
    hint = report["hints"]["built.native core"]
    assert "pip install" in hint and "--no-deps pycomm" not in hint, "PyPI's pycomm is another project's"
    assert report["versions"]["torch"] and report["host"]["cores"] >= 1
