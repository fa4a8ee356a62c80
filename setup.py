"""Builds the native parts of pycomm. Everything declarative is in pyproject.toml.

- ``pycomm._native``: pybind11 over framework-free C++ (csrc/shm, csrc/overlap, csrc/kernels/cpu) and, where nvcc is
  found, CUDA (csrc/kernels/cuda). Needs no torch, so it builds under isolation, and one binary serves every torch
  version.
- ``pycomm._torch_ops``: the operators that torch sees, on torch's stable ABI. Built here if torch is installed;
  otherwise pycomm.ops builds it on first use, from the copy of csrc/ that the wheel carries as pycomm/_csrc.

Environment: ``PYCOMM_CUDA=auto|0|1``; ``CUDA_HOME`` or ``CUDA_PATH``; ``TORCH_CUDA_ARCH_LIST`` ("8.0;9.0;10.0+PTX");
``CXX``, ``CXXFLAGS``, ``LDFLAGS``; ``MAX_JOBS``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = "pycomm._native"
TORCH_OPS = "pycomm._torch_ops"
TORCH_MINIMUM = (2, 11)
DEFAULT_CUDA_ARCHS = "8.0;9.0;10.0+PTX"

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# No contraction of a*b+c: CPU and CUDA must encode and reduce to the same bits, whatever the compiler prefers.
CXX_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", *WARNINGS]
NVCC_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-Wall,-Wextra"
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Werror=all-warnings", f"-Xcompiler={NVCC_HOST_FLAGS}"]


class BuildError(SystemExit):
    """A build that cannot go on; pip shows the message without a traceback."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"\npycomm: {what}\n  What to do: {todo}\n")


def say(text: str) -> None:
    """Prints one line of the build's log."""
    print(f"pycomm: {text}", flush=True)


# -- CUDA: pure functions over an environment ------------------------------------------------------------------


def find_nvcc(
    environ: Mapping[str, str],
    is_file: Callable[[str], bool] = os.path.isfile,
    which: Callable[[str], str | None] = shutil.which,
    standard: str = "/usr/local/cuda",
) -> str | None:
    """Returns the path of nvcc by CUDA_HOME, CUDA_PATH, the standard place, PATH, or None. Never asks a GPU."""
    for home in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), standard):
        if home and is_file(os.path.join(home, "bin", "nvcc")):
            return os.path.join(home, "bin", "nvcc")
    return which("nvcc")


def choose_nvcc(environ: Mapping[str, str], found: str | None) -> str | None:
    """Applies ``PYCOMM_CUDA`` to the nvcc that was found; raises BuildError if CUDA is demanded and not there."""
    wanted = environ.get("PYCOMM_CUDA", "auto") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise BuildError(f"PYCOMM_CUDA={wanted!r} is not one of auto, 0, 1.", "set it to one of them, or unset it.")
    if wanted == "1" and found is None:
        raise BuildError(
            "PYCOMM_CUDA=1 asks for CUDA, but there is no nvcc in CUDA_HOME, CUDA_PATH, /usr/local/cuda or PATH.",
            "install the CUDA toolkit and set CUDA_HOME to its folder, or build without CUDA by PYCOMM_CUDA=0.",
        )
    return None if wanted == "0" else found


def parse_archs(text: str) -> list[tuple[str, bool]]:
    """Parses a TORCH_CUDA_ARCH_LIST: ``"8.0;9.0a 10.0+PTX"`` -> ``[("80", False), ("90a", False), ("100", True)]``."""
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", word)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {word!r}, which is not a compute capability.",
                'write numbers, such as "8.0;9.0;10.0+PTX".',
            )
        archs.append((match[1] + match[2] + match[3], match[4] is not None))
    return archs


def choose_archs(environ: Mapping[str, str], known_to_nvcc: Sequence[str]) -> str:
    """Returns TORCH_CUDA_ARCH_LIST as it is, else those of the fixed list that this nvcc can compile for."""
    explicit = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if explicit:
        return explicit
    words = [word for word in DEFAULT_CUDA_ARCHS.split(";") if parse_archs(word)[0][0] in known_to_nvcc]
    return ";".join(words) or DEFAULT_CUDA_ARCHS


def gencode_flags(archs: str) -> list[str]:
    """Returns nvcc's flags for an arch list: machine code for each entry, PTX too where it says ``+PTX``.

    8.0 and 9.0 share one pass of the front end: from 8.0's PTX nvcc makes the same machine code for 9.0, byte for byte.
    """
    entries = parse_archs(archs)
    has_80 = any(number == "80" for number, _ in entries)
    flags = []
    for number, has_ptx in entries:
        ptx = "80" if number == "90" and has_80 else number
        flags.append(f"-gencode=arch=compute_{ptx},code=sm_{number}")
        if has_ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def archs_of_nvcc(nvcc: str) -> list[str]:
    """Asks nvcc, not a GPU, for the architectures it compiles for: ``["75", "80", ...]``."""
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"compute_(\w+)", listing)


