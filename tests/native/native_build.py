"""Programs in C++, built with a sanitizer; what several of them are made of is compiled once a session."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# No contraction, as in the real build.
_FLAGS = ["-std=c++17", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
_CUDA_ON_CPU = ["-x", "c++", f"-I{Path(__file__).with_name('fake_cuda')}", "-Wno-unknown-pragmas"]
# Most of the time goes into compiling. So no optimisation where the program runs for seconds; what AddressSanitizer
# checks it checks in functions of its own, and what UBSan finds ends the program where it is, by SIGILL and without a
# word: the same checks compile in half of the time. To read what UBSan has found, and where, take "trap-on-error" out.
SANITIZERS = {
    "address": [
        "-fsanitize=address,undefined",
        "-fno-sanitize=null",  # AddressSanitizer reports that access as well
        "-O0",
        "-fno-sanitize-recover=all",
        "-fsanitize-undefined-trap-on-error",
        "--param=asan-instrumentation-with-call-threshold=0",
    ],
    # It does not know fences; the one that is there orders a store and a load, and publishes no data.
    "thread": ["-fsanitize=thread", "-O1", "-Wno-tsan"],
}
# A test's own loops, over what it expects, would take longer than what it tests. Of a function in a header the linker
# takes the first copy: name what is tested before the test.
_OF_TESTS = {"address": ["-fno-sanitize=undefined", "-O1"], "thread": []}

Build = Callable[[str, str, Sequence[Path]], Path]


def builder(folder: Path) -> Build:
    """Returns ``build(name, sanitizer, sources)``, that makes a program in ``folder``, two files at a time."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))

    def compile_one(source: Path, sanitizer: str) -> Path:
        output = folder / f"{source.stem}{source.suffix}-{sanitizer}.o"
        if not output.exists():
            language = _CUDA_ON_CPU if source.suffix == ".cu" else []
            flags = [*_FLAGS, *SANITIZERS[sanitizer], *(_OF_TESTS[sanitizer] if "test" in source.stem else language)]
            subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(output)], check=True, timeout=1500)
        return output

    def build_one(name: str, sanitizer: str, sources: Sequence[Path]) -> Path:
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda source: compile_one(source, sanitizer), sources))
        program = folder / f"{name}-{sanitizer}"
        flags = SANITIZERS[sanitizer][:1]
        subprocess.run([*compiler, *flags, *objects, "-o", str(program), "-pthread"], check=True, timeout=1500)
        return program

    return build_one
