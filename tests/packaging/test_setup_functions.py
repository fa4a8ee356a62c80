"""The decisions of setup.py are functions of an environment: where nvcc is, which architectures, what is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pycomm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(setup: ModuleType, environ: dict[str, str], files: set[str], on_path: str | None = None) -> str | None:
    return setup.find_nvcc(environ, is_file=files.__contains__, which=lambda name: on_path, standard="/std/cuda")


def test_nvcc_order_is_home_path_standard_search(setup: ModuleType) -> None:
    files = {"/a/bin/nvcc", "/b/bin/nvcc", "/std/cuda/bin/nvcc"}
    assert find(setup, {"CUDA_HOME": "/a", "CUDA_PATH": "/b"}, files, "/c/nvcc") == "/a/bin/nvcc"
    assert find(setup, {"CUDA_PATH": "/b"}, files, "/c/nvcc") == "/b/bin/nvcc"
    assert find(setup, {}, files, "/c/nvcc") == "/std/cuda/bin/nvcc"
    assert find(setup, {}, set(), "/c/nvcc") == "/c/nvcc"
    assert find(setup, {}, set()) is None


def test_empty_or_wrong_cuda_home_is_passed_over(setup: ModuleType) -> None:
    assert find(setup, {"CUDA_HOME": "", "CUDA_PATH": "/runtime-only"}, {"/std/cuda/bin/nvcc"}) == "/std/cuda/bin/nvcc"


@pytest.mark.parametrize(
    ("wanted", "found", "chosen"),
    [
        (None, "/n", "/n"),
        (None, None, None),
        ("", "/n", "/n"),
        ("auto", None, None),
        ("0", "/n", None),
        ("0", None, None),
        ("1", "/n", "/n"),
    ],
)
def test_pycomm_cuda(setup: ModuleType, wanted: str | None, found: str | None, chosen: str | None) -> None:
    assert setup.choose_nvcc({} if wanted is None else {"PYCOMM_CUDA": wanted}, found) == chosen


def test_demanded_cuda_without_nvcc_says_what_to_do(setup: ModuleType) -> None:
    with pytest.raises(setup.BuildError, match=r"(?s)no nvcc.*CUDA_HOME.*What to do: install the CUDA toolkit"):
        setup.choose_nvcc({"PYCOMM_CUDA": "1"}, None)


def test_unknown_pycomm_cuda_is_refused(setup: ModuleType) -> None:
    with pytest.raises(setup.BuildError, match="'yes' is not one of auto, 0, 1"):
        setup.choose_nvcc({"PYCOMM_CUDA": "yes"}, "/n")


def test_archs_are_parsed(setup: ModuleType) -> None:
    assert setup.parse_archs("8.0;9.0a 10.0+PTX") == [("80", False), ("90a", False), ("100", True)]
    assert setup.parse_archs(" 12.0 ") == [("120", False)]


@pytest.mark.parametrize("text", ["Hopper", "8", "8.0;;x", "sm_80", ""])
def test_bad_archs_are_refused(setup: ModuleType, text: str) -> None:
    with pytest.raises(setup.BuildError, match="TORCH_CUDA_ARCH_LIST"):
        setup.parse_archs(text)


def test_archs_come_from_the_user_else_from_the_fixed_list(setup: ModuleType) -> None:
    assert setup.choose_archs({"TORCH_CUDA_ARCH_LIST": "7.5"}, ["80"]) == "7.5"
    assert setup.choose_archs({}, ["80", "90", "100", "120"]) == "8.0;9.0;10.0+PTX"
    assert setup.choose_archs({}, ["75", "80", "90"]) == "8.0;9.0", "an older nvcc does not know the newest"


def test_gencode_flags(setup: ModuleType) -> None:
    assert setup.gencode_flags("8.0;10.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    shared = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=sm_90"]
    assert setup.gencode_flags("8.0;9.0") == shared, "one pass of the front end"
    assert setup.gencode_flags("9.0") == ["-gencode=arch=compute_90,code=sm_90"]


def test_cxx_is_taken_from_the_environment(setup: ModuleType) -> None:
    assert setup.find_cxx({"CXX": "env g++"}) == "env g++"
    with pytest.raises(setup.BuildError, match="no-such-compiler is not there"):
        setup.find_cxx({"CXX": "no-such-compiler"})


def test_cxx_of_several_words_compiles_and_links(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``CXX="ccache g++"``, or with flags of a platform."""
    source = tmp_path / "csrc" / "one.cpp"
    source.parent.mkdir()
    source.write_text("int one() { return 1; }\n")
    monkeypatch.setenv("CXX", setup.as_one_word("env g++", tmp_path / "cxx"))
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "native_sources", lambda root: [source])
    setup.write_ninja_file(tmp_path / "build", tmp_path / "one.so", None)
    setup.run_ninja(tmp_path / "build")
    assert (tmp_path / "one.so").is_file()
    assert setup.as_one_word("g++", tmp_path) == "g++"
    flagged = setup.as_one_word("g++ -DANSWER=42", tmp_path)
    assert flagged != os.environ["CXX"], "ninja compiles anew"
    macros = subprocess.run(
        [flagged, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
    )
    assert "#define ANSWER 42" in macros.stdout


def test_missing_compiler_says_what_to_do(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(setup.BuildError, match="apt install g"):
        setup.find_cxx({})


def test_torch_sources_stay_out_of_the_core(setup: ModuleType) -> None:
    names = {path.relative_to(ROOT / "csrc").as_posix() for path in setup.native_sources(ROOT)}
    assert {"bindings/unit_kernels.cpp", "bindings/unit_shm.cpp", "shm/group.cpp"} <= names
    assert "bindings/torch_ops.cpp" not in names


def test_each_file_of_the_bindings_is_in_one_unit() -> None:
    files = sorted(ROOT.glob("csrc/bindings/*.cpp"))
    units = [path.read_text() for path in files if path.name.startswith("unit_")]
    included = [name for text in units for name in re.findall(r'#include "(\w+\.cpp)"', text)]
    alone = re.compile(r"(unit|torch)_")
    assert sorted(included) == [path.name for path in files if not alone.match(path.name)]


def test_ahead_of_time_and_first_use_build_the_same_sources(setup: ModuleType) -> None:
    from pycomm.ops import _torch_build

    sources = _torch_build.sources(_torch_build.csrc_dir())
    assert sources and all(path.is_file() for path in sources)
    assert setup.load_torch_build().sources(ROOT / "csrc") == sources