# -- sources and tools -----------------------------------------------------------------------------------------


def native_sources(root: Path) -> list[Path]:
    """Returns the C++ files that ``pycomm._native`` is compiled from, sorted: the bindings as few units."""
    units = sorted(root.glob("csrc/bindings/unit_*.cpp"))
    if not units:
        raise BuildError("csrc/bindings holds no unit_*.cpp.", "build from a checkout of the repository or an sdist.")
    folders = ("shm", "overlap", "kernels/cpu")
    return units + [path for folder in folders for path in sorted(root.glob(f"csrc/{folder}/*.cpp"))]


def load_torch_build() -> ModuleType | None:
    """Loads pycomm/ops/_torch_build.py by path (importing pycomm would need numpy and torch); None if there is none."""
    path = ROOT / "pycomm" / "ops" / "_torch_build.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("pycomm_torch_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_no_torch_ops() -> str | None:
    """Returns why the torch operators are left to first use, or None if they can be built now."""
    if not (ROOT / "csrc" / "bindings" / "torch_ops.cpp").is_file() or load_torch_build() is None:
        return "their sources are not in this tree"
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed where this build runs"
    version = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if version < TORCH_MINIMUM:
        return f"torch {installed} is older than {'.'.join(map(str, TORCH_MINIMUM))}"
    return None


def find_cxx(environ: Mapping[str, str]) -> str:
    """Returns the C++ compiler: ``CXX``, else g++, c++ or clang++. Raises BuildError if there is none."""
    if environ.get("CXX"):
        if shutil.which(shlex.split(environ["CXX"])[0]) is None:
            raise BuildError(f"the compiler CXX={environ['CXX']} is not there.", "correct CXX, or unset it.")
        return environ["CXX"]
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return name
    raise BuildError("there is no C++ compiler.", "install one (Debian, Ubuntu: apt install g++), or set CXX.")


def as_one_word(cxx: str, directory: Path) -> str:
    """Returns a ``CXX`` of one word that does the same: nvcc and torch take no more. Of ``ccache g++`` it is a script.

    It lies in ``directory``, another one for another ``CXX``, at which ninja compiles anew.
    """
    if len(shlex.split(cxx)) == 1:
        return cxx
    script = directory / f"{zlib.crc32(cxx.encode()):08x}" / "c++"  # torch warns of names that it does not know
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {cxx} "$@"\n')
    script.chmod(0o755)
    return str(script)


