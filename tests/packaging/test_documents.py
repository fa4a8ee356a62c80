"""The documents name what is there: links, files, tests, names of the API, and commands with arguments that exist.

So do the docstrings of examples and benchmarks, as far as commands go: they are what ``--help`` prints.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pycomm.cli.__main__ import commands, main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?!-)\S.*\n(?:(?:    .*)?\n)*", re.MULTILINE)
PLACEHOLDERS = {"N": "2", "T": "shm", "VERB": "all_reduce", "DIR": "."}
NOT_NAMES = {"pycomm.prom", "pycomm.compressions", "pycomm.compression_wrappers"}  # a file, groups of entry points

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def files() -> set[str]:
    """Every file of the tree that a document may name, from the root."""
    hidden = (".", "build", "__pycache__")
    return {
        str(Path(folder, name).relative_to(ROOT))
        for top in ("benchmarks", "csrc", "docs", "examples", "pycomm", "tests")
        for folder, folders, names in os.walk(ROOT / top)
        for name in names
        if not name.startswith(hidden) and "__pycache__" not in folder
    } | {path.name for path in ROOT.iterdir() if path.is_file()}


FILES = files()
TESTS = {
    name
    for path in FILES
    if path.startswith("tests/") and path.endswith(".py")
    for name in (
        Path(path).stem,
        *re.findall(r"^def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE),
    )
}


def anchors(document: Path) -> set[str]:
    """What GitHub calls the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def literals(document: Path) -> list[str]:
    """What stands between backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", document.read_text(encoding="utf-8")))


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = document.parent / path if path else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@each_document
def test_files_and_tests_are_there(document: Path) -> None:
    for literal in literals(document):
        if re.fullmatch(r"[\w./-]+\.(py|pml|cpp|h|cuh?|md|svg|toml)", literal):
            name = literal.removeprefix("../")
            made_by_the_reader = "/" not in name and name.endswith((".svg", ".toml"))
            assert made_by_the_reader or any(f"/{path}".endswith(f"/{name}") for path in FILES), literal
        elif re.fullmatch(r"test_\w+", literal) and document.name != "torch_backend.md":  # which names torch's own
            assert literal in TESTS, literal


@each_document
def test_names_of_the_api_are_there(document: Path) -> None:
    for name in set(re.findall(r"\bpycomm(?:\.[A-Za-z_]\w*)+", document.read_text(encoding="utf-8"))) - NOT_NAMES:
        found: Any = importlib.import_module("pycomm")
        where = "pycomm"
        for part in name.split(".")[1:]:
            where += f".{part}"
            if not hasattr(found, part):
                importlib.import_module(where)  # a module that nobody has imported yet
            found = getattr(found, part)


def shell_lines(document: Path) -> Iterator[str]:
    """Yields the commands of a document: in blocks, where some spaces end them, and between backticks."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "").replace("``", "`") + "\n"
    blocks = [block for language, block in FENCE.findall(text) if language == ""]
    blocks += INDENTED.findall(FENCE.sub("", text))
    for block in blocks:
        yield from (re.split(r" {3,}", line.strip())[0] for line in re.sub(r"\\\n *", "", block).splitlines())
    # A command between backticks may go over the end of a line.
    yield from (command.replace("\n", " ") for command in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def programs(line: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each program of ours that a command line starts, with its arguments. None where something is left out
    ("..."), and none for a mere mention, which has no arguments.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    if "..." in words:
        return
    words = [PLACEHOLDERS.get(word, word) for word in words if not re.match(r"[A-Z_]+=", word)]
    yield from ((program, arguments) for program, arguments in started(words) if arguments)


def started(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    if words[:1] == ["python"]:
        words = words[1:]
        if words[:2] == ["-m", "pycomm"]:
            words = words[1:]
    if words[:1] == ["torchrun"]:
        words = ["pycomm", "run", *words[1:]]
    if not words:
        return
    if words[0] == "pycomm" and words[1:2] and words[1] in commands():
        yield "pycomm", words[1:]
        scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
        if words[1] == "run" and scripts:
            yield from started(words[scripts[0] :])
    elif re.fullmatch(r"(benchmarks|examples|tests)/[\w/]+\.py", words[0]):
        own, _, inner = " ".join(words).partition(" -- ")
        yield own.split()[0], own.split()[1:] + (["--", *inner.split()] if inner else [])
        yield from started(inner.split())
    elif words[0] == "make":
        yield "make", [word for word in words[1:] if "=" not in word]


class Parsed(BaseException):
    """The arguments are good."""


def refused(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ``program`` ends by a usage error. Nothing of it runs but its parser."""
    if program == "make":
        rules = (ROOT / "Makefile").read_text(encoding="utf-8")
        return not all(re.search(rf"^{re.escape(target)}:", rules, re.MULTILINE) for target in arguments)
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*positional: Any, **named: Any) -> None:
        parse(*positional, **named)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        patch.setattr(sys, "argv", [program, *arguments])
        try:
            if program == "pycomm":
                main(arguments)
            else:
                patch.syspath_prepend(str((ROOT / program).parent))
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except Parsed:
            return False
        except SystemExit as end:
            return end.code == 2
    raise AssertionError(f"{program} has no parser: it ran")


@pytest.mark.parametrize("document", DOCUMENTS + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_take_their_arguments(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {(program, *arguments) for line in shell_lines(document) for program, arguments in programs(line)}
    assert seen or document.name not in ("README.md", "tuning.md"), "commands are no longer found"
    assert [" ".join(command) for command in sorted(seen) if refused(command[0], list(command[1:]), monkeypatch)] == []
