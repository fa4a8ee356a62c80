"""``import torch`` loads the backend's entry point: it never fails by it, whatever pycomm's native core is like."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pycomm
from pycomm.torch_backend import creation

ROOT = Path(__file__).resolve().parents[2]
BROKEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "pycomm._native":
            raise ImportError("_native.so: undefined symbol: _ZN5wrong")
sys.meta_path.insert(0, Hide())
"""
DECLARED = {"pycomm": "pycomm.torch_backend:register"}


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with pycomm's entry points in place, installed or not."""
    info = folder / "declared-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in DECLARED.items()]
    groups = ("torch.backends", "torch.distributed.backends")
    (info / "entry_points.txt").write_text("\n".join(f"[{group}]\n{lines[0]}\n" for group in groups))
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=900)


def test_entry_points_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["torch.backends"] == DECLARED
    assert project["entry-points"]["torch.distributed.backends"] == DECLARED


def test_import_torch_with_a_broken_native_core(tmp_path: Path) -> None:
    code = """
import torch
assert torch.distributed.Backend("pycomm") == "pycomm" == torch.distributed.Backend.PYCOMM
heavy = [name for name in sys.modules if name.startswith("pycomm.") and not name.startswith("pycomm.torch_backend")]
print(sorted(heavy))
try:
    torch.distributed.init_process_group("pycomm", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(2))
    print("a world of one needs none")
    torch.distributed.destroy_process_group()
    import pycomm.torch_backend
    options = pycomm.torch_backend.Options(transport="shm")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("pycomm", store=store, rank=0, world_size=1, pg_options=options)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = python(BROKEN + code, tmp_path)
    assert done.returncode == 0, done.stderr
    loaded, one, refusal = done.stdout.splitlines()
    assert loaded == str(["pycomm.config", "pycomm.env", "pycomm.errors", "pycomm.types"])
    assert one == "a world of one needs none"
    assert refusal.startswith("NativeUnavailableError") and "pip install" in refusal and "_ZN5wrong" in refusal


def test_a_failing_registration_breaks_nothing(tmp_path: Path) -> None:
    code = """
import sys, types
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            return None
sys.modules["logging"]  # loaded already
import torch.distributed as dist
dist.Backend.register_backend = lambda *_, **__: 1 / 0
import pycomm.torch_backend
if hasattr(dist.Backend, "PYCOMM"):
    del dist.Backend.PYCOMM
pycomm.torch_backend.register()
print("alive")
"""
    done = python("import logging\n" + code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alive\n"
    assert "is not registered: division by zero" in done.stderr


@pytest.mark.parametrize(
    ("backends", "version", "words"),
    [
        ({"cpu": "pycomm", "cuda": "nccl"}, (2, 13), "would leave out nccl.*'pycomm' alone, or torch 2.14"),
        ({"cpu": "gloo", "cuda": "pycomm"}, (2, 11), "would leave out gloo"),
        ({"xpu": "pycomm"}, (2, 15), "serves cpu and cuda tensors, not xpu"),
    ],
)
def test_mixtures_that_cannot_be(backends: dict[str, str], version: tuple[int, int], words: str) -> None:
    with pytest.raises(pycomm.ConfigError, match=words):
        creation.check_devices(backends, version)


def test_mixtures_that_can_be() -> None:
    creation.check_devices({"cpu": "pycomm", "cuda": "pycomm"}, (2, 11))
    creation.check_devices({"cpu": "pycomm", "cuda": "nccl"}, (2, 14))


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "torch_version", lambda: (2, 10))
    with pytest.raises(pycomm.ConfigError, match=r"needs torch 2\.11 or later"):
        creation.create(None, None)