def check_python_headers() -> None:
    """Raises BuildError if Python.h is missing, as it is where only the interpreter was installed."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python's headers are missing ({include}/Python.h).",
            f"install them (Debian, Ubuntu: apt install python{version}-dev).",
        )


# -- the build -------------------------------------------------------------------------------------------------


def write_ninja_file(directory: Path, output: Path, nvcc: str | None) -> None:
    """Writes ``directory/build.ninja``, which makes ``output``. Ninja follows headers and changed flags itself."""
    import pybind11
    from ninja.ninja_syntax import Writer  # type: ignore[import-not-found, unused-ignore]

    cxx = find_cxx(os.environ)
    check_python_headers()
    # The headers of others are system headers: -Werror is for ours.
    flags = [*CXX_FLAGS, f"-I{ROOT / 'csrc'}"]
    flags += [f"-isystem{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    cuda_sources = sorted(ROOT.glob("csrc/kernels/cuda/*.cu")) if nvcc else []
    link, link_flags = [cxx], ["-shared", "-pthread", "-Wl,--as-needed"]
    nvcc_flags: list[str] = []
    if nvcc and cuda_sources:
        archs = choose_archs(os.environ, archs_of_nvcc(nvcc))
        say(f"CUDA kernels for {archs} by {nvcc}")
        flags += ["-DPYCOMM_WITH_CUDA=1", f'-DPYCOMM_CUDA_ARCHS="{archs}"']
        nvcc_flags = [*NVCC_FLAGS, f"-I{ROOT / 'csrc'}", "--threads=2", *gencode_flags(archs)]
        nvcc_flags += ["-ccbin", os.environ["CXX"]] if os.environ.get("CXX") else []
        # cudart inside: the library loads on a machine with no driver, and beside any CUDA that torch brings.
        link, link_flags = [nvcc], ["-shared", "--cudart=static", "-Xcompiler=-pthread", "-Xlinker=--as-needed"]
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "build.ninja", "w") as file:
        ninja = Writer(file, width=1 << 20)
        cxx_flags = shlex.join(flags) + " " + os.environ.get("CXXFLAGS", "")
        ninja.rule("cxx", f"{cxx} -MMD -MF $out.d {cxx_flags} -c $in -o $out", depfile="$out.d", deps="gcc")
        if cuda_sources:
            command = f"{shlex.join([str(nvcc), '-MD', '-MF'])} $out.d {shlex.join(nvcc_flags)} -c $in -o $out"
            ninja.rule("nvcc", command, depfile="$out.d", deps="gcc")
        ninja.rule("link", f"{shlex.join(link)} {shlex.join(link_flags)} $in -o $out " + os.environ.get("LDFLAGS", ""))
        objects = []
        for source in cuda_sources + native_sources(ROOT):  # CUDA takes longest: begin with it
            name = "_".join(source.relative_to(ROOT / "csrc").parts) + ".o"
            objects += ninja.build(name, "nvcc" if source.suffix == ".cu" else "cxx", _escape(source))
        ninja.build(_escape(output), "link", objects)


def _escape(path: Path) -> str:
    """Escapes a path for a build line of ninja."""
    return re.sub(r"([$: ])", r"$\1", str(path))


def run_ninja(directory: Path) -> None:
    """Runs the build file in ``directory`` with ``MAX_JOBS`` jobs, or as many as ninja likes."""
    import ninja  # type: ignore[import-not-found, unused-ignore]

    program = shutil.which("ninja", path=os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")]))
    if program is None:
        raise BuildError("the program ninja is not on PATH.", "pip install ninja")
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    if subprocess.run([program, "-C", str(directory), *jobs], check=False).returncode != 0:
        raise BuildError("the native code did not compile.", "read the compiler's own words, above.")


class BuildExtensions(build_ext):
    """Builds ``_native`` by ninja and hands ``_torch_ops`` to torch.utils.cpp_extension."""

    def finalize_options(self) -> None:
        """Builds both at the same time: ``_torch_ops`` is one unit, and would leave the other cores idle."""
        super().finalize_options()
        if os.environ.get("MAX_JOBS") != "1":
            self.parallel = self.parallel or len(self.extensions)

    def run(self) -> None:
        """Says once what will be built, then builds; an editable install where ninja finds what it built before."""
        if self.editable_mode:  # setuptools would take a folder that is new each time
            self.build_temp = str(ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")
        if os.environ.get("CXX"):
            os.environ["CXX"] = as_one_word(find_cxx(os.environ), Path(self.build_temp).resolve() / "cxx")
        reason = why_no_torch_ops()
        if reason is not None:
            say(f"torch operators are left to first use: {reason}")
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension into ``build_lib``; setuptools copies it to the source tree for an in-place build."""
        if ext.name == TORCH_OPS:
            self._build_torch_ops()
            return
        nvcc = choose_nvcc(os.environ, find_nvcc(os.environ))
        if nvcc is None:
            is_refused = os.environ.get("PYCOMM_CUDA") == "0"
            say(f"CPU only ({'PYCOMM_CUDA=0' if is_refused else 'nvcc not found; set CUDA_HOME to add CUDA'})")
        directory = Path(self.build_temp).resolve() / "native"
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        write_ninja_file(directory, output, nvcc)
        run_ninja(directory)

    def _build_torch_ops(self) -> None:
        from torch.utils.cpp_extension import BuildExtension, CppExtension

        build = load_torch_build()
        assert build is not None
        extension = CppExtension(
            TORCH_OPS,
            [os.path.relpath(path, ROOT) for path in build.sources(ROOT / "csrc")],
            include_dirs=[str(ROOT / "csrc")],
            depends=[str(path) for path in csrc_files(ROOT) if path.suffix == ".h"],
            extra_compile_args=list(build.CXX_FLAGS),
            py_limited_api=True,
        )
        extension._needs_stub = False  # setuptools sets it on the extensions that it was given at the start
        command = BuildExtension(self.distribution, use_ninja=True)
        command.ensure_finalized()
        command.inplace, command.extensions = 0, [extension]
        command.build_lib, command.build_temp = self.build_lib, os.path.join(self.build_temp, "torch_ops")
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # its ninja
        command.run()


class BuildPackage(build_py):
    """Adds csrc/ to the wheel as pycomm/_csrc, so that what has to see torch can be built on first use."""

    def run(self) -> None:
        """Copies Python files, then C++ sources; an editable install uses csrc/ where it is."""
        super().run()
        if not self.editable_mode:
            for source in csrc_files(ROOT):
                target = Path(self.build_lib, "pycomm", "_csrc", source.relative_to(ROOT / "csrc"))
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


def csrc_files(root: Path) -> list[Path]:
    """Returns the native sources that a wheel carries."""
    return [path for path in sorted((root / "csrc").rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]


def extensions() -> list[Extension]:
    """Returns what to build here: the core always, the torch operators if torch is there. Imports no torch yet."""
    torch_ops = [] if why_no_torch_ops() else [Extension(TORCH_OPS, [], language="c++", py_limited_api=True)]
    return [Extension(NATIVE, [], language="c++"), *torch_ops]


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions, "build_py": BuildPackage})
